"""The lexicon of the reference model: short templates over its pool of 512 words.

Keys and variables occur nowhere but where they are stated and asked for. Sizes are in words; one
word is one token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbench.errors import UserError
from kvbench.reference import grammar
from kvbench_tasks.fitting import Doc, Plan, scatter
from kvbench_tasks.lexicon import Lexicon, Niah

_MOST_KEYS = 400  # leaves words enough for values and filler
_COMMON = 10
_TOP = 3


class ReferenceLexicon(Lexicon):
    """See `Lexicon`."""

    _pool: list[str] | None = None

    def niah(self, task: Niah, depths: Sequence[float] | None = None) -> list[Plan]:
        """Needles `note K a b .`; a uuid is four words, and its key two (as in training)."""
        long = task.value == "uuids"
        crowd = 0
        if task.haystack == "needle":
            crowd = self.length // (8 if long else 5)
        if long:
            names = self._reserve(min(300, max(8, crowd)))
            keys = self._pairs(names, task.keys + crowd)
        else:
            keys = [[k] for k in self._reserve(min(_MOST_KEYS, task.keys + crowd))]
        values = [[self._free(4 if long else 2) for _ in range(task.values)] for _ in keys]
        rng = self.streams["depth"]
        if depths is None:
            depths = [rng.random() for _ in range(task.keys * task.values)]
        told = sorted(
            (depths[k * task.values + v], k, v)
            for k in range(task.keys)
            for v in range(task.values)
        )
        needles = [(d, _text(grammar.needle(keys[k], values[k][v]))) for d, k, v in told]
        others = [
            (rng.random(), grammar.needle(key, value[0]))
            for key, value in zip(keys[task.keys :], values[task.keys :], strict=True)
        ]
        asked = self.streams["query"].sample(range(task.keys), task.queries)
        found = [[values[k][v] for _, k, v in told if k == q] for q in asked]
        if task.queries > 1:
            names_asked = [keys[q][0] for q in asked]
            question = grammar.ask_each(names_asked)
            answer = grammar.answer_each(names_asked, [value for (value,) in found])
        else:
            question, answer = grammar.ask(keys[asked[0]]), grammar.answer(found[0])
        outputs = [_text(value) for values_found in found for value in values_found]
        filler = self._filler("noise" if task.haystack == "noise" else "essay")

        def build(n: int) -> Doc:
            size = len(others[0][1]) if others else 1
            count = min(n // size, len(others))
            crowded = [(depth, _text(words)) for depth, words in others[:count]]
            pieces = scatter(filler(n - count * size), needles + crowded)
            return self._doc(pieces, question, outputs, answer)

        return [Plan(build)]

    def vt(self, hops: int) -> list[Plan]:
        """Statements `let SOURCE VARIABLE .` among noise; all variables of the chain are asked."""
        names = self._reserve(hops + 2)
        rng = self.streams["depth"]
        depths = sorted(rng.random() for _ in range(hops + 1))
        chain = [
            (depth, _text(grammar.assign(source, variable)))
            for depth, source, variable in zip(depths, names[:-1], names[1:], strict=True)
        ]
        filler = self._filler("noise")

        def build(n: int) -> Doc:
            return self._doc(
                scatter(filler(n), chain),
                grammar.ask_chain(names[0]),
                names[1:],
                grammar.answer_words(names[1:]),
            )

        return [Plan(build)]

    def cwe(self) -> list[Plan]:
        """Ten words make two fifths of the list; each is ten times as frequent as the others."""
        words = self._reserve(_COMMON)
        others = self._reserve(440)

        def build(n: int) -> Doc:
            often = max(3, round(0.4 * n / _COMMON))
            rarely = max(1, round(often / 10))
            left = max(0, n - often * _COMMON)
            kinds = others[: -(-left // rarely)]
            rare = (kinds * (left // max(1, len(kinds)) + 1))[:left]
            bag = words * often + rare
            self.streams.fresh("order").shuffle(bag)
            return self._doc(bag, grammar.ask_common(), words, grammar.answer_words(words))

        return [Plan(build, least=60)]

    def fwe(self) -> list[Plan]:
        """Word k of the code has a share of k^-2; as in RULER the first rank is left out."""
        words = self._reserve(250)
        zeta = [k**-2.0 for k in range(2, len(words) + 2)]
        shares = [z / sum(zeta) for z in zeta]

        def build(n: int) -> Doc:
            counts = [int(n * share) for share in shares]
            # Words too rare for a whole count fill up with one each; what is left is the first's.
            rare = counts.count(0)
            ones = min(rare, n - sum(counts))
            counts[len(counts) - rare :] = [1] * ones + [0] * (rare - ones)
            counts[0] += n - sum(counts)
            bag = [word for word, c in zip(words, counts, strict=True) for _ in range(c)]
            self.streams.fresh("order").shuffle(bag)
            answer = grammar.answer_words(words[:_TOP])
            return self._doc(bag, grammar.ask_top(), words[:_TOP], answer)

        return [Plan(build, least=60)]

    # --- words ------------------------------------------------------------------------------------

    def _left(self) -> list[str]:
        if self._pool is None:
            self._pool = list(grammar.WORDS)
            self.streams["pool"].shuffle(self._pool)
        return self._pool

    def _reserve(self, count: int) -> list[str]:
        """Words that nothing else draws."""
        left = self._left()
        if count > len(left) - 32:
            raise UserError(f"the reference vocabulary has no {count} words to spare")
        self._pool = left[count:]
        return left[:count]

    def _free(self, count: int) -> list[str]:
        """Words, with repetition, that nothing has reserved."""
        return self.streams["free"].choices(self._left(), k=count)

    def _pairs(self, names: Sequence[str], count: int) -> list[list[str]]:
        rng = self.streams["pairs"]
        chosen = rng.sample(range(len(names) ** 2), min(count, len(names) ** 2))
        return [[names[c // len(names)], names[c % len(names)]] for c in chosen]

    def _filler(self, kind: str) -> Callable[[int], list[str]]:
        """Sentences of n words in all, the last one cut off."""
        left, rng = self._left(), self.streams["filler"]
        fixed = grammar.sentence(rng.choices(left, k=rng.randint(5, 9)))
        sentences: list[list[str]] = []

        def take(n: int) -> list[str]:
            units: list[str] = []
            used = 0
            while used < n:
                if len(units) == len(sentences):
                    words = rng.choices(left, k=rng.randint(4, 11))
                    sentences.append(fixed if kind == "noise" else grammar.sentence(words))
                words = sentences[len(units)][: n - used]
                units.append(_text(words))
                used += len(words)
            return units

        return take

    def _doc(
        self, context: Sequence[str], question: Sequence[str], outputs: list[str], answer: list[str]
    ) -> Doc:
        return {
            "context": _text(context) + " ",
            "question": _text(question),
            "outputs": outputs,
            "until": [grammar.STOP],
            "max_new_tokens": len(answer),
        }


def _text(words: Sequence[str]) -> str:
    return " ".join(words)
