"""Lexicon of the reference model: short templates over its pool of 512 words.

Keys and variables occur only in their statements and questions. Sizes are in words; one word is one token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from kvbench.errors import UserError
from kvbench.reference import grammar
from kvbench_tasks.synthetic.fitting import Doc, HaystackPlan, apart, fewer, scatter, shuffle
from kvbench_tasks.synthetic.lexicon import Lexicon, Niah, Tokens, asked_facts

_MOST_KEYS = 400  # leaves enough words for values and filler
_COMMON = 10
_TOP = 3
# Sizes at which the model answers reliably with its full cache; it was trained on up to 48, 96 and 24.
_ITEMS = 32
_COPIED = 80
_HOPS = 24
_FACT = 4
_FRAME = {"user": f"{grammar.turn([])[0]} ", "assistant": " ", "end": f" {grammar.STOP} "}


class ReferenceLexicon(Lexicon):
    """See `Lexicon`."""

    _pool: list[str] | None = None

    def niah(self, task: Niah, depths: Sequence[float] | None = None) -> list[HaystackPlan]:
        """Plan needles `note K a b .`; a uuid is four words, and its key two (as in training).

        Several values of several keys are asked for one key at a time: the row then has `each`, a question and its
        answers per key.
        """
        has_uuids = task.value == "uuids"
        distractor_count = 0
        if task.haystack == "needle":
            distractor_count = self.length // (8 if has_uuids else 5)
        if has_uuids:
            key_words = self._reserve(min(300, max(8, distractor_count)))
            keys = self._pairs(key_words, task.keys + distractor_count)
        else:
            keys = [[word] for word in self._reserve(min(_MOST_KEYS, task.keys + distractor_count))]
        values = [[self._free(4 if has_uuids else 2) for _ in range(task.values)] for _ in keys]
        generator = self.streams["depth"]
        if depths is None:
            depths = [generator.random() for _ in range(task.keys * task.values)]
        placements = sorted(
            (depths[key_index * task.values + value_index], key_index, value_index)
            for key_index in range(task.keys)
            for value_index in range(task.values)
        )
        needles = [
            (depth, _text(grammar.needle(keys[key_index], values[key_index][value_index])))
            for depth, key_index, value_index in placements
        ]
        distractors = [
            (generator.random(), grammar.needle(key, value[0]))
            for key, value in zip(keys[task.keys :], values[task.keys :], strict=True)
        ]
        query_indices = self.streams["query"].sample(range(task.keys), task.queries)
        query_values = [
            [values[key_index][value_index] for _, key_index, value_index in placements if key_index == query_index]
            for query_index in query_indices
        ]
        # Training has no question for several values of several keys.
        asked_apart = task.queries > 1 and task.values > 1
        if task.queries == 1 or asked_apart:
            question, answer = grammar.ask(keys[query_indices[0]]), grammar.answer(query_values[0])
        else:
            query_names = [keys[query_index][0] for query_index in query_indices]
            question = grammar.ask_each(query_names)
            answer = grammar.answer_each(query_names, [value for (value,) in query_values])
        output_texts = [[_text(value) for value in key_values] for key_values in query_values]
        outputs = (
            output_texts[0] if asked_apart else [value_text for key_values in output_texts for value_text in key_values]
        )
        key_questions = [
            {"question": _text(grammar.ask(keys[query_index])), "outputs": key_values}
            for query_index, key_values in zip(query_indices, output_texts, strict=True)
        ]
        filler = self._filler("noise" if task.haystack == "noise" else "essay")

        def build(haystack_size: int) -> Doc:
            distractor_size = len(distractors[0][1]) if distractors else 1
            included_count = min(haystack_size // distractor_size, len(distractors))
            inserted = [(depth, _text(sentence)) for depth, sentence in distractors[:included_count]]
            segments = scatter(filler(haystack_size - included_count * distractor_size), needles + inserted)
            doc = self._doc(segments, question, outputs, answer)
            return {**doc, "each": key_questions} if asked_apart else doc

        return [HaystackPlan(build)]

    def vt(self, hops: int, count_tokens: Tokens) -> list[HaystackPlan]:
        """Plan statements `let SOURCE VARIABLE .` among noise; all variables are asked for."""
        variables = self._reserve(hops + 2)
        generator = self.streams["depth"]
        depths = sorted(generator.random() for _ in range(hops + 1))
        statements = [
            (depth, _text(grammar.assign(source, variable)))
            for depth, source, variable in zip(depths, variables[:-1], variables[1:], strict=True)
        ]
        filler = self._filler("noise")

        def build(haystack_size: int) -> Doc:
            return self._doc(
                scatter(filler(haystack_size), statements),
                grammar.ask_chain(variables[0]),
                variables[1:],
                grammar.answer_words(variables[1:]),
            )

        return [HaystackPlan(build)]

    def cwe(self) -> list[HaystackPlan]:
        """Ten words make up two fifths of the list; each is ten times as frequent as any other."""
        common_words = self._reserve(_COMMON)
        rare_words = self._reserve(440)

        def build(haystack_size: int) -> Doc:
            common_repeats = max(3, round(0.4 * haystack_size / _COMMON))
            rare_repeats = max(1, round(common_repeats / 10))
            rare_count = max(0, haystack_size - common_repeats * _COMMON)
            distinct_words = rare_words[: -(-rare_count // rare_repeats)]
            rare_entries = (distinct_words * (rare_count // max(1, len(distinct_words)) + 1))[:rare_count]
            word_list = common_words * common_repeats + rare_entries
            shuffle(self.streams.fresh("order"), word_list)
            return self._doc(word_list, grammar.ask_common(), common_words, grammar.answer_words(common_words))

        return [HaystackPlan(build, min_units=60)]

    def fwe(self) -> list[HaystackPlan]:
        """Plan coded words with frequencies k^-2; the first rank is excluded, as in RULER."""
        vocabulary = self._reserve(250)
        rank_weights = [rank**-2.0 for rank in range(2, len(vocabulary) + 2)]
        frequencies = [weight / sum(rank_weights) for weight in rank_weights]

        def build(haystack_size: int) -> Doc:
            word_counts = [int(haystack_size * frequency) for frequency in frequencies]
            # Words too rare for a whole count get one each; the rest goes to the first word.
            zero_count = word_counts.count(0)
            single_count = min(zero_count, haystack_size - sum(word_counts))
            word_counts[len(word_counts) - zero_count :] = [1] * single_count + [0] * (zero_count - single_count)
            word_counts[0] += haystack_size - sum(word_counts)
            word_list = [word for word, repeats in zip(vocabulary, word_counts, strict=True) for _ in range(repeats)]
            shuffle(self.streams.fresh("order"), word_list)
            answer = grammar.answer_words(vocabulary[:_TOP])
            return self._doc(word_list, grammar.ask_top(), vocabulary[:_TOP], answer)

        return [HaystackPlan(build, min_units=60)]

    def listing(self, count_tokens: Tokens) -> list[HaystackPlan]:
        """Plan statements `item #N a b .`; the answer is `#1 a b , #2 c d .`."""
        values = [_text(self._free(2)) for _ in range(_ITEMS)]
        filler, generator = self._filler("essay"), self.streams["depth"]
        depths = [generator.random() for _ in values]

        def plan(item_count: int) -> HaystackPlan:
            listed_values = values[:item_count]
            statements = [
                (depth, _text(grammar.item(number, value.split())))
                for number, (depth, value) in enumerate(zip(depths, listed_values, strict=False), 1)
            ]
            answer = grammar.answer_list([value.split() for value in listed_values])

            def build(haystack_size: int) -> Doc:
                doc = self._doc(
                    scatter(filler(haystack_size), statements),
                    grammar.ask_list(),
                    listed_values,
                    answer,
                )
                return {**doc, "form": "numbered"}

            return HaystackPlan(build)

        return [plan(item_count) for item_count in fewer(_ITEMS)]

    def passage(self, count_tokens: Tokens) -> list[HaystackPlan]:
        """Plan a passage `begin a b c end` whose words occur nowhere else."""
        passage_words = self._reserve(_COPIED)
        filler, depth = self._filler("essay"), self.streams["depth"].random()

        def plan(word_count: int) -> HaystackPlan:
            statements = [(depth, _text(grammar.passage(passage_words[:word_count])))]
            answer = grammar.answer_words(passage_words[:word_count])

            def build(haystack_size: int) -> Doc:
                segments = scatter(filler(haystack_size), statements)
                doc = self._doc(segments, grammar.ask_copy(), passage_words[:word_count], answer)
                return {**doc, "form": "words"}

            return HaystackPlan(build)

        return [plan(word_count) for word_count in fewer(_COPIED)]

    def steps(self, count_tokens: Tokens) -> list[HaystackPlan]:
        """Plan a long chain of `vt` statements among varying sentences."""
        variables = self._reserve(_HOPS + 2)
        generator, filler = self.streams["depth"], self._filler("essay")
        depths = [generator.random() for _ in variables[1:]]

        def plan(step_count: int) -> HaystackPlan:
            statements = [
                (depth, _text(grammar.assign(source, variable)))
                for depth, source, variable in zip(
                    sorted(depths[:step_count]), variables[:step_count], variables[1:], strict=False
                )
            ]
            chain_variables = variables[1 : step_count + 1]

            def build(haystack_size: int) -> Doc:
                question, answer = (
                    grammar.ask_chain(variables[0]),
                    grammar.answer_words(chain_variables),
                )
                doc = self._doc(scatter(filler(haystack_size), statements), question, chain_variables, answer)
                return {**doc, "form": "words"}

            return HaystackPlan(build)

        return [plan(step_count) for step_count in fewer(_HOPS + 1)]

    def dialogue(self, turns: int, facts: int) -> list[HaystackPlan]:
        """Plan turns `user ... note K a b . ... <q> K a b .`, as in training."""
        keys = self._reserve(turns * facts)
        values = [self._free(2) for _ in keys]
        fact_texts = [_text(grammar.needle(key, value)) for key, value in zip(keys, values, strict=True)]
        generator = self.streams["depth"]
        depths = [generator.random() for _ in fact_texts]

        def plan(turn_count: int) -> HaystackPlan:
            query_facts = asked_facts(self.streams.fresh("query"), turn_count, facts)
            split_sizes = apart(self.streams.fresh("shares"), turn_count)
            fillers = [self._filler("essay", f"filler {turn_index}") for turn_index in range(turn_count)]

            def build(haystack_size: int) -> Doc:
                turn_docs = []
                for turn_index, (query_fact, filler_size) in enumerate(
                    zip(query_facts, split_sizes(haystack_size), strict=True)
                ):
                    turn_facts = range(turn_index * facts, (turn_index + 1) * facts)
                    placements = [(depths[fact_index], fact_texts[fact_index]) for fact_index in turn_facts]
                    answer = grammar.answer([values[query_fact]])
                    doc = self._doc(
                        scatter(fillers[turn_index](filler_size), placements),
                        grammar.ask(keys[query_fact]),
                        [_text(values[query_fact])],
                        answer,
                    )
                    extra = {"age": turn_index - query_fact // facts}
                    turn_docs.append({**doc, "answer": _text(answer[:-1]), "extra": extra})
                return {"turns": turn_docs, "frame": _FRAME}

            return HaystackPlan(build)

        return [plan(turn_count) for turn_count in range(turns, 1, -1)]

    def fact(self) -> list[HaystackPlan]:
        """Plan a passage `begin a b c d end` of words that occur nowhere else; `<q> copy` asks for it."""
        fact_words = self._reserve(_FACT)
        filler, depth = self._filler("essay"), self.streams["depth"].random()
        passage = _text(grammar.passage(fact_words))

        def build(haystack_size: int) -> Doc:
            segments = scatter(filler(haystack_size), [(depth, passage)])
            answer = grammar.answer_words(fact_words)
            doc = self._doc(segments, grammar.ask_copy(), [_text(fact_words)], answer)
            return {**doc, "extra": {"needle": passage}}

        return [HaystackPlan(build)]

    # --- words ------------------------------------------------------------------------------------

    def _unused_words(self) -> list[str]:
        if self._pool is None:
            self._pool = list(grammar.WORDS)
            shuffle(self.streams["pool"], self._pool)
        return self._pool

    def _reserve(self, word_count: int) -> list[str]:
        """Draw words that nothing else draws."""
        unused_words = self._unused_words()
        if word_count > len(unused_words) - 32:
            raise UserError(f"the reference vocabulary has fewer than {word_count} unused words")
        self._pool = unused_words[word_count:]
        return unused_words[:word_count]

    def _free(self, word_count: int) -> list[str]:
        """Draw words, with repetition, that nothing has reserved."""
        return self.streams["free"].choices(self._unused_words(), k=word_count)

    def _pairs(self, vocabulary: Sequence[str], pair_count: int) -> list[list[str]]:
        generator = self.streams["pairs"]
        pair_codes = generator.sample(range(len(vocabulary) ** 2), min(pair_count, len(vocabulary) ** 2))
        return [
            [vocabulary[pair_code // len(vocabulary)], vocabulary[pair_code % len(vocabulary)]]
            for pair_code in pair_codes
        ]

    def _filler(self, haystack: str, purpose: str = "filler") -> Callable[[int], list[str]]:
        """Return a function that gives sentences with n words in total; the last may be truncated."""
        unused_words, generator = self._unused_words(), self.streams[purpose]
        noise_sentence = grammar.sentence(generator.choices(unused_words, k=generator.randint(5, 9)))
        sentences: list[list[str]] = []
        sentence_texts: list[str] = []
        end_offsets = [0]  # words up to the end of each sentence

        def take(word_count: int) -> list[str]:
            while end_offsets[-1] < word_count:
                sentence_words = generator.choices(unused_words, k=generator.randint(4, 11))
                sentences.append(noise_sentence if haystack == "noise" else grammar.sentence(sentence_words))
                sentence_texts.append(_text(sentences[-1]))
                end_offsets.append(end_offsets[-1] + len(sentences[-1]))
            complete_count = bisect_right(end_offsets, max(0, word_count)) - 1
            partial_text = (
                _text(sentences[complete_count][: word_count - end_offsets[complete_count]])
                if word_count > end_offsets[complete_count]
                else ""
            )
            return [*sentence_texts[:complete_count], partial_text] if partial_text else sentence_texts[:complete_count]

        return take

    def _doc(self, context: Sequence[str], question: Sequence[str], outputs: list[str], answer: list[str]) -> Doc:
        return {
            "context": _text(context) + " ",
            "question": _text(question),
            "outputs": outputs,
            "until": [grammar.STOP],
            "max_new_tokens": len(answer),
        }


def _text(words: Sequence[str]) -> str:
    return " ".join(words)
