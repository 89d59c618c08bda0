"""The lexicon of the reference model: short templates over its pool of 512 words.

Keys and variables occur only where they are stated and asked for. Sizes are in words; one word is
one token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from kvbench.errors import UserError
from kvbench.reference import grammar
from kvbench_tasks.synthetic.fitting import Doc, Plan, apart, fewer, scatter, shuffle
from kvbench_tasks.synthetic.lexicon import Lexicon, Niah, Tokens, asked_facts

_MOST_KEYS = 400  # leaves enough words for values and filler
_COMMON = 10
_TOP = 3
# The sizes at which the model answers reliably with its full cache; it was trained on up to 48, 96
# and 24.
_ITEMS = 32
_COPIED = 80
_HOPS = 24
_FACT = 4
_FRAME = {"user": f"{grammar.turn([])[0]} ", "assistant": " ", "end": f" {grammar.STOP} "}


class ReferenceLexicon(Lexicon):
    """See `Lexicon`."""

    _pool: list[str] | None = None

    def niah(self, task: Niah, depths: Sequence[float] | None = None) -> list[Plan]:
        """Needles `note K a b .`; a uuid is four words, and its key two (as in training).

        Several values of several keys are asked for key by key: the row then has `each`, a question
        and its answers for every key.
        """
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
        # Training has no question for several values of several keys.
        apart = task.queries > 1 and task.values > 1
        if task.queries == 1 or apart:
            question, answer = grammar.ask(keys[asked[0]]), grammar.answer(found[0])
        else:
            names_asked = [keys[q][0] for q in asked]
            question = grammar.ask_each(names_asked)
            answer = grammar.answer_each(names_asked, [value for (value,) in found])
        texts = [[_text(value) for value in own] for own in found]
        outputs = texts[0] if apart else [text for own in texts for text in own]
        each = [
            {"question": _text(grammar.ask(keys[q])), "outputs": own}
            for q, own in zip(asked, texts, strict=True)
        ]
        filler = self._filler("noise" if task.haystack == "noise" else "essay")

        def build(n: int) -> Doc:
            size = len(others[0][1]) if others else 1
            count = min(n // size, len(others))
            crowded = [(depth, _text(words)) for depth, words in others[:count]]
            pieces = scatter(filler(n - count * size), needles + crowded)
            doc = self._doc(pieces, question, outputs, answer)
            return {**doc, "each": each} if apart else doc

        return [Plan(build)]

    def vt(self, hops: int, tokens: Tokens) -> list[Plan]:
        """Statements `let SOURCE VARIABLE .` among noise; all variables are asked for."""
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
        """Ten words make up two fifths of the list; each is ten times as frequent as any other."""
        words = self._reserve(_COMMON)
        others = self._reserve(440)

        def build(n: int) -> Doc:
            often = max(3, round(0.4 * n / _COMMON))
            rarely = max(1, round(often / 10))
            left = max(0, n - often * _COMMON)
            kinds = others[: -(-left // rarely)]
            rare = (kinds * (left // max(1, len(kinds)) + 1))[:left]
            bag = words * often + rare
            shuffle(self.streams.fresh("order"), bag)
            return self._doc(bag, grammar.ask_common(), words, grammar.answer_words(words))

        return [Plan(build, least=60)]

    def fwe(self) -> list[Plan]:
        """Word k of the code has a share of k^-2; the first rank is left out, as in RULER."""
        words = self._reserve(250)
        zeta = [k**-2.0 for k in range(2, len(words) + 2)]
        shares = [z / sum(zeta) for z in zeta]

        def build(n: int) -> Doc:
            counts = [int(n * share) for share in shares]
            # Words too rare for a whole count get one each; the rest goes to the first word.
            rare = counts.count(0)
            ones = min(rare, n - sum(counts))
            counts[len(counts) - rare :] = [1] * ones + [0] * (rare - ones)
            counts[0] += n - sum(counts)
            bag = [word for word, c in zip(words, counts, strict=True) for _ in range(c)]
            shuffle(self.streams.fresh("order"), bag)
            answer = grammar.answer_words(words[:_TOP])
            return self._doc(bag, grammar.ask_top(), words[:_TOP], answer)

        return [Plan(build, least=60)]

    def listing(self, tokens: Tokens) -> list[Plan]:
        """Statements `item #N a b .`; the answer is `#1 a b , #2 c d .`."""
        values = [_text(self._free(2)) for _ in range(_ITEMS)]
        filler, rng = self._filler("essay"), self.streams["depth"]
        depths = [rng.random() for _ in values]

        def plan(count: int) -> Plan:
            chosen = values[:count]
            items = [
                (depth, _text(grammar.item(i, value.split())))
                for i, (depth, value) in enumerate(zip(depths, chosen, strict=False), 1)
            ]
            answer = grammar.answer_list([value.split() for value in chosen])

            def build(n: int) -> Doc:
                doc = self._doc(scatter(filler(n), items), grammar.ask_list(), chosen, answer)
                return {**doc, "form": "numbered"}

            return Plan(build)

        return [plan(count) for count in fewer(_ITEMS)]

    def passage(self, tokens: Tokens) -> list[Plan]:
        """A passage `begin a b c end` whose words occur nowhere else."""
        words = self._reserve(_COPIED)
        filler, depth = self._filler("essay"), self.streams["depth"].random()

        def plan(count: int) -> Plan:
            passage = [(depth, _text(grammar.passage(words[:count])))]
            answer = grammar.answer_words(words[:count])

            def build(n: int) -> Doc:
                pieces = scatter(filler(n), passage)
                doc = self._doc(pieces, grammar.ask_copy(), words[:count], answer)
                return {**doc, "form": "words"}

            return Plan(build)

        return [plan(count) for count in fewer(_COPIED)]

    def steps(self, tokens: Tokens) -> list[Plan]:
        """The statements of `vt`, but a long chain of them, among sentences that vary."""
        names = self._reserve(_HOPS + 2)
        rng, filler = self.streams["depth"], self._filler("essay")
        depths = [rng.random() for _ in names[1:]]

        def plan(count: int) -> Plan:
            chain = [
                (depth, _text(grammar.assign(source, variable)))
                for depth, source, variable in zip(
                    sorted(depths[:count]), names[:count], names[1:], strict=False
                )
            ]
            found = names[1 : count + 1]

            def build(n: int) -> Doc:
                question, answer = grammar.ask_chain(names[0]), grammar.answer_words(found)
                doc = self._doc(scatter(filler(n), chain), question, found, answer)
                return {**doc, "form": "words"}

            return Plan(build)

        return [plan(count) for count in fewer(_HOPS + 1)]

    def dialogue(self, turns: int, facts: int) -> list[Plan]:
        """Turns `user ... note K a b . ... <q> K a b .`, as in training."""
        keys = self._reserve(turns * facts)
        values = [self._free(2) for _ in keys]
        told = [_text(grammar.needle(k, v)) for k, v in zip(keys, values, strict=True)]
        rng = self.streams["depth"]
        depths = [rng.random() for _ in told]

        def plan(count: int) -> Plan:
            asked = asked_facts(self.streams.fresh("query"), count, facts)
            shares = apart(self.streams.fresh("shares"), count)
            fillers = [self._filler("essay", f"filler {turn}") for turn in range(count)]

            def build(n: int) -> Doc:
                rows = []
                for turn, (fact, size) in enumerate(zip(asked, shares(n), strict=True)):
                    own = range(turn * facts, (turn + 1) * facts)
                    statements = [(depths[i], told[i]) for i in own]
                    answer = grammar.answer([values[fact]])
                    doc = self._doc(
                        scatter(fillers[turn](size), statements),
                        grammar.ask(keys[fact]),
                        [_text(values[fact])],
                        answer,
                    )
                    extra = {"age": turn - fact // facts}
                    rows.append({**doc, "answer": _text(answer[:-1]), "extra": extra})
                return {"turns": rows, "frame": _FRAME}

            return Plan(build)

        return [plan(count) for count in range(turns, 1, -1)]

    def fact(self) -> list[Plan]:
        """A passage `begin a b c d end` of words that are nowhere else; `<q> copy` asks for it."""
        words = self._reserve(_FACT)
        filler, depth = self._filler("essay"), self.streams["depth"].random()
        passage = _text(grammar.passage(words))

        def build(n: int) -> Doc:
            pieces = scatter(filler(n), [(depth, passage)])
            answer = grammar.answer_words(words)
            doc = self._doc(pieces, grammar.ask_copy(), [_text(words)], answer)
            return {**doc, "extra": {"needle": passage}}

        return [Plan(build)]

    # --- words ------------------------------------------------------------------------------------

    def _left(self) -> list[str]:
        if self._pool is None:
            self._pool = list(grammar.WORDS)
            shuffle(self.streams["pool"], self._pool)
        return self._pool

    def _reserve(self, count: int) -> list[str]:
        """Draw words that nothing else draws."""
        left = self._left()
        if count > len(left) - 32:
            raise UserError(f"the reference vocabulary has fewer than {count} unused words")
        self._pool = left[count:]
        return left[:count]

    def _free(self, count: int) -> list[str]:
        """Draw words, with repetition, that nothing has reserved."""
        return self.streams["free"].choices(self._left(), k=count)

    def _pairs(self, names: Sequence[str], count: int) -> list[list[str]]:
        rng = self.streams["pairs"]
        chosen = rng.sample(range(len(names) ** 2), min(count, len(names) ** 2))
        return [[names[c // len(names)], names[c % len(names)]] for c in chosen]

    def _filler(self, kind: str, purpose: str = "filler") -> Callable[[int], list[str]]:
        """Make a function that returns sentences of n words in all; the last may be cut off."""
        left, rng = self._left(), self.streams[purpose]
        fixed = grammar.sentence(rng.choices(left, k=rng.randint(5, 9)))
        sentences: list[list[str]] = []
        texts: list[str] = []
        ends = [0]  # words up to the end of each sentence

        def take(n: int) -> list[str]:
            while ends[-1] < n:
                words = rng.choices(left, k=rng.randint(4, 11))
                sentences.append(fixed if kind == "noise" else grammar.sentence(words))
                texts.append(_text(sentences[-1]))
                ends.append(ends[-1] + len(sentences[-1]))
            whole = bisect_right(ends, max(0, n)) - 1
            cut = _text(sentences[whole][: n - ends[whole]]) if n > ends[whole] else ""
            return [*texts[:whole], cut] if cut else texts[:whole]

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
