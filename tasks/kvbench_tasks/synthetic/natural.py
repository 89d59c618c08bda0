"""Lexicon for real models: RULER's English prompts."""

from __future__ import annotations

import functools
import json
import math
import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from itertools import cycle, pairwise
from typing import Any

from kvbench.data import manual
from kvbench_tasks.synthetic import natural_facts, natural_long, ruler_words
from kvbench_tasks.synthetic.fitting import Doc, HaystackPlan, largest, scatter, shuffle
from kvbench_tasks.synthetic.lexicon import Lexicon, Niah, Tokens
from kvbench_tasks.synthetic.words import prose, words_of

_COMMON = 10
_VT_EXAMPLE = 500
"""Tokens of RULER's worked example of variable tracking, without its answer."""
_DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]


@functools.cache
def prompts() -> dict[str, Any]:
    """Return RULER's prompts, verbatim."""
    json_text = files("kvbench_tasks.synthetic").joinpath("prompts.json").read_text(encoding="utf-8")
    templates: dict[str, Any] = json.loads(json_text)
    return templates


def framed(
    prompt_name: str,
    template: str,
    context: str,
    outputs: list[str],
    preamble: str = "",
    **fields: object,
) -> Doc:
    """Return a row from one of RULER's templates.

    The question begins after `{context}` and the white space that follows it.

    Args:
        prompt_name: Name of RULER's prompt, which determines answer prefix and answer length.
        template: The prompt.
        context: Replaces `{context}`.
        outputs: Reference answers.
        preamble: Text before the prompt in the user's message, such as a worked example.
        fields: Values of the template's other fields.
    """
    opening, ending = template.split("{context}")
    question = ending.lstrip()
    whitespace = ending[: len(ending) - len(question)]
    prompt = prompts()[prompt_name]
    return {
        "context": preamble + opening.format(**fields) + context + whitespace,
        "question": question.format(**fields),
        # RULER's prefix begins with the space that joins it to the question; the harness adds it.
        "gen_prefix": prompt["answer_prefix"].format(**fields).lstrip(),
        "outputs": outputs,
        "until": [],
        "max_new_tokens": prompt["tokens_to_generate"],
    }


class NaturalLexicon(Lexicon):
    """See `Lexicon`."""

    def niah(self, task: Niah, depths: Sequence[float] | None = None) -> list[HaystackPlan]:
        """Hide RULER's needles. An essay is truncated at a word, other haystacks at a line."""
        prompt = prompts()["niah"]
        used_strings: set[str] = set()
        generator = self.streams["needles"]
        keys = [self._fresh(task.key, generator, used_strings) for _ in range(task.keys)]
        values = [[self._fresh(task.value, generator, used_strings) for _ in range(task.values)] for _ in keys]
        fields: dict[str, str] = {"type_needle_v": task.value}
        needle_template = prompt["needle"]
        statements = [
            needle_template.format(key=key, value=value, **fields)
            for key, key_values in zip(keys, values, strict=True)
            for value in key_values
        ]
        generator.shuffle(statements)
        depth_generator = self.streams["depth"]
        if depths is None and task.haystack == "essay":
            depths = depth_generator.sample(_DEPTHS, len(statements))
        elif depths is None:
            depths = [depth_generator.random() for _ in statements]
        needles = list(zip(depths, statements, strict=True))
        query_indices = self.streams["query"].sample(range(task.keys), task.queries)
        query_keys = [keys[key_index] for key_index in query_indices]
        fields["query"] = ", ".join(query_keys[:-1]) + ", and " + query_keys[-1] if query_keys[1:] else query_keys[0]
        outputs = [value for key_index in query_indices for value in values[key_index]]
        haystack, separator = self._haystack(task, used_strings)
        is_single = task.queries * task.values == 1

        def build(haystack_size: int) -> Doc:
            context = separator.join(scatter(haystack(haystack_size), needles))
            if not is_single:
                return framed("niah", prompt["template"], context, outputs, **fields)
            # RULER's singular forms, replaced in its order.
            template = prompt["template"].replace("Some", "A").replace("are all", "is")
            template = template.replace("are", "is").replace("answers", "answer")
            doc = framed("niah", template, context, outputs, **{**fields, "type_needle_v": task.value[:-1]})
            return {**doc, "gen_prefix": doc["gen_prefix"].removesuffix(" are") + " is"}

        return [HaystackPlan(build)]

    def vt(self, hops: int, count_tokens: Tokens) -> list[HaystackPlan]:
        """Track variables after a worked example, which is omitted if it does not fit."""
        prompt = prompts()["variable_tracking"]
        statements, value, variables = self._chain(hops, 5, "chain")

        def build(line_count: int, worked_example: str = "") -> Doc:
            context = self._noisy(line_count, statements, "places")
            fields = {"query": value, "num_v": hops + 1}
            template = prompt["template"]
            return framed("variable_tracking", template, context, variables, worked_example, **fields)

        worked_example = self._vt_example(hops, min(_VT_EXAMPLE, self.length // 8), count_tokens)
        return (
            [
                HaystackPlan(lambda line_count: build(line_count, worked_example)),
                HaystackPlan(build),
            ]
            if worked_example
            else [HaystackPlan(build)]
        )

    def cwe(self) -> list[HaystackPlan]:
        """List words, ten of them frequently.

        The counts are RULER's: 30 and 3 from 4096 tokens on, 6 and 1 below; if that does not fit, 3 and 1 without a
        worked example. As in RULER, the words of the example and of the task are drawn independently.
        """
        prompt = prompts()["common_words_extraction"]
        self.uses(ruler_words.release())
        vocabulary = ruler_words.all_words()
        word_pool = self.streams["words"].sample(vocabulary, len(vocabulary))
        example_generator = self.streams["example words"]

        def number_words(
            selection: Sequence[str], common_repeats: int, rare_repeats: int, purpose: str
        ) -> tuple[str, list[str]]:
            common_words = list(selection[:_COMMON])
            word_list = common_words * common_repeats + list(selection[_COMMON:]) * rare_repeats
            shuffle(self.streams.fresh(purpose), word_list)
            return _numbered(word_list), common_words

        def plan(example_counts: tuple[int, int, int] | None, common_repeats: int, rare_repeats: int) -> HaystackPlan:
            shots = []
            if example_counts:
                example_size, example_common, example_rare = example_counts
                context, common_words = number_words(
                    example_generator.sample(vocabulary, example_size),
                    example_common,
                    example_rare,
                    "example",
                )
                answer = f"{prompt['answer_prefix'].lstrip()} {_numbered(common_words)}"
                question = prompt["template"].format(context=context)
                shots = [{"user": question, "assistant": answer, "end": "\n"}]

            def build(word_count: int) -> Doc:
                context, common_words = number_words(word_pool[:word_count], common_repeats, rare_repeats, "order")
                doc = framed("common_words_extraction", prompt["template"], context, common_words)
                return {**doc, "shots": shots} if shots else doc

            exhausted = f"its {len(vocabulary):,} words"
            return HaystackPlan(build, min_units=_COMMON + 1, max_units=len(vocabulary), exhausted=exhausted)

        small_plan = plan((20, 3, 1), 6, 1)
        large_plans = [plan((40, 10, 3), 30, 3)] if self.length >= 4096 else []
        return [*large_plans, small_plan, plan(None, 6, 1), plan(None, 3, 1)]

    def fwe(self) -> list[HaystackPlan]:
        """Coded words with Zipf-like counts (exponent 2.0); the most frequent one is `...`."""
        prompt = prompts()["freq_words_extraction"]
        generator = self.streams["words"]
        coded_words: dict[str, None] = {"...": None}
        while len(coded_words) <= max(20, self.length // 50):
            coded_words["".join(generator.choices(string.ascii_lowercase, k=6))] = None
        ranked_words = list(coded_words)
        zeta = math.pi**2 / 6

        def build(word_count: int) -> Doc:
            word_counts = [int(word_count / zeta / rank**2) for rank in range(1, len(ranked_words) + 1)]
            word_counts[4:] = [min(repeats, word_counts[3] - 1) for repeats in word_counts[4:]]  # the third has no tie
            word_list = [word for word, repeats in zip(ranked_words, word_counts, strict=True) for _ in range(repeats)]
            shuffle(self.streams.fresh("order"), word_list)
            template = prompt["template"]
            return framed("freq_words_extraction", template, " ".join(word_list), ranked_words[1:4])

        return [HaystackPlan(build, min_units=27)]

    def listing(self, count_tokens: Tokens) -> list[HaystackPlan]:
        """Sentences that state an item each; see `natural_long`."""
        return natural_long.listing(self.streams, self.length, count_tokens)

    def passage(self, count_tokens: Tokens) -> list[HaystackPlan]:
        """Sentences of generated prose, among others; see `natural_long`."""
        return natural_long.passage(self.streams, self.length, count_tokens)

    def steps(self, count_tokens: Tokens) -> list[HaystackPlan]:
        """Two chains, one of which is asked for; see `natural_long`."""
        return natural_long.steps(self.streams, self.length, count_tokens)

    def dialogue(self, turns: int, facts: int) -> list[HaystackPlan]:
        """A dialogue in which codes are told and asked for; see `natural_long`."""
        return natural_long.dialogue(self.streams, turns, facts)

    def fact(self) -> list[HaystackPlan]:
        """A fact about a person in Python's manual; see `natural_facts`."""
        self.uses(f"manual-{manual.digest()}")
        return natural_facts.fact(self.streams)

    # --- needles ----------------------------------------------------------------------------------

    def _haystack(self, task: Niah, used_strings: set[str]) -> tuple[Callable[[int], list[str]], str]:
        """Return a function for the first n units of a haystack, between which needles may stand, and their
        separator.
        """
        if task.haystack == "noise":
            return lambda unit_count: [prompts()["niah"]["noise"]] * unit_count, "\n"
        if task.haystack == "essay":
            if self.essay is None:
                self.uses("generated-prose")
                sentences: Iterator[Sequence[str]] = prose(self.streams["prose"])
            else:
                self.uses("essays")
                sentences = cycle(self.essay)
            return words_of(sentences), " "
        generator = self.streams["others"]
        needle_template = prompts()["niah"]["needle"]
        needle_lines: list[str] = []

        def take(unit_count: int) -> list[str]:
            while len(needle_lines) < unit_count:
                key, value = (self._fresh(kind, generator, used_strings) for kind in (task.key, task.value))
                needle_lines.append(needle_template.format(type_needle_v=task.value, key=key, value=value))
            return needle_lines[:unit_count]

        return take, "\n"

    def _fresh(self, kind: str, generator: random.Random, used_strings: set[str]) -> str:
        """Draw a key or value that this sample has not used yet."""
        while True:
            candidate = self._random(kind, generator)
            if candidate not in used_strings:
                used_strings.add(candidate)
                return candidate

    def _random(self, kind: str, generator: random.Random) -> str:
        if kind == "numbers":
            return str(generator.randint(10**6, 10**7 - 1))
        if kind == "uuids":
            return str(uuid.UUID(int=generator.getrandbits(128), version=4))
        self.uses(ruler_words.release())
        return f"{generator.choice(ruler_words.adjectives())}-{generator.choice(ruler_words.nouns())}"

    # --- variable tracking ------------------------------------------------------------------------

    def _chain(self, hops: int, name_length: int, purpose: str) -> tuple[list[str], str, list[str]]:
        """Return the statements of a chain of assignments, its value, and its variables."""
        generator = self.streams[purpose]
        distinct_names: dict[str, None] = {}
        while len(distinct_names) <= hops:
            distinct_names["".join(generator.choices(string.ascii_uppercase, k=name_length))] = None
        variables = list(distinct_names)
        value = str(generator.randrange(10000, 99999))
        statements = [f"VAR {variables[0]} = {value}"]
        statements += [f"VAR {variable} = VAR {source} " for source, variable in pairwise(variables)]
        return statements, value, variables

    def _noisy(self, line_count: int, statements: Sequence[str], purpose: str) -> str:
        """Insert statements before random lines of n lines of noise, at most one per line."""
        generator = self.streams.fresh(purpose)
        if line_count >= len(statements):
            line_indices = generator.sample(range(line_count), len(statements))
        else:  # RULER has no task this short
            line_indices = generator.choices(range(line_count + 1), k=len(statements))
        lines = [prompts()["variable_tracking"]["noise"]] * line_count
        # From the last one backwards: an insertion shifts only what follows it.
        for line_index, statement in reversed(list(zip(sorted(line_indices), statements, strict=True))):
            lines.insert(line_index, statement)
        return "\n".join(lines)

    def _vt_example(self, hops: int, max_tokens: int, count_tokens: Tokens) -> str:
        """Return a solved example whose prompt has at most `max_tokens` tokens; "" if none fits."""
        prompt = prompts()["variable_tracking"]
        statements, value, variables = self._chain(hops, 3, "example")

        def render_example(line_count: int) -> str:
            context = self._noisy(line_count, statements, "example places")
            question = prompt["template"].format(context=context, query=value)
            answer_prefix = prompt["answer_prefix"].format(num_v=hops + 1, query=value)
            return f"{question}{answer_prefix}"

        noise_lines = largest(lambda line_count: count_tokens(render_example(line_count)), max_tokens, max_tokens)
        return f"{render_example(noise_lines)} {' '.join(variables)}\n\n" if noise_lines else ""


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
