"""Made-up conversations about a text: training data that needs no download.

A user gives a text, then asks about it; the model's answers are learned. Texts are of five sorts:
sentences with facts among others without, tables, lists of settings, lists to repeat, and letters
whose people are to be named. Names, numbers and wordings are made up here; no task of kvbench has
them. The sentences without facts are made up, repeated, or those of Python's own manual.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvbench.data import manual
from kvbench.errors import UserError
from kvbench.harness.encode import count_tokens, split_encode
from kvbench.training import chat_texts as words

SHORTEST = 192
"""Fewest tokens of a sequence: a shorter one has no room for a text."""

_SHARES = {"facts": 50, "table": 14, "settings": 14, "repeat": 10, "people": 12}
"""Sorts of texts and how often each is drawn, in percent."""


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
        text: What the user's first message begins with.
        turns: Questions with their answers.
    """

    text: str
    turns: tuple[tuple[str, str], ...]

    def messages(self) -> list[dict[str, str]]:
        """The messages; the first question follows the text."""
        result = []
        for i, (question, answer) in enumerate(self.turns):
            content = question if i else f"{self.text}\n\n{question}"
            result.append({"role": "user", "content": content})
            result.append({"role": "assistant", "content": answer})
        return result


def facts() -> Mapping[str, Any]:
    """A description of the data for `gates.json`."""
    return {
        "data": "chats",
        "shares": _SHARES,
        "manual": f"Python {platform.python_version()}, {manual.digest()}",
    }


def sequence(tokenizer: Any, length: int, rng: random.Random) -> dict[str, Tensor]:
    """Draw a conversation of at most `length` tokens and encode it.

    Args:
        tokenizer: Tokenizer of the model; its chat template is used if it has one.
        length: Maximum number of tokens; seven tenths of it or more are used.
        rng: Source of all choices.

    Returns:
        `input_ids` int64 `[T]`, and `supervised` bool `[T]`: positions whose next token belongs to
        an answer or ends it.

    Raises:
        UserError: `length` is too short.
    """
    if length < SHORTEST:
        raise UserError(f"--length {length} is too short for --data chats; use {SHORTEST} or more")
    most = round(length * rng.uniform(0.7, 1.0))
    while True:  # a text whose facts alone do not fit is drawn anew
        (sort,) = rng.choices(list(_SHARES), weights=list(_SHARES.values()))
        build = _SORTS[sort](rng.randrange(1 << 62))
        size = _largest(lambda n: count_tokens(tokenizer, _render(tokenizer, build(n))), most)  # noqa: B023
        if size is not None:
            return _encode(tokenizer, build(size))


def _largest(tokens: Callable[[int], int], most: int) -> int | None:
    """The largest size, from 0 on, whose tokens do not exceed `most`; None if there is none."""
    if tokens(0) > most:
        return None
    low, high = 0, 1
    while tokens(high) <= most:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) <= most else (low, middle)
    return low


def _render(tokenizer: Any, chat: Chat) -> str:
    messages = chat.messages()
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in messages)
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return text


def _encode(tokenizer: Any, chat: Chat) -> dict[str, Tensor]:
    text = _render(tokenizer, chat)
    parts, end = [], 0  # prompt, answer, prompt, answer, ..., rest
    for question, answer in chat.turns:
        begin = text.index(answer, text.index(question, end) + len(question))
        parts += [text[end:begin], answer]
        end = begin + len(answer)
    pieces = split_encode(tokenizer, *parts, text[end:])
    answered = [bool(i % 2) for i, piece in enumerate(pieces) for _ in piece]
    before = torch.tensor([*answered[1:], False])
    ends = torch.tensor(answered) & ~before  # an answer's last token predicts its end
    ends[-1] = False
    return {
        "input_ids": torch.tensor([i for piece in pieces for i in piece]),
        "supervised": before | ends,
    }


# --- sentences without facts ----------------------------------------------------------------------


def _filler(rng: random.Random) -> Iterator[str]:
    """Sentences of one origin, without end."""
    (origin,) = rng.choices(("story", "manual", "dull"), weights=(45, 45, 10))
    dull = rng.choice(words.DULL)
    found = manual.sentences()
    at = rng.randrange(len(found))
    while True:
        if origin == "story":
            yield words.story(rng)
        elif origin == "dull":
            yield dull
        else:
            yield found[at % len(found)]
            at += 1


def _first(sentences: Iterator[str]) -> Callable[[int], list[str]]:
    """Make a function that returns the first n sentences, the same at every call."""
    made: list[str] = []

    def take(n: int) -> list[str]:
        while len(made) < n:
            made.append(next(sentences))
        return made[:n]

    return take


def _scatter(sentences: list[str], among: list[str], places: list[float]) -> str:
    """Put sentences at relative places among others."""
    body = list(among)
    order = sorted(zip(places, sentences, strict=True), reverse=True)
    for place, sentence in order:
        body.insert(round(place * len(among)), sentence)
    return " ".join(body)


# --- the sorts of texts: from a seed to a conversation by size ------------------------------------


def _about_facts(seed: int) -> Callable[[int], Chat]:
    rng = random.Random(seed)
    count = rng.choice((1, 1, 2, 3, 4, 6))
    taken: set[str] = set()
    told: list[tuple[words.Kind, str, str]] = []
    alike = rng.choice(words.KINDS) if rng.random() < 0.4 else None  # distractors of one kind
    for _ in range(count):
        kind = alike or rng.choice(words.KINDS)
        subject = _fresh(kind.subject, rng, taken)
        told.append((kind, subject, kind.value(rng)))
    stated = [rng.choice(kind.stated).format(s=s, v=v) for kind, s, v in told]
    asked = rng.sample(told, rng.randint(1, min(3, count)))
    turns = []
    for kind, s, v in asked:
        turns.append(
            (rng.choice(kind.asked).format(s=s), rng.choice(kind.answers).format(s=s, v=v))
        )
    places = [rng.random() for _ in told]
    intro = rng.choice(words.INTROS)
    take = _first(_filler(rng))

    def build(n: int) -> Chat:
        return Chat(_joined(intro, _scatter(stated, take(n), places)), tuple(turns))

    return build


def _about_table(seed: int) -> Callable[[int], Chat]:
    rng = random.Random(seed)
    mark = rng.choice((" | ", ", ", "\t", "; "))
    columns: list[tuple[str, Callable[[random.Random], str]]] = [
        ("profession", lambda r: r.choice(words.JOBS)),
        ("city", lambda r: r.choice(words.CITIES)),
        ("extension", lambda r: words.digits(r, 3, 5)),
        ("arrival", words.clock),
        ("pass", words.code_word),
    ]
    columns = rng.sample(columns, rng.randint(1, 3))
    taken: set[str] = set()

    def rows() -> Iterator[str]:
        while True:
            name = _fresh(words.person, rng, taken)
            yield mark.join([name, *(make(rng) for _, make in columns)])

    header = mark.join(["name", *(title for title, _ in columns)])
    take, asking = _first(rows()), rng.randrange(1 << 62)
    intro = rng.choice(words.INTROS)

    def build(n: int) -> Chat:
        lines = take(n + 4)
        choose = random.Random(asking)
        turns = []
        for row in choose.sample(lines, 2):
            cells = row.split(mark)
            at = choose.randrange(len(columns))
            turns.append((f"What is the {columns[at][0]} of {cells[0]}?", cells[at + 1]))
        return Chat(_joined(intro, "\n".join([header, *lines])), tuple(turns))

    return build


def _about_settings(seed: int) -> Callable[[int], Chat]:
    rng = random.Random(seed)
    mark = rng.choice((" = ", ": ", " -> "))
    value = rng.choice((words.code_word, words.serial, lambda r: words.digits(r, 2, 8)))
    taken: set[str] = set()

    def name(r: random.Random) -> str:
        return f"{r.choice(words.PROJECTS)}_{r.choice(words.ITEMS)}"

    def lines() -> Iterator[str]:
        while True:
            yield _fresh(name, rng, taken) + mark + value(rng)

    take, asking = _first(lines()), rng.randrange(1 << 62)
    filler, intro = _first(_filler(rng)), rng.choice(words.INTROS)
    wide = rng.random() < 0.5  # half of the texts have the lines among sentences

    def build(n: int) -> Chat:
        shown = take(4 if wide else 4 + n)
        choose = random.Random(asking)
        turns = []
        for line in choose.sample(shown, 2):
            key, _, content = line.partition(mark)
            turns.append((f"What is {key} set to?", content))
        among = filler(n if wide else 0)
        body = among.copy()
        for line in shown:
            body.insert(choose.randint(0, len(body)) if wide else len(body), line)
        return Chat(_joined(intro, "\n".join(body)), tuple(turns))

    return build


def _to_repeat(seed: int) -> Callable[[int], Chat]:
    rng = random.Random(seed)
    value = rng.choice((words.person, words.code_word, lambda r: words.digits(r, 3, 8)))
    count = rng.randint(2, 6)
    taken: set[str] = set()
    listed = [_fresh(value, rng, taken) for _ in range(count)]
    name = f"{rng.choice(words.PROJECTS)} list"
    place, take = rng.random(), _first(_filler(rng))
    intro = rng.choice(words.INTROS)
    items = ", ".join(listed)

    def build(n: int) -> Chat:
        text = _scatter([f"The {name} reads: {items}."], take(n), [place])
        return Chat(_joined(intro, text), ((f"Repeat the {name}.", items),))

    return build


def _about_people(seed: int) -> Callable[[int], Chat]:
    rng = random.Random(seed)
    taken: set[str] = set()
    count = rng.randint(2, 5)
    job = rng.choice(words.JOBS)
    told = [_fresh(words.person, rng, taken) for _ in range(count)]
    others = [f"{_fresh(words.person, rng, taken)} came too." for _ in range(rng.randint(0, 2))]
    stated = [rng.choice(words.KINDS[0].stated).format(s=s, v=job) for s in told]
    places = [rng.random() for _ in stated + others]
    first = [s for _, s in sorted(zip(places[:count], told, strict=True))]
    take, intro = _first(_filler(rng)), rng.choice(words.INTROS)

    def build(n: int) -> Chat:
        text = _scatter([*stated, *others], take(n), places)
        question = f"Name everyone in the text who is a {job}."
        return Chat(_joined(intro, text), ((question, ", ".join(first)),))

    return build


def _fresh(make: Callable[[random.Random], str], rng: random.Random, taken: set[str]) -> str:
    """Something that was not drawn before; a number is added where all have been."""
    for _ in range(50):
        made = make(rng)
        if made not in taken:
            break
    else:
        made = f"{made} {len(taken)}"
    taken.add(made)
    return made


def _joined(intro: str, text: str) -> str:
    return f"{intro}\n{text}" if intro else text


_SORTS: dict[str, Callable[[int], Callable[[int], Chat]]] = {
    "facts": _about_facts,
    "table": _about_table,
    "settings": _about_settings,
    "repeat": _to_repeat,
    "people": _about_people,
}
