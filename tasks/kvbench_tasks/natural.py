"""The lexicon for real models: RULER's own prompts over English."""

from __future__ import annotations

import functools
import json
import math
import random
import string
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from itertools import cycle, islice, pairwise
from typing import Any

from kvbench_tasks import natural_long
from kvbench_tasks.fitting import Doc, Plan, scatter, shuffle
from kvbench_tasks.lexicon import Lexicon, Niah, Tokens
from kvbench_tasks.words import prose, words, words_of

_COMMON = 10
_ICL = 500  # tokens that RULER gives its worked example of variable tracking
_DEPTHS = [round(100 * i / 39) / 100 for i in range(40)]


@functools.cache
def prompts() -> dict[str, Any]:
    """RULER's prompts, verbatim."""
    text = files("kvbench_tasks.ruler").joinpath("prompts.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def framed(
    kind: str, template: str, body: str, outputs: list[str], before: str = "", **names: object
) -> Doc:
    """A row from a template of RULER: the question begins where `{context}` and its gap end.

    Args:
        kind: Which of RULER's prompts; gives answer prefix and length.
        template: The prompt.
        body: What stands for `{context}`.
        outputs: Reference answers.
        before: Comes before the prompt, e.g. a worked example.
        names: Fill the template's other fields.
    """
    head, tail = template.split("{context}")
    question = tail.lstrip()
    gap = tail[: len(tail) - len(question)]
    prompt = prompts()[kind]
    return {
        "context": before + head.format(**names) + body + gap,
        "question": question.format(**names),
        "gen_prefix": prompt["answer_prefix"].format(**names).strip(),
        "outputs": outputs,
        "until": [],
        "max_new_tokens": prompt["tokens_to_generate"],
    }


class NaturalLexicon(Lexicon):
    """See `Lexicon`."""

    def niah(self, task: Niah, depths: Sequence[float] | None = None) -> list[Plan]:
        """RULER's needles; an essay is cut to the word, other haystacks to the line."""
        prompt = prompts()["niah"]
        taken: set[str] = set()
        rng = self.streams["needles"]
        keys = [_fresh(task.key, rng, taken) for _ in range(task.keys)]
        values = [[_fresh(task.value, rng, taken) for _ in range(task.values)] for _ in keys]
        fields: dict[str, str] = {"type_needle_v": task.value}
        needle = prompt["needle"]
        told = [
            needle.format(key=key, value=value, **fields)
            for key, own in zip(keys, values, strict=True)
            for value in own
        ]
        rng.shuffle(told)
        where = self.streams["depth"]
        if depths is None and task.haystack == "essay":
            depths = where.sample(_DEPTHS, len(told))
        elif depths is None:
            depths = [where.random() for _ in told]
        needles = list(zip(depths, told, strict=True))
        asked = self.streams["query"].sample(range(task.keys), task.queries)
        names = [keys[q] for q in asked]
        fields["query"] = ", ".join(names[:-1]) + ", and " + names[-1] if names[1:] else names[0]
        outputs = [value for q in asked for value in values[q]]
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

    def vt(self, hops: int) -> list[Plan]:
        """Variable tracking after a worked example, which is left out where room is short."""
        prompt = prompts()["variable_tracking"]
        chain, value, outputs = self._chain(hops, 5, "chain")

        def build(n: int, example: str = "") -> Doc:
            body = self._noisy(n, chain)
            fields = {"query": value, "num_v": hops + 1}
            template = prompt["template"]
            return framed("variable_tracking", template, body, outputs, example, **fields)

        example = self._vt_example(hops, min(_ICL, self.length // 8))
        return [Plan(lambda n: build(n, example)), Plan(build)] if example else [Plan(build)]

    def cwe(self) -> list[Plan]:
        """RULER's counts, 30:3 from 4096 tokens on, 6:1 below; no example and 3:1 if need be."""
        prompt = prompts()["common_words_extraction"]
        large = self.length >= 4096
        wanted = ((40, 10, 3), (30, 3)) if large else ((20, 3, 1), (6, 1))
        # About four tokens an item, three at the least: compounds where single words would run out.
        most = (self.length // 3 - 10 * wanted[1][0]) // wanted[1][1]
        simple = most + 50 <= len(_single_words())
        draw = _distinct("singles" if simple else "compounds", self.streams["words"])
        pool = list(islice(draw, len(_single_words()) if simple else min(most + 60, 100_000)))

        def listed(
            chosen: Sequence[str], often: int, rarely: int, order: str
        ) -> tuple[str, list[str]]:
            common = list(chosen[:_COMMON])
            bag = common * often + list(chosen[_COMMON:]) * rarely
            shuffle(self.streams.fresh(order), bag)
            return _numbered(bag), common

        def plan(example: tuple[int, int, int] | None, often: int, rarely: int) -> Plan:
            shown = example[0] if example else 0
            before = ""
            if example:
                body, common = listed(pool[:shown], *example[1:], "example")
                before = prompt["template"].format(context=body) + prompt["answer_prefix"]
                before += _numbered(common) + "\n"

            def build(n: int) -> Doc:
                body, common = listed(pool[shown : shown + n], often, rarely, "order")
                template = prompt["template"]
                return framed("common_words_extraction", template, body, common, before)

            return Plan(build, least=_COMMON + 1, most=len(pool) - shown)

        tiers = [(wanted[0], *wanted[1])]
        if large:
            tiers.append(((20, 3, 1), 6, 1))
        return [plan(*t) for t in tiers] + [plan(None, 6, 1), plan(None, 3, 1)]

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
            counts[4:] = [min(c, counts[3] - 1) for c in counts[4:]]  # the third is no tie
            bag = [word for word, c in zip(code, counts, strict=True) for _ in range(c)]
            shuffle(self.streams.fresh("order"), bag)
            template = prompt["template"]
            return framed("freq_words_extraction", template, " ".join(bag), code[1:4])

        return [Plan(build, least=27)]

    def listing(self, tokens: Tokens) -> list[Plan]:
        """Sentences that state an item each; see `natural_long`."""
        items = _distinct("compounds", self.streams["items"])
        return natural_long.listing(self.streams, self.length, tokens, items)

    def passage(self, tokens: Tokens) -> list[Plan]:
        """Sentences of generated prose, among others; see `natural_long`."""
        return natural_long.passage(self.streams, self.length, tokens)

    def steps(self, tokens: Tokens) -> list[Plan]:
        """Two chains, one of which is asked for; see `natural_long`."""
        return natural_long.steps(self.streams, self.length, tokens)

    def dialogue(self, turns: int, facts: int) -> list[Plan]:
        """A talk in which codes are told and asked; see `natural_long`."""
        keys = _distinct("compounds", self.streams["keys"])
        return natural_long.dialogue(self.streams, turns, facts, keys)

    # --- pieces -----------------------------------------------------------------------------------

    def _haystack(self, task: Niah, taken: set[str]) -> tuple[Callable[[int], list[str]], str]:
        """The first n units of a haystack, between which needles may be, and their joint."""
        if task.haystack == "noise":
            return lambda n: [prompts()["niah"]["noise"]] * n, "\n"
        if task.haystack == "essay":
            if self.essay is None:
                sentences: Iterator[Sequence[str]] = prose(self.streams["prose"])
            else:
                sentences = cycle(self.essay())
            return words_of(sentences), " "
        rng = self.streams["others"]
        needle = prompts()["niah"]["needle"]
        made: list[str] = []

        def take(n: int) -> list[str]:
            while len(made) < n:
                key, value = _fresh(task.key, rng, taken), _fresh(task.value, rng, taken)
                made.append(needle.format(type_needle_v=task.value, key=key, value=value))
            return made[:n]

        return take, "\n"

    def _chain(
        self, hops: int, letters: int, purpose: str
    ) -> tuple[list[tuple[float, str]], str, list[str]]:
        """The statements of a chain with their depths, its value, its variables."""
        rng = self.streams[purpose]
        names: dict[str, None] = {}
        while len(names) <= hops:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        chain = list(names)
        value = str(rng.randint(10000, 99999))
        texts = [f"VAR {chain[0]} = {value}"]
        texts += [f"VAR {b} = VAR {a} " for a, b in pairwise(chain)]
        depths = sorted(rng.random() for _ in texts)
        return list(zip(depths, texts, strict=True)), value, chain

    def _noisy(self, n: int, chain: Sequence[tuple[float, str]]) -> str:
        noise = prompts()["variable_tracking"]["noise"]
        return " ".join(scatter([noise] * n, chain)).replace(". \n", ".\n")

    def _vt_example(self, hops: int, most: int) -> str:
        """A solved task of about `most` tokens (four characters each); empty where none fits."""
        prompt = prompts()["variable_tracking"]
        chain, value, names = self._chain(hops, 3, "example")

        def text(n: int) -> str:
            body = self._noisy(n, chain)
            question = prompt["template"].format(context=body, query=value)
            prefix = prompt["answer_prefix"].format(num_v=hops + 1, query=value)
            return f"{question}{prefix} {' '.join(names)}\n\n\n\n"

        count = 5
        while count and len(text(count)) > 4 * most:
            count -= 1
        while len(text(count + 1)) <= 4 * most:
            count += 1
        return text(count) if len(text(count)) <= 4 * most else ""


def _numbered(items: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(items, 1))


@functools.cache
def _single_words() -> tuple[str, ...]:
    return words("nouns") + words("adjectives") + words("verbs")


def _random(kind: str, rng: random.Random) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(words('adjectives'))}-{rng.choice(words('nouns'))}"


def _fresh(kind: str, rng: random.Random, taken: set[str]) -> str:
    """A key or value that this sample has not used yet."""
    while True:
        made = _random(kind, rng)
        if made not in taken:
            taken.add(made)
            return made


def _distinct(kind: str, rng: random.Random) -> Iterator[str]:
    if kind == "singles":
        yield from rng.sample(_single_words(), len(_single_words()))
    taken: set[str] = set()
    while True:
        yield _fresh("words", rng, taken)
