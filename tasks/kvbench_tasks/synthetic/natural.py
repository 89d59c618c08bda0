"""The lexicon for real models: RULER's own prompts in English."""

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
from kvbench_tasks.synthetic.fitting import Doc, Plan, largest, scatter, shuffle
from kvbench_tasks.synthetic.lexicon import Lexicon, Niah, Tokens
from kvbench_tasks.synthetic.words import prose, words_of

_COMMON = 10
_VT_EXAMPLE = 500
"""Tokens of RULER's worked example of variable tracking, without its answer."""
_DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]


@functools.cache
def prompts() -> dict[str, Any]:
    """RULER's prompts, verbatim."""
    text = files("kvbench_tasks.synthetic").joinpath("prompts.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def framed(
    kind: str, template: str, body: str, outputs: list[str], before: str = "", **names: object
) -> Doc:
    """Make a row from one of RULER's templates.

    The question begins after `{context}` and the white space that follows it.

    Args:
        kind: Which of RULER's prompts; gives answer prefix and answer length.
        template: The prompt.
        body: Replaces `{context}`.
        outputs: Reference answers.
        before: Precedes the prompt in the user's message, such as a worked example.
        names: Fill the template's other fields.
    """
    head, tail = template.split("{context}")
    question = tail.lstrip()
    gap = tail[: len(tail) - len(question)]
    prompt = prompts()[kind]
    return {
        "context": before + head.format(**names) + body + gap,
        "question": question.format(**names),
        # RULER's prefix begins with the space that joins it to the question; the harness adds it.
        "gen_prefix": prompt["answer_prefix"].format(**names).lstrip(),
        "outputs": outputs,
        "until": [],
        "max_new_tokens": prompt["tokens_to_generate"],
    }


class NaturalLexicon(Lexicon):
    """See `Lexicon`."""

    def niah(self, task: Niah, depths: Sequence[float] | None = None) -> list[Plan]:
        """Hide RULER's needles. An essay is cut to the word, other haystacks to the line."""
        prompt = prompts()["niah"]
        taken: set[str] = set()
        rng = self.streams["needles"]
        keys = [self._fresh(task.key, rng, taken) for _ in range(task.keys)]
        values = [[self._fresh(task.value, rng, taken) for _ in range(task.values)] for _ in keys]
        fields: dict[str, str] = {"type_needle_v": task.value}
        needle = prompt["needle"]
        stated = [
            needle.format(key=key, value=value, **fields)
            for key, values_of_key in zip(keys, values, strict=True)
            for value in values_of_key
        ]
        rng.shuffle(stated)
        depth_rng = self.streams["depth"]
        if depths is None and task.haystack == "essay":
            depths = depth_rng.sample(_DEPTHS, len(stated))
        elif depths is None:
            depths = [depth_rng.random() for _ in stated]
        needles = list(zip(depths, stated, strict=True))
        queried = self.streams["query"].sample(range(task.keys), task.queries)
        names = [keys[q] for q in queried]
        fields["query"] = ", ".join(names[:-1]) + ", and " + names[-1] if names[1:] else names[0]
        outputs = [value for q in queried for value in values[q]]
        haystack, joint = self._haystack(task, taken)
        single = task.queries * task.values == 1

        def build(n: int) -> Doc:
            body = joint.join(scatter(haystack(n), needles))
            if not single:
                return framed("niah", prompt["template"], body, outputs, **fields)
            # RULER's singular forms, replaced in its order.
            template = prompt["template"].replace("Some", "A").replace("are all", "is")
            template = template.replace("are", "is").replace("answers", "answer")
            doc = framed(
                "niah", template, body, outputs, **{**fields, "type_needle_v": task.value[:-1]}
            )
            return {**doc, "gen_prefix": doc["gen_prefix"].removesuffix(" are") + " is"}

        return [Plan(build)]

    def vt(self, hops: int, tokens: Tokens) -> list[Plan]:
        """Track variables after a worked example, which is left out where it does not fit."""
        prompt = prompts()["variable_tracking"]
        statements, value, variables = self._chain(hops, 5, "chain")

        def build(n: int, example: str = "") -> Doc:
            body = self._noisy(n, statements, "places")
            fields = {"query": value, "num_v": hops + 1}
            template = prompt["template"]
            return framed("variable_tracking", template, body, variables, example, **fields)

        example = self._vt_example(hops, min(_VT_EXAMPLE, self.length // 8), tokens)
        return [Plan(lambda n: build(n, example)), Plan(build)] if example else [Plan(build)]

    def cwe(self) -> list[Plan]:
        """List words, ten of them often.

        The counts are RULER's: 30 and 3 from 4096 tokens on, 6 and 1 below; where that does not
        fit, 3 and 1 without a worked example. RULER draws the words of the example and of the task
        independently of each other.
        """
        prompt = prompts()["common_words_extraction"]
        self.uses(ruler_words.release())
        words = ruler_words.all_words()
        pool = self.streams["words"].sample(words, len(words))
        examples = self.streams["example words"]

        def listed(
            chosen: Sequence[str], often: int, rarely: int, order: str
        ) -> tuple[str, list[str]]:
            common = list(chosen[:_COMMON])
            bag = common * often + list(chosen[_COMMON:]) * rarely
            shuffle(self.streams.fresh(order), bag)
            return _numbered(bag), common

        def plan(example: tuple[int, int, int] | None, often: int, rarely: int) -> Plan:
            shots = []
            if example:
                count, most, least = example
                body, common = listed(examples.sample(words, count), most, least, "example")
                answer = f"{prompt['answer_prefix'].lstrip()} {_numbered(common)}"
                question = prompt["template"].format(context=body)
                shots = [{"user": question, "assistant": answer, "end": "\n"}]

            def build(n: int) -> Doc:
                body, common = listed(pool[:n], often, rarely, "order")
                doc = framed("common_words_extraction", prompt["template"], body, common)
                return {**doc, "shots": shots} if shots else doc

            exhausted = f"its {len(words):,} words"
            return Plan(build, least=_COMMON + 1, most=len(words), exhausted=exhausted)

        small = plan((20, 3, 1), 6, 1)
        large = [plan((40, 10, 3), 30, 3)] if self.length >= 4096 else []
        return [*large, small, plan(None, 6, 1), plan(None, 3, 1)]

    def fwe(self) -> list[Plan]:
        """Coded words with Zipf-like counts (exponent 2.0); the most frequent one is `...`."""
        prompt = prompts()["freq_words_extraction"]
        rng = self.streams["words"]
        coded: dict[str, None] = {"...": None}
        while len(coded) <= max(20, self.length // 50):
            coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
        code = list(coded)
        zeta = math.pi**2 / 6

        def build(n: int) -> Doc:
            counts = [int(n / zeta / rank**2) for rank in range(1, len(code) + 1)]
            counts[4:] = [min(c, counts[3] - 1) for c in counts[4:]]  # the third has no tie
            bag = [word for word, c in zip(code, counts, strict=True) for _ in range(c)]
            shuffle(self.streams.fresh("order"), bag)
            template = prompt["template"]
            return framed("freq_words_extraction", template, " ".join(bag), code[1:4])

        return [Plan(build, least=27)]

    def listing(self, tokens: Tokens) -> list[Plan]:
        """Sentences that state an item each; see `natural_long`."""
        return natural_long.listing(self.streams, self.length, tokens)

    def passage(self, tokens: Tokens) -> list[Plan]:
        """Sentences of generated prose, among others; see `natural_long`."""
        return natural_long.passage(self.streams, self.length, tokens)

    def steps(self, tokens: Tokens) -> list[Plan]:
        """Two chains, one of which is asked for; see `natural_long`."""
        return natural_long.steps(self.streams, self.length, tokens)

    def dialogue(self, turns: int, facts: int) -> list[Plan]:
        """A dialogue in which codes are told and asked for; see `natural_long`."""
        return natural_long.dialogue(self.streams, turns, facts)

    def fact(self) -> list[Plan]:
        """A fact about a person in Python's manual; see `natural_facts`."""
        self.uses(f"manual-{manual.digest()}")
        return natural_facts.fact(self.streams)

    # --- needles ----------------------------------------------------------------------------------

    def _haystack(self, task: Niah, taken: set[str]) -> tuple[Callable[[int], list[str]], str]:
        """The first n units of a haystack, between which needles may stand, and what joins them."""
        if task.haystack == "noise":
            return lambda n: [prompts()["niah"]["noise"]] * n, "\n"
        if task.haystack == "essay":
            if self.essay is None:
                self.uses("generated-prose")
                sentences: Iterator[Sequence[str]] = prose(self.streams["prose"])
            else:
                self.uses("essays")
                sentences = cycle(self.essay)
            return words_of(sentences), " "
        rng = self.streams["others"]
        needle = prompts()["niah"]["needle"]
        made: list[str] = []

        def take(n: int) -> list[str]:
            while len(made) < n:
                key, value = (self._fresh(kind, rng, taken) for kind in (task.key, task.value))
                made.append(needle.format(type_needle_v=task.value, key=key, value=value))
            return made[:n]

        return take, "\n"

    def _fresh(self, kind: str, rng: random.Random, taken: set[str]) -> str:
        """A key or value that this sample has not used yet."""
        while True:
            made = self._random(kind, rng)
            if made not in taken:
                taken.add(made)
                return made

    def _random(self, kind: str, rng: random.Random) -> str:
        if kind == "numbers":
            return str(rng.randint(10**6, 10**7 - 1))
        if kind == "uuids":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        self.uses(ruler_words.release())
        return f"{rng.choice(ruler_words.adjectives())}-{rng.choice(ruler_words.nouns())}"

    # --- variable tracking ------------------------------------------------------------------------

    def _chain(self, hops: int, letters: int, purpose: str) -> tuple[list[str], str, list[str]]:
        """The statements of a chain of assignments, its value, and its variables."""
        rng = self.streams[purpose]
        names: dict[str, None] = {}
        while len(names) <= hops:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        variables = list(names)
        value = str(rng.randrange(10000, 99999))
        statements = [f"VAR {variables[0]} = {value}"]
        statements += [f"VAR {b} = VAR {a} " for a, b in pairwise(variables)]
        return statements, value, variables

    def _noisy(self, n: int, statements: Sequence[str], purpose: str) -> str:
        """Statements before random ones of n lines of noise, one statement a line."""
        rng = self.streams.fresh(purpose)
        if n >= len(statements):
            places = rng.sample(range(n), len(statements))
        else:  # RULER has no task this short
            places = rng.choices(range(n + 1), k=len(statements))
        lines = [prompts()["variable_tracking"]["noise"]] * n
        # From the last one back: an insertion moves only what stands after it.
        for place, statement in reversed(list(zip(sorted(places), statements, strict=True))):
            lines.insert(place, statement)
        return "\n".join(lines)

    def _vt_example(self, hops: int, most: int, tokens: Tokens) -> str:
        """A solved task of at most so many tokens before its answer; empty where none fits."""
        prompt = prompts()["variable_tracking"]
        statements, value, variables = self._chain(hops, 3, "example")

        def text(n: int) -> str:
            body = self._noisy(n, statements, "example places")
            question = prompt["template"].format(context=body, query=value)
            prefix = prompt["answer_prefix"].format(num_v=hops + 1, query=value)
            return f"{question}{prefix}"

        lines = largest(lambda n: tokens(text(n)), most, most)
        return f"{text(lines)} {' '.join(variables)}\n\n" if lines else ""


def _numbered(items: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(items, 1))
