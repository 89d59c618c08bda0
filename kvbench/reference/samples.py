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
        noise: Share of haystacks that are one repeated sentence.
        plain_noise: The same for single needles and chains, which RULER puts into noise.
        full: Share of the haystacks of many needles that hold nothing else.
        fewest: Minimum needles with keys of two words.
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
class Question:
    """A question and its answer.

    Attributes:
        task: The skill that it exercises: a key of `TASKS`, or a part of "mixed".
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
    """A sequence.

    Attributes:
        parts: Questions, and the words of the context before them, in order.
    """

    parts: list[list[str] | Question]


Content = tuple[list[Statement], list[Question]]
"""Statements of a context, and questions about them."""


def facts(pool: WordPool, keys: Sequence[list[str]], size: int) -> Content:
    """Return a needle with a value of `size` words, and its question, for each of `keys`."""
    rng = pool.rng
    task = "single" if len(keys) == 1 else "multikey" if size == 2 else "uuid"
    statements: list[Statement] = []
    questions = []
    for key in keys:
        value = pool.free(size)
        statements.append((rng.random(), grammar.needle(key, value)))
        questions.append(Question(task, grammar.ask(key), grammar.answer([value])))
    return statements, questions


def _single(pool: WordPool, room: int, knobs: Knobs) -> Content:
    return facts(pool, [pool.reserve(1)], 2)


def _multikey(pool: WordPool, room: int, knobs: Knobs) -> Content:
    # From RULER's four needles in an essay to a haystack of nothing but needles.
    most = min(400, room // 6)
    count = most if pool.rng.random() < knobs.full else pool.log_between(3, most)
    return facts(pool, [[key] for key in pool.reserve(count)], 2)


def _uuid(pool: WordPool, room: int, knobs: Knobs) -> Content:
    most = min(250, (room - 12) // 8)
    count = most if pool.rng.random() < knobs.full + 0.05 else pool.log_between(knobs.fewest, most)
    names = pool.reserve(min(300, pool.between(int(count**0.5) + 2, 2 * count + 2)))
    pairs = {
        tuple(names[i] for i in pair)
        for pair in pool.rng.integers(0, len(names), size=(count, 2)).tolist()
    }
    return facts(pool, [list(pair) for pair in sorted(pairs)], 4)


def _multivalue(pool: WordPool, room: int, knobs: Knobs) -> Content:
    rng = pool.rng
    most = max(1, min(knobs.plural, room // knobs.spread))
    single = pool.between(0, min(8, room // 64))
    plural = pool.log_between(1, most)
    keys = pool.reserve(single + plural)
    statements, questions = facts(pool, [[key] for key in keys[:single]], 2)
    for question in questions:
        question.task = "multikey"
    for key in keys[single:]:
        times = np.sort(rng.random(pool.between(*knobs.values))).tolist()
        values = [pool.free(2) for _ in times]
        statements += [
            (time, grammar.needle([key], value)) for time, value in zip(times, values, strict=True)
        ]
        # Question them first, because the last questions may not fit.
        questions.insert(0, Question("multivalue", grammar.ask([key]), grammar.answer(values)))
    return statements, questions


def _multiquery(pool: WordPool, room: int, knobs: Knobs) -> Content:
    count = pool.log_between(4, min(48, room // 14))
    keys = pool.reserve(count)
    statements, singles = facts(pool, [[key] for key in keys], 2)
    values = [question.answer[:-1] for question in singles]
    questions = []
    for _ in range(pool.between(1, 6)):
        chosen = pool.rng.permutation(count)[: pool.between(2, 6)].tolist()
        names = [keys[i] for i in chosen]
        answer = grammar.answer_each(names, [values[i] for i in chosen])
        questions.append(Question("multiquery", grammar.ask_each(names), answer))
    return statements, questions


def _chain(pool: WordPool, room: int, knobs: Knobs) -> Content:
    rng = pool.rng
    statements: list[Statement] = []
    questions = []
    long = knobs.long_hops > knobs.hops[1] and room >= 250 and rng.random() < 0.15
    chains = 1 if long else pool.between(1, min(4, room // 30))
    for _ in range(chains):
        low, high = (8, min(knobs.long_hops, room // 8)) if long else knobs.hops
        hops = pool.between(low, min(high, room // (5 * chains) - 1))
        names = pool.reserve(hops + 2)
        times = np.sort(rng.random(hops + 1)).tolist()
        statements += [
            (time, grammar.assign(a, b))
            for time, a, b in zip(times, names[:-1], names[1:], strict=True)
        ]
        # A question about a variable midway asks for the variables after it.
        starts = sorted({0, *(pool.between(0, hops) for _ in range(3))})
        questions += [
            Question("vt", grammar.ask_chain(names[n]), grammar.answer_words(names[n + 1 :]))
            for n in starts
        ]
    return statements, questions


def _list(pool: WordPool, room: int, knobs: Knobs) -> Content:
    count = pool.log_between(4, min(knobs.items, (room - 4) // 9))
    values = [pool.free(2) for _ in range(count)]
    statements = [(pool.rng.random(), grammar.item(n, value)) for n, value in enumerate(values, 1)]
    return statements, [Question("list", grammar.ask_list(), grammar.answer_list(values))]


def _copy(pool: WordPool, room: int, knobs: Knobs) -> Content:
    most = min(knobs.copied, (room - 5) // 2)
    count = pool.log_between(min(8, most), most)
    words = pool.reserve(count)
    if pool.rng.random() < 0.5:
        pool.release(words)  # they may also occur in the filler
    question = Question("copy", grammar.ask_copy(), grammar.answer_words(words))
    return [(pool.rng.random(), grammar.passage(words))], [question]


def _mixed(pool: WordPool, room: int, knobs: Knobs) -> Content:
    kinds = (_multikey, _multivalue, _multiquery, _chain, _uuid)
    chosen = pool.rng.permutation(len(kinds))[: pool.between(2, 3)]
    statements: list[Statement] = []
    questions: list[Question] = []
    for kind in chosen:
        more = kinds[kind](pool, room // (len(chosen) + 1), knobs)
        statements += more[0]
        questions += more[1]
    return statements, questions


def _from_content(make_content: Callable[[WordPool, int, Knobs], Content]) -> Callable[..., Sample]:
    """Make samples of statements and questions: the context, then the questions that fit."""

    def make(rng: np.random.Generator, length: int, knobs: Knobs) -> Sample:
        plain = make_content in (_single, _chain)
        pool = WordPool(rng, knobs.plain_noise if plain else knobs.noise)
        statements, questions = make_content(pool, length - 1, knobs)
        if make_content is not _multivalue:
            questions = [questions[i] for i in rng.permutation(len(questions))]
        room = length - 1 - sum(len(words) for _, words in statements)
        fitting: list[list[str] | Question] = []
        for question in questions[: knobs.questions]:
            if len(question) <= room:
                fitting.append(question)
                room -= len(question)
        if not fitting:
            raise ValueError("no question fits")
        size = length - 1 - sum(len(part) for part in fitting)
        return Sample([[grammar.BOS, *interleave(pool, statements, size)], *fitting])

    return make


def _dialogue(rng: np.random.Generator, length: int, knobs: Knobs) -> Sample:
    """Return turns with new facts; each turn asks for one of its own or an earlier turn's."""
    pool = WordPool(rng, knobs.noise)
    turns = pool.between(2, max(2, min(8, length // 40)))
    per_turn = pool.between(1, 4)
    keys = [pool.reserve(per_turn) for _ in range(turns)]
    shares = rng.dirichlet(np.full(turns, 3.0))
    room = length - 1 - turns * (1 + 5 + 5 * per_turn)
    parts: list[list[str] | Question] = [[grammar.BOS]]
    open_questions: list[Question] = []
    for new, share in zip(keys, shares, strict=True):
        statements, questions = facts(pool, [[key] for key in new], 2)
        open_questions += questions
        size = 5 * per_turn + int(share * room)
        parts.append(grammar.turn(interleave(pool, statements, size)))
        question = open_questions.pop(pool.between(0, len(open_questions) - 1))
        parts.append(dataclasses.replace(question, task="dialogue"))
    return Sample(parts)


def _repeat(rng: np.random.Generator, length: int, knobs: Knobs) -> Sample:
    """Return a repeated sequence of random words, from which induction heads form."""
    period = int(rng.integers(4, max(5, length // 2)))
    words = [grammar.WORDS[i] for i in rng.integers(0, len(grammar.WORDS), size=period)]
    rest = (words * (length // period + 1))[: length - 3 - period]
    return Sample([[grammar.BOS, *words], Question("repeat", rest[:1], rest[1:])])


def _common(rng: np.random.Generator, length: int, knobs: Knobs) -> Sample:
    """Return a bag of words in which ten are about ten times as frequent as the others."""
    pool = WordPool(rng)
    room = length - 1 - 2 - _COMMON - 1
    often = max(2, int(rng.uniform(0.35, 0.5) * room / _COMMON))
    words = pool.reserve(_COMMON)
    rarely = max(1, round(often / rng.uniform(6, 12)))
    left = room - often * _COMMON
    others = pool.reserve(min(440, -(-left // rarely)))
    if len(others) * (often - 1) < left:
        raise ValueError("too little room for ten common words")
    bag = (others * (left // len(others) + 1))[:left] + words * often
    shuffled = [bag[i] for i in rng.permutation(len(bag))]
    question = Question("cwe", grammar.ask_common(), grammar.answer_words(words), any_order=True)
    return Sample([[grammar.BOS, *shuffled], question])


def _frequent(rng: np.random.Generator, length: int, knobs: Knobs) -> Sample:
    """Return a bag of words with Zipf-like counts (RULER's fwe has the exponent 2.0)."""
    pool = WordPool(rng)
    room = length - 1 - 2 - _TOP - 1
    exponent = 2.0 if rng.random() < 0.4 else rng.uniform(1.4, 2.4)
    skipped = int(rng.integers(0, 2))  # RULER leaves out the most frequent rank
    shares = np.arange(1 + skipped, 250, dtype=np.float64) ** -exponent
    counts = np.maximum(1, np.floor(shares / shares.sum() * room)).astype(int)
    counts = counts[: int(np.searchsorted(np.cumsum(counts), room)) + 1]
    counts[-1] -= max(0, int(counts.sum()) - room)
    counts[0] += room - int(counts.sum())
    if not counts[0] > counts[1] > counts[2] > counts[3]:
        raise ValueError("no clear order in so little room")
    words = pool.reserve(len(counts))
    bag = [word for word, count in zip(words, counts.tolist(), strict=True) for _ in range(count)]
    shuffled = [bag[i] for i in rng.permutation(len(bag))]
    question = Question("fwe", grammar.ask_top(), grammar.answer_words(words[:_TOP]))
    return Sample([[grammar.BOS, *shuffled], question])


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


def draw(rng: np.random.Generator, task: str, length: int, knobs: Knobs) -> Sample:
    """Return a sample of `task` of at most `length` words, including ``<bos>``.

    Raises:
        KeyError: There is no such task.
        RuntimeError: `length` is too small for the task.
    """
    for _ in range(50):
        try:
            return TASKS[task](rng, length, knobs)
        except ValueError:  # this draw does not fit
            continue
    raise RuntimeError(f"no sample of {task!r} fits into {length} words")
