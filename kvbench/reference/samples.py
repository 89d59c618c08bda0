"""Training samples in the language of the reference model.

A sample is one sequence: ``<bos>``, a context, then as many questions with their answers as fit.
Only answers are learned. Every sample is a pure function of its random generator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from kvbench.reference import grammar
from kvbench.reference.pool import Statement, WordPool, interleave

IDS: dict[str, int] = {word: index for index, word in enumerate(grammar.VOCABULARY)}

_COMMON = 10
_TOP = 3


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Difficulty of samples; pairs are inclusive ranges.

    Attributes:
        values: Values of a key that has several.
        plural: Maximum number of keys with several values.
        spread: Minimum words of a sequence per such key.
        hops: Hops of a chain after its first statement.
        long_hops: Maximum hops of the occasional long chain.
        items: Maximum entries of a list.
        copied: Maximum words of a passage.
        questions: Maximum questions in one sequence.
        noise: Fraction of haystacks that are one repeated sentence.
        plain_noise: The same for single needles and chains, which RULER hides in noise.
        full: Fraction of many-needle haystacks that contain only needles.
        fewest: Minimum needles with two-word keys.
    """

    values: tuple[int, int] = (2, 4)
    plural: int = 8
    spread: int = 48
    hops: tuple[int, int] = (0, 6)
    long_hops: int = 24
    items: int = 48
    copied: int = 96
    questions: int = 24
    noise: float = 0.12
    plain_noise: float = 0.12
    full: float = 0.25
    fewest: int = 2


@dataclasses.dataclass
class NeedleQuestion:
    """A question and its answer.

    Attributes:
        task: Skill that it trains: a key of `TASKS`, or a part of "mixed".
        prompt: Words of the question.
        answer: Words of the answer, with its full stop.
        any_order: Whether the words before the full stop may come in any order.
    """

    task: str
    prompt: list[str]
    answer: list[str]
    any_order: bool = False

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclasses.dataclass
class Sample:
    """A training sequence.

    Attributes:
        parts: Questions, and the words of the context before them, in order.
    """

    parts: list[list[str] | NeedleQuestion]


Content = tuple[list[Statement], list[NeedleQuestion]]
"""Statements of a context, and questions about them."""


def facts(word_pool: WordPool, keys: Sequence[list[str]], value_size: int) -> Content:
    """Return a needle with a value of `value_size` words, and its question, for each of `keys`."""
    generator = word_pool.rng
    task_name = "single" if len(keys) == 1 else "multikey" if value_size == 2 else "uuid"
    statements: list[Statement] = []
    questions = []
    for fact_key in keys:
        fact_value = word_pool.free(value_size)
        statements.append((generator.random(), grammar.needle(fact_key, fact_value)))
        questions.append(NeedleQuestion(task_name, grammar.ask(fact_key), grammar.answer([fact_value])))
    return statements, questions


def _single(word_pool: WordPool, word_limit: int, difficulty: Knobs) -> Content:
    return facts(word_pool, [word_pool.reserve(1)], 2)


def _multikey(word_pool: WordPool, word_limit: int, difficulty: Knobs) -> Content:
    # From RULER's four needles in an essay to a haystack of only needles.
    max_count = min(400, word_limit // 6)
    needle_count = max_count if word_pool.rng.random() < difficulty.full else word_pool.log_between(3, max_count)
    return facts(word_pool, [[needle_key] for needle_key in word_pool.reserve(needle_count)], 2)


def _uuid(word_pool: WordPool, word_limit: int, difficulty: Knobs) -> Content:
    max_count = min(250, (word_limit - 12) // 8)
    pair_count = (
        max_count
        if word_pool.rng.random() < difficulty.full + 0.05
        else word_pool.log_between(difficulty.fewest, max_count)
    )
    key_words = word_pool.reserve(min(300, word_pool.between(int(pair_count**0.5) + 2, 2 * pair_count + 2)))
    key_pairs = {
        tuple(key_words[word_index] for word_index in key_pair)
        for key_pair in word_pool.rng.integers(0, len(key_words), size=(pair_count, 2)).tolist()
    }
    return facts(word_pool, [list(key_pair) for key_pair in sorted(key_pairs)], 4)


def _multivalue(word_pool: WordPool, word_limit: int, difficulty: Knobs) -> Content:
    generator = word_pool.rng
    max_plural = max(1, min(difficulty.plural, word_limit // difficulty.spread))
    single_count = word_pool.between(0, min(8, word_limit // 64))
    plural_count = word_pool.log_between(1, max_plural)
    needle_keys = word_pool.reserve(single_count + plural_count)
    statements, questions = facts(word_pool, [[needle_key] for needle_key in needle_keys[:single_count]], 2)
    for question in questions:
        question.task = "multikey"
    for needle_key in needle_keys[single_count:]:
        statement_times = np.sort(generator.random(word_pool.between(*difficulty.values))).tolist()
        key_values = [word_pool.free(2) for _ in statement_times]
        statements += [
            (statement_time, grammar.needle([needle_key], key_value))
            for statement_time, key_value in zip(statement_times, key_values, strict=True)
        ]
        # Ask about these first; later questions may not fit.
        questions.insert(0, NeedleQuestion("multivalue", grammar.ask([needle_key]), grammar.answer(key_values)))
    return statements, questions


def _multiquery(word_pool: WordPool, word_limit: int, difficulty: Knobs) -> Content:
    needle_count = word_pool.log_between(4, min(48, word_limit // 14))
    needle_keys = word_pool.reserve(needle_count)
    statements, single_questions = facts(word_pool, [[needle_key] for needle_key in needle_keys], 2)
    needle_values = [question.answer[:-1] for question in single_questions]
    questions = []
    for _ in range(word_pool.between(1, 6)):
        key_indices = word_pool.rng.permutation(needle_count)[: word_pool.between(2, 6)].tolist()
        asked_keys = [needle_keys[index] for index in key_indices]
        answer_words = grammar.answer_each(asked_keys, [needle_values[index] for index in key_indices])
        questions.append(NeedleQuestion("multiquery", grammar.ask_each(asked_keys), answer_words))
    return statements, questions


def _chain(word_pool: WordPool, word_limit: int, difficulty: Knobs) -> Content:
    generator = word_pool.rng
    statements: list[Statement] = []
    questions = []
    is_long = difficulty.long_hops > difficulty.hops[1] and word_limit >= 250 and generator.random() < 0.15
    chain_count = 1 if is_long else word_pool.between(1, min(4, word_limit // 30))
    for _ in range(chain_count):
        min_hops, max_hops = (8, min(difficulty.long_hops, word_limit // 8)) if is_long else difficulty.hops
        hop_count = word_pool.between(min_hops, min(max_hops, word_limit // (5 * chain_count) - 1))
        variables = word_pool.reserve(hop_count + 2)
        statement_times = np.sort(generator.random(hop_count + 1)).tolist()
        statements += [
            (statement_time, grammar.assign(source, variable))
            for statement_time, source, variable in zip(statement_times, variables[:-1], variables[1:], strict=True)
        ]
        # A question about a variable midway asks for the variables after it.
        question_starts = sorted({0, *(word_pool.between(0, hop_count) for _ in range(3))})
        questions += [
            NeedleQuestion(
                "vt",
                grammar.ask_chain(variables[start]),
                grammar.answer_words(variables[start + 1 :]),
            )
            for start in question_starts
        ]
    return statements, questions


def _list(word_pool: WordPool, word_limit: int, difficulty: Knobs) -> Content:
    entry_count = word_pool.log_between(4, min(difficulty.items, (word_limit - 4) // 9))
    entry_values = [word_pool.free(2) for _ in range(entry_count)]
    statements = [
        (word_pool.rng.random(), grammar.item(number, entry_value))
        for number, entry_value in enumerate(entry_values, 1)
    ]
    return statements, [NeedleQuestion("list", grammar.ask_list(), grammar.answer_list(entry_values))]


def _copy(word_pool: WordPool, word_limit: int, difficulty: Knobs) -> Content:
    max_words = min(difficulty.copied, (word_limit - 5) // 2)
    word_count = word_pool.log_between(min(8, max_words), max_words)
    passage_words = word_pool.reserve(word_count)
    if word_pool.rng.random() < 0.5:
        word_pool.release(passage_words)  # they may also occur in the filler
    question = NeedleQuestion("copy", grammar.ask_copy(), grammar.answer_words(passage_words))
    return [(word_pool.rng.random(), grammar.passage(passage_words))], [question]


def _mixed(word_pool: WordPool, word_limit: int, difficulty: Knobs) -> Content:
    task_builders = (_multikey, _multivalue, _multiquery, _chain, _uuid)
    task_indices = word_pool.rng.permutation(len(task_builders))[: word_pool.between(2, 3)]
    statements: list[Statement] = []
    questions: list[NeedleQuestion] = []
    for task_index in task_indices:
        task_content = task_builders[task_index](word_pool, word_limit // (len(task_indices) + 1), difficulty)
        statements += task_content[0]
        questions += task_content[1]
    return statements, questions


def _from_content(make_content: Callable[[WordPool, int, Knobs], Content]) -> Callable[..., Sample]:
    """Return a generator of samples: the context, then as many questions as fit."""

    def make_sample(generator: np.random.Generator, length: int, difficulty: Knobs) -> Sample:
        is_plain = make_content in (_single, _chain)
        word_pool = WordPool(generator, difficulty.plain_noise if is_plain else difficulty.noise)
        statements, questions = make_content(word_pool, length - 1, difficulty)
        if make_content is not _multivalue:
            questions = [questions[index] for index in generator.permutation(len(questions))]
        word_limit = length - 1 - sum(len(statement_words) for _, statement_words in statements)
        fitting_questions: list[list[str] | NeedleQuestion] = []
        for question in questions[: difficulty.questions]:
            if len(question) <= word_limit:
                fitting_questions.append(question)
                word_limit -= len(question)
        if not fitting_questions:
            raise ValueError("no question fits")
        context_size = length - 1 - sum(len(fitting_question) for fitting_question in fitting_questions)
        return Sample([[grammar.BOS, *interleave(word_pool, statements, context_size)], *fitting_questions])

    return make_sample


def _dialogue(generator: np.random.Generator, length: int, difficulty: Knobs) -> Sample:
    """Return turns with new facts; each turn asks for one of its own or an earlier turn's."""
    word_pool = WordPool(generator, difficulty.noise)
    turn_count = word_pool.between(2, max(2, min(8, length // 40)))
    facts_per_turn = word_pool.between(1, 4)
    turn_keys = [word_pool.reserve(facts_per_turn) for _ in range(turn_count)]
    filler_shares = generator.dirichlet(np.full(turn_count, 3.0))
    word_limit = length - 1 - turn_count * (1 + 5 + 5 * facts_per_turn)
    sample_parts: list[list[str] | NeedleQuestion] = [[grammar.BOS]]
    open_questions: list[NeedleQuestion] = []
    for new_keys, filler_share in zip(turn_keys, filler_shares, strict=True):
        statements, questions = facts(word_pool, [[fact_key] for fact_key in new_keys], 2)
        open_questions += questions
        turn_size = 5 * facts_per_turn + int(filler_share * word_limit)
        sample_parts.append(grammar.turn(interleave(word_pool, statements, turn_size)))
        question = open_questions.pop(word_pool.between(0, len(open_questions) - 1))
        sample_parts.append(dataclasses.replace(question, task="dialogue"))
    return Sample(sample_parts)


def _repeat(generator: np.random.Generator, length: int, difficulty: Knobs) -> Sample:
    """Return a repeated sequence of random words, from which induction heads form."""
    period = int(generator.integers(4, max(5, length // 2)))
    period_words = [grammar.WORDS[word_index] for word_index in generator.integers(0, len(grammar.WORDS), size=period)]
    repeated_words = (period_words * (length // period + 1))[: length - 3 - period]
    return Sample(
        [
            [grammar.BOS, *period_words],
            NeedleQuestion("repeat", repeated_words[:1], repeated_words[1:]),
        ]
    )


def _common(generator: np.random.Generator, length: int, difficulty: Knobs) -> Sample:
    """Return a bag of words in which ten are about ten times as frequent as the others."""
    word_pool = WordPool(generator)
    word_limit = length - 1 - 2 - _COMMON - 1
    repeats = max(2, int(generator.uniform(0.35, 0.5) * word_limit / _COMMON))
    common_words = word_pool.reserve(_COMMON)
    rare_repeats = max(1, round(repeats / generator.uniform(6, 12)))
    rare_size = word_limit - repeats * _COMMON
    rare_words = word_pool.reserve(min(440, -(-rare_size // rare_repeats)))
    if len(rare_words) * (repeats - 1) < rare_size:
        raise ValueError("too little room for ten common words")
    word_bag = (rare_words * (rare_size // len(rare_words) + 1))[:rare_size] + common_words * repeats
    shuffled_words = [word_bag[word_index] for word_index in generator.permutation(len(word_bag))]
    question = NeedleQuestion("cwe", grammar.ask_common(), grammar.answer_words(common_words), any_order=True)
    return Sample([[grammar.BOS, *shuffled_words], question])


def _frequent(generator: np.random.Generator, length: int, difficulty: Knobs) -> Sample:
    """Return a bag of words with Zipf-like counts (RULER's fwe has the exponent 2.0)."""
    word_pool = WordPool(generator)
    word_limit = length - 1 - 2 - _TOP - 1
    zipf_exponent = 2.0 if generator.random() < 0.4 else generator.uniform(1.4, 2.4)
    skipped_ranks = int(generator.integers(0, 2))  # RULER leaves out the most frequent rank
    zipf_shares = np.arange(1 + skipped_ranks, 250, dtype=np.float64) ** -zipf_exponent
    word_counts = np.maximum(1, np.floor(zipf_shares / zipf_shares.sum() * word_limit)).astype(int)
    word_counts = word_counts[: int(np.searchsorted(np.cumsum(word_counts), word_limit)) + 1]
    word_counts[-1] -= max(0, int(word_counts.sum()) - word_limit)
    word_counts[0] += word_limit - int(word_counts.sum())
    if not word_counts[0] > word_counts[1] > word_counts[2] > word_counts[3]:
        raise ValueError("no clear order in so little room")
    ranked_words = word_pool.reserve(len(word_counts))
    word_bag = [
        ranked_word for ranked_word, count in zip(ranked_words, word_counts.tolist(), strict=True) for _ in range(count)
    ]
    shuffled_words = [word_bag[word_index] for word_index in generator.permutation(len(word_bag))]
    question = NeedleQuestion("fwe", grammar.ask_top(), grammar.answer_words(ranked_words[:_TOP]))
    return Sample([[grammar.BOS, *shuffled_words], question])


TASKS: dict[str, Callable[[np.random.Generator, int, Knobs], Sample]] = {
    "repeat": _repeat,
    "single": _from_content(_single),
    "multikey": _from_content(_multikey),
    "uuid": _from_content(_uuid),
    "multivalue": _from_content(_multivalue),
    "multiquery": _from_content(_multiquery),
    "vt": _from_content(_chain),
    "list": _from_content(_list),
    "copy": _from_content(_copy),
    "mixed": _from_content(_mixed),
    "dialogue": _dialogue,
    "cwe": _common,
    "fwe": _frequent,
}


def draw(generator: np.random.Generator, task_name: str, length: int, difficulty: Knobs) -> Sample:
    """Return a sample of `task_name` of at most `length` words, including ``<bos>``.

    Raises:
        KeyError: There is no such task.
        RuntimeError: `length` is too small for the task.
    """
    for _ in range(50):
        try:
            return TASKS[task_name](generator, length, difficulty)
        except ValueError:  # this draw does not fit
            continue
    raise RuntimeError(f"no sample of {task_name!r} fits into {length} words")
