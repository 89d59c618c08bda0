"""Training samples for the reference model, made on the fly with numpy.

A sample is one sequence: ``<bos>``, a context, then as many questions with their answers as fit.
Only answers are supervised. Every sample is a pure function of the random generator it is given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvbench.reference import grammar
from kvbench.reference.source import Source, Statement, interleave

IDS: dict[str, int] = {word: index for index, word in enumerate(grammar.VOCABULARY)}

_COMMON = 10
_TOP = 3


@dataclasses.dataclass(frozen=True)
class Knobs:
    """How hard the samples of a stage are; pairs are inclusive ranges.

    Attributes:
        values: values of a key that has several.
        plural: most keys with several values.
        spread: fewest words of a sequence for each such key.
        hops: hops of a chain beyond its first statement.
        long_hops: hops of the occasional long chain.
        items: most entries of a list.
        copied: most words of a passage.
        questions: most questions in one sequence.
        noise: share of haystacks that are one sentence over and over.
        plain_noise: the same for single needles and chains, which RULER sets in noise.
        full: share of the haystacks of many needles that hold nothing else.
        fewest: fewest needles with keys of two words.
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
    """A question, its answer, and how the answer is judged.

    Attributes:
        task: the skill it exercises, a key of :data:`TASKS` or a part of "mixed".
        prompt: the words of the question.
        answer: the words of the answer, with its full stop.
        any_order: whether all words before the full stop may come in any order.
    """

    task: str
    prompt: list[str]
    answer: list[str]
    any_order: bool = False

    def __len__(self) -> int:
        return len(self.prompt) + len(self.answer)


@dataclasses.dataclass
class Sample:
    """A sequence: `parts` are stretches of unsupervised words and questions, in order."""

    parts: list[list[str] | Question]


@dataclasses.dataclass
class Batch:
    """A training batch of shape (rows, length).

    The arrays `slots`, `targets` and `weights` list the supervised pairs: at the position
    `positions[slot]`, target `targets` has probability `weights`. Weights of a slot sum to 1; a
    slot has several targets where the order of an answer is free.

    Attributes:
        ids: token ids, (rows, length), padded on the right.
        positions: flat indices into `ids` from which an answer token is predicted, (slots,).
        slots: index into `positions` of each pair, (pairs,).
        targets: token id of each pair, (pairs,).
        weights: probability of each pair, (pairs,), float32.
        spans: (task, first slot, past-the-last slot) of every question.
    """

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]
    spans: list[tuple[str, int, int]]


Plan = tuple[list[Statement], list[Question]]


def facts(source: Source, keys: Sequence[list[str]], size: int) -> Plan:
    """Return needles with values of `size` words for `keys`, and the question for each."""
    rng = source.rng
    task = "single" if len(keys) == 1 else "multikey" if size == 2 else "uuid"
    statements: list[Statement] = []
    questions = []
    for key in keys:
        value = source.free(size)
        statements.append((rng.random(), grammar.needle(key, value)))
        questions.append(Question(task, grammar.ask(key), grammar.answer([value])))
    return statements, questions


def _single(source: Source, room: int, knobs: Knobs) -> Plan:
    return facts(source, [source.reserve(1)], 2)


def _multikey(source: Source, room: int, knobs: Knobs) -> Plan:
    # From RULER's four needles in an essay to a haystack of nothing but needles.
    most = min(400, room // 6)
    count = most if source.rng.random() < knobs.full else source.log_between(3, most)
    return facts(source, [[key] for key in source.reserve(count)], 2)


def _uuid(source: Source, room: int, knobs: Knobs) -> Plan:
    most = min(250, (room - 12) // 8)
    count = (
        most if source.rng.random() < knobs.full + 0.05 else source.log_between(knobs.fewest, most)
    )
    names = source.reserve(min(300, source.between(int(count**0.5) + 2, 2 * count + 2)))
    pairs = {
        tuple(names[i] for i in pair)
        for pair in source.rng.integers(0, len(names), size=(count, 2)).tolist()
    }
    return facts(source, [list(pair) for pair in sorted(pairs)], 4)


def _multivalue(source: Source, room: int, knobs: Knobs) -> Plan:
    rng = source.rng
    most = max(1, min(knobs.plural, room // knobs.spread))
    single = source.between(0, min(8, room // 64))
    plural = source.log_between(1, most)
    keys = source.reserve(single + plural)
    statements, questions = facts(source, [[key] for key in keys[:single]], 2)
    for question in questions:
        question.task = "multikey"
    for key in keys[single:]:
        times = np.sort(rng.random(source.between(*knobs.values))).tolist()
        values = [source.free(2) for _ in times]
        statements += [
            (time, grammar.needle([key], value)) for time, value in zip(times, values, strict=True)
        ]
        # Asked first, because what comes last may not fit.
        questions.insert(0, Question("multivalue", grammar.ask([key]), grammar.answer(values)))
    return statements, questions


def _multiquery(source: Source, room: int, knobs: Knobs) -> Plan:
    count = source.log_between(4, min(48, room // 14))
    keys = source.reserve(count)
    statements, singles = facts(source, [[key] for key in keys], 2)
    values = [question.answer[:-1] for question in singles]
    questions = []
    for _ in range(source.between(1, 6)):
        chosen = source.rng.permutation(count)[: source.between(2, 6)].tolist()
        names, found = [keys[i] for i in chosen], [values[i] for i in chosen]
        prompt = grammar.ask_each(names)
        questions.append(Question("multiquery", prompt, grammar.answer_each(names, found)))
    return statements, questions


def _chain(source: Source, room: int, knobs: Knobs) -> Plan:
    rng = source.rng
    statements: list[Statement] = []
    questions = []
    long = knobs.long_hops > knobs.hops[1] and room >= 250 and rng.random() < 0.15
    chains = 1 if long else source.between(1, min(4, room // 30))
    for _ in range(chains):
        low, high = (8, min(knobs.long_hops, room // 8)) if long else knobs.hops
        hops = source.between(low, min(high, room // (5 * chains) - 1))
        names = source.reserve(hops + 2)
        times = np.sort(rng.random(hops + 1)).tolist()
        statements += [
            (time, grammar.assign(a, b))
            for time, a, b in zip(times, names[:-1], names[1:], strict=True)
        ]
        # A question about a variable midway asks for the variables after it.
        starts = sorted({0, *(source.between(0, hops) for _ in range(3))})
        questions += [
            Question("vt", grammar.ask_chain(names[n]), grammar.answer_words(names[n + 1 :]))
            for n in starts
        ]
    return statements, questions


def _list(source: Source, room: int, knobs: Knobs) -> Plan:
    count = source.log_between(4, min(knobs.items, (room - 4) // 9))
    values = [source.free(2) for _ in range(count)]
    statements = [
        (source.rng.random(), grammar.item(n, value)) for n, value in enumerate(values, 1)
    ]
    return statements, [Question("list", grammar.ask_list(), grammar.answer_list(values))]


def _copy(source: Source, room: int, knobs: Knobs) -> Plan:
    most = min(knobs.copied, (room - 5) // 2)
    count = source.log_between(min(8, most), most)
    words = source.reserve(count)
    if source.rng.random() < 0.5:
        source.release(words)  # they may occur in the filler, too
    question = Question("copy", grammar.ask_copy(), grammar.answer_words(words))
    return [(source.rng.random(), grammar.passage(words))], [question]


def _mixed(source: Source, room: int, knobs: Knobs) -> Plan:
    kinds = (_multikey, _multivalue, _multiquery, _chain, _uuid)
    chosen = source.rng.permutation(len(kinds))[: source.between(2, 3)]
    statements: list[Statement] = []
    questions: list[Question] = []
    for kind in chosen:
        more = kinds[kind](source, room // (len(chosen) + 1), knobs)
        statements += more[0]
        questions += more[1]
    return statements, questions


def _planned(plan: Callable[[Source, int, Knobs], Plan]) -> Callable[..., Sample]:
    """Turn a plan of statements and questions into a sample: context, then what fits."""

    def make(rng: np.random.Generator, length: int, knobs: Knobs) -> Sample:
        plain = plan in (_single, _chain)
        source = Source(rng, knobs.plain_noise if plain else knobs.noise)
        statements, questions = plan(source, length - 1, knobs)
        if plan is not _multivalue:
            questions = [questions[i] for i in rng.permutation(len(questions))]
        room = length - 1 - sum(len(words) for _, words in statements)
        asked: list[list[str] | Question] = []
        for question in questions[: knobs.questions]:
            if len(question) <= room:
                asked.append(question)
                room -= len(question)
        if not asked:
            raise ValueError("no question fits")
        size = length - 1 - sum(len(part) for part in asked)
        return Sample([[grammar.BOS, *interleave(source, statements, size)], *asked])

    return make


def _dialogue(rng: np.random.Generator, length: int, knobs: Knobs) -> Sample:
    """Return turns with new facts; each asks for a fact of its own or an earlier turn."""
    source = Source(rng, knobs.noise)
    turns = source.between(2, max(2, min(8, length // 40)))
    per_turn = source.between(1, 4)
    keys = [source.reserve(per_turn) for _ in range(turns)]
    shares = rng.dirichlet(np.full(turns, 3.0))
    room = length - 1 - turns * (1 + 5 + 5 * per_turn)
    parts: list[list[str] | Question] = [[grammar.BOS]]
    known: list[Question] = []
    for new, share in zip(keys, shares, strict=True):
        statements, questions = facts(source, [[key] for key in new], 2)
        known += questions
        size = 5 * per_turn + int(share * room)
        parts.append(grammar.turn(interleave(source, statements, size)))
        question = known.pop(source.between(0, len(known) - 1))
        parts.append(dataclasses.replace(question, task="dialogue"))
    return Sample(parts)


def _repeat(rng: np.random.Generator, length: int, knobs: Knobs) -> Sample:
    """Return random words over and over, with a random period: it makes induction heads form."""
    period = int(rng.integers(4, max(5, length // 2)))
    words = [grammar.WORDS[i] for i in rng.integers(0, len(grammar.WORDS), size=period)]
    rest = (words * (length // period + 1))[: length - 3 - period]
    return Sample([[grammar.BOS, *words], Question("repeat", rest[:1], rest[1:])])


def _common(rng: np.random.Generator, length: int, knobs: Knobs) -> Sample:
    """Return a bag of words in which ten are about ten times as frequent as the others."""
    source = Source(rng)
    room = length - 1 - 2 - _COMMON - 1
    often = max(2, int(rng.uniform(0.35, 0.5) * room / _COMMON))
    words = source.reserve(_COMMON)
    rarely = max(1, round(often / rng.uniform(6, 12)))
    left = room - often * _COMMON
    others = source.reserve(min(440, -(-left // rarely)))
    if len(others) * (often - 1) < left:
        raise ValueError("too little room for ten common words")
    bag = (others * (left // len(others) + 1))[:left] + words * often
    shuffled = [bag[i] for i in rng.permutation(len(bag))]
    question = Question("cwe", grammar.ask_common(), grammar.answer_words(words), any_order=True)
    return Sample([[grammar.BOS, *shuffled], question])


def _frequent(rng: np.random.Generator, length: int, knobs: Knobs) -> Sample:
    """Return a bag of words with Zipf-like counts (RULER's fwe has the exponent 2.0)."""
    source = Source(rng)
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
    words = source.reserve(len(counts))
    bag = [word for word, count in zip(words, counts.tolist(), strict=True) for _ in range(count)]
    shuffled = [bag[i] for i in rng.permutation(len(bag))]
    question = Question("fwe", grammar.ask_top(), grammar.answer_words(words[:_TOP]))
    return Sample([[grammar.BOS, *shuffled], question])


TASKS: dict[str, Callable[[np.random.Generator, int, Knobs], Sample]] = {
    "repeat": _repeat,
    "single": _planned(_single),
    "multikey": _planned(_multikey),
    "uuid": _planned(_uuid),
    "multivalue": _planned(_multivalue),
    "multiquery": _planned(_multiquery),
    "vt": _planned(_chain),
    "list": _planned(_list),
    "copy": _planned(_copy),
    "mixed": _planned(_mixed),
    "dialogue": _dialogue,
    "cwe": _common,
    "fwe": _frequent,
}


def draw(rng: np.random.Generator, task: str, length: int, knobs: Knobs) -> Sample:
    """Return one sample of `task` of at most `length` words, ``<bos>`` included.

    Raises:
        KeyError: there is no such task.
        RuntimeError: `length` is too small for the task.
    """
    for _ in range(50):
        try:
            return TASKS[task](rng, length, knobs)
        except ValueError:  # an unlucky plan that does not fit: draw another
            continue
    raise RuntimeError(f"no sample of {task!r} fits into {length} words")


def batch(
    rng: np.random.Generator, rows: int, length: int, mix: Mapping[str, float], knobs: Knobs
) -> Batch:
    """Return a batch whose rows are tasks drawn with the probabilities (any scale) in `mix`."""
    names = list(mix)
    shares = np.array([mix[name] for name in names], dtype=np.float64)
    ids = np.full((rows, length), IDS[grammar.PAD], dtype=np.int64)
    positions: list[int] = []
    pairs: list[tuple[int, int, float]] = []
    spans: list[tuple[str, int, int]] = []
    for row, choice in enumerate(rng.choice(len(names), size=rows, p=shares / shares.sum())):
        at = 0
        for part in draw(rng, names[choice], length, knobs).parts:
            if isinstance(part, list):
                ids[row, at : at + len(part)] = [IDS[word] for word in part]
                at += len(part)
                continue
            answer = [IDS[word] for word in part.answer]
            ids[row, at : at + len(part)] = [IDS[word] for word in part.prompt] + answer
            at += len(part.prompt)
            first = len(positions)
            for n, target in enumerate(answer):
                slot = len(positions)
                positions.append(row * length + at + n - 1)
                # A word of a free order: any that is not said yet is right.
                allowed = answer[n:-1] if part.any_order and n < len(answer) - 1 else [target]
                pairs += [(slot, word, 1 / len(allowed)) for word in allowed]
            spans.append((part.task, first, len(positions)))
            at += len(answer)
    slots, targets, weights = zip(*pairs, strict=True)
    return Batch(
        ids,
        np.array(positions, dtype=np.int64),
        np.array(slots, dtype=np.int64),
        np.array(targets, dtype=np.int64),
        np.array(weights, dtype=np.float32),
        spans,
    )
