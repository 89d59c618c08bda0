"""Synthetic conversations about a text: training data that needs no download.

A user gives a text, then asks about it; the answers are the training targets. There are five kinds of texts: facts
among filler sentences, tables, lists of settings, lists to repeat, and letters whose people are to be named. Names,
numbers and wordings are made up here and occur in no kvbench task. Filler sentences are synthetic, repeated, or from
Python's manual.
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
"""Minimum tokens of a sequence; a shorter one has no room for a text."""

_SHARES = {"facts": 50, "table": 14, "settings": 14, "repeat": 10, "people": 12}
"""Kinds of texts and how often each is drawn, in percent."""


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
        text: Beginning of the user's first message.
        turns: Pairs of question and answer.
    """

    text: str
    turns: tuple[tuple[str, str], ...]

    def messages(self) -> list[dict[str, str]]:
        """Return the chat messages; the first question follows the text."""
        chat_messages = []
        for turn_index, (question, answer) in enumerate(self.turns):
            content = question if turn_index else f"{self.text}\n\n{question}"
            chat_messages.append({"role": "user", "content": content})
            chat_messages.append({"role": "assistant", "content": answer})
        return chat_messages


def facts() -> Mapping[str, Any]:
    """Return a description of the data for `gates.json`."""
    return {
        "data": "chats",
        "shares": _SHARES,
        "manual": f"Python {platform.python_version()}, {manual.digest()}",
    }


def sequence(tokenizer: Any, length: int, generator: random.Random) -> dict[str, Tensor]:
    """Draw a conversation of at most `length` tokens and encode it.

    Args:
        tokenizer: Tokenizer of the model; its chat template is used if it has one.
        length: Maximum number of tokens; at least 70% of them are used.
        generator: Source of all random choices.

    Returns:
        `input_ids` int64 `[T]`, and `supervised` bool `[T]`: positions whose next token belongs to an answer or ends
        it.

    Raises:
        UserError: `length` is too short.
    """
    if length < SHORTEST:
        raise UserError(f"--length {length} is too short for --data chats; use {SHORTEST} or more")
    limit = round(length * generator.uniform(0.7, 1.0))
    while True:  # redraw if the facts alone do not fit
        (text_kind,) = generator.choices(list(_SHARES), weights=list(_SHARES.values()))
        build = _TEXT_KINDS[text_kind](generator.randrange(1 << 62))
        chat_size = _largest(lambda n: count_tokens(tokenizer, _render(tokenizer, build(n))), limit)  # noqa: B023
        if chat_size is not None:
            return _encode(tokenizer, build(chat_size))


def _largest(measure_tokens: Callable[[int], int], limit: int) -> int | None:
    """Return the largest size, 0 or more, whose tokens do not exceed `limit`, or None."""
    if measure_tokens(0) > limit:
        return None
    lower, upper = 0, 1
    while measure_tokens(upper) <= limit:
        lower, upper = upper, 2 * upper
    while upper - lower > 1:
        middle = (lower + upper) // 2
        lower, upper = (middle, upper) if measure_tokens(middle) <= limit else (lower, middle)
    return lower


def _render(tokenizer: Any, chat: Chat) -> str:
    chat_messages = chat.messages()
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in chat_messages)
    rendered: str = tokenizer.apply_chat_template(chat_messages, tokenize=False)
    return rendered


def _encode(tokenizer: Any, chat: Chat) -> dict[str, Tensor]:
    rendered = _render(tokenizer, chat)
    segments, segment_end = [], 0  # prompt, answer, prompt, answer, ..., rest
    for question, answer in chat.turns:
        answer_start = rendered.index(answer, rendered.index(question, segment_end) + len(question))
        segments += [rendered[segment_end:answer_start], answer]
        segment_end = answer_start + len(answer)
    token_segments = split_encode(tokenizer, *segments, rendered[segment_end:])
    in_answer = [bool(index % 2) for index, piece in enumerate(token_segments) for _ in piece]
    is_before = torch.tensor([*in_answer[1:], False])
    is_end = torch.tensor(in_answer) & ~is_before  # an answer's last token predicts its end
    is_end[-1] = False
    return {
        "input_ids": torch.tensor([token_id for piece in token_segments for token_id in piece]),
        "supervised": is_before | is_end,
    }


# --- filler sentences -----------------------------------------------------------------------------


def _filler(generator: random.Random) -> Iterator[str]:
    """Yield filler sentences from one source, without end."""
    (origin,) = generator.choices(("story", "manual", "dull"), weights=(45, 45, 10))
    dull_text = generator.choice(words.DULL)
    manual_sentences = manual.sentences()
    position = generator.randrange(len(manual_sentences))
    while True:
        if origin == "story":
            yield words.story(generator)
        elif origin == "dull":
            yield dull_text
        else:
            yield manual_sentences[position % len(manual_sentences)]
            position += 1


def _first(sentences: Iterator[str]) -> Callable[[int], list[str]]:
    """Return a function that gives the first n sentences, the same at every call."""
    drawn_sentences: list[str] = []

    def take_first(sentence_count: int) -> list[str]:
        while len(drawn_sentences) < sentence_count:
            drawn_sentences.append(next(sentences))
        return drawn_sentences[:sentence_count]

    return take_first


def _scatter(sentences: list[str], background: list[str], positions: list[float]) -> str:
    """Insert sentences at relative positions of a background text."""
    combined = list(background)
    ordered = sorted(zip(positions, sentences, strict=True), reverse=True)
    for position, sentence in ordered:
        combined.insert(round(position * len(background)), sentence)
    return " ".join(combined)


# --- kinds of texts: each maps a seed to a conversation by size -----------------------------------


def _about_facts(seed: int) -> Callable[[int], Chat]:
    generator = random.Random(seed)
    fact_count = generator.choice((1, 1, 2, 3, 4, 6))
    used_subjects: set[str] = set()
    drawn_facts: list[tuple[words.FactKind, str, str]] = []
    # distractors of one kind
    shared_kind = generator.choice(words.KINDS) if generator.random() < 0.4 else None
    for _ in range(fact_count):
        fact_kind = shared_kind or generator.choice(words.KINDS)
        subject = _draw_unused(fact_kind.subject, generator, used_subjects)
        drawn_facts.append((fact_kind, subject, fact_kind.value(generator)))
    statements = [
        generator.choice(fact_kind.statements).format(s=fact_subject, v=fact_value)
        for fact_kind, fact_subject, fact_value in drawn_facts
    ]
    asked_facts = generator.sample(drawn_facts, generator.randint(1, min(3, fact_count)))
    turns = []
    for fact_kind, fact_subject, fact_value in asked_facts:
        turns.append(
            (
                generator.choice(fact_kind.questions).format(s=fact_subject),
                generator.choice(fact_kind.answers).format(s=fact_subject, v=fact_value),
            )
        )
    positions = [generator.random() for _ in drawn_facts]
    intro = generator.choice(words.INTROS)
    take_sentences = _first(_filler(generator))

    def build_chat(sentence_count: int) -> Chat:
        return Chat(
            _prepend_intro(intro, _scatter(statements, take_sentences(sentence_count), positions)),
            tuple(turns),
        )

    return build_chat


def _about_table(seed: int) -> Callable[[int], Chat]:
    generator = random.Random(seed)
    separator = generator.choice((" | ", ", ", "\t", "; "))
    table_columns: list[tuple[str, Callable[[random.Random], str]]] = [
        ("profession", lambda generator: generator.choice(words.JOBS)),
        ("city", lambda generator: generator.choice(words.CITIES)),
        ("extension", lambda generator: words.digits(generator, 3, 5)),
        ("arrival", words.clock),
        ("pass", words.code_word),
    ]
    table_columns = generator.sample(table_columns, generator.randint(1, 3))
    used_names: set[str] = set()

    def generate_rows() -> Iterator[str]:
        while True:
            person_name = _draw_unused(words.person, generator, used_names)
            yield separator.join([person_name, *(draw_value(generator) for _, draw_value in table_columns)])

    header = separator.join(["name", *(column_title for column_title, _ in table_columns)])
    take_rows, question_seed = _first(generate_rows()), generator.randrange(1 << 62)
    intro = generator.choice(words.INTROS)

    def build_chat(extra_rows: int) -> Chat:
        row_lines = take_rows(extra_rows + 4)
        chooser = random.Random(question_seed)
        turns = []
        for row_line in chooser.sample(row_lines, 2):
            row_cells = row_line.split(separator)
            column_index = chooser.randrange(len(table_columns))
            turns.append(
                (
                    f"What is the {table_columns[column_index][0]} of {row_cells[0]}?",
                    row_cells[column_index + 1],
                )
            )
        return Chat(_prepend_intro(intro, "\n".join([header, *row_lines])), tuple(turns))

    return build_chat


def _about_settings(seed: int) -> Callable[[int], Chat]:
    generator = random.Random(seed)
    separator = generator.choice((" = ", ": ", " -> "))
    draw_value = generator.choice((words.code_word, words.serial, lambda generator: words.digits(generator, 2, 8)))
    used_keys: set[str] = set()

    def draw_key(generator: random.Random) -> str:
        return f"{generator.choice(words.PROJECTS)}_{generator.choice(words.ITEMS)}"

    def generate_lines() -> Iterator[str]:
        while True:
            yield _draw_unused(draw_key, generator, used_keys) + separator + draw_value(generator)

    take_lines, question_seed = _first(generate_lines()), generator.randrange(1 << 62)
    take_filler, intro = _first(_filler(generator)), generator.choice(words.INTROS)
    is_scattered = generator.random() < 0.5  # half of the texts scatter the lines among sentences

    def build_chat(line_count: int) -> Chat:
        setting_lines = take_lines(4 if is_scattered else 4 + line_count)
        chooser = random.Random(question_seed)
        turns = []
        for setting_line in chooser.sample(setting_lines, 2):
            setting_key, _, setting_value = setting_line.partition(separator)
            turns.append((f"What is {setting_key} set to?", setting_value))
        filler_sentences = take_filler(line_count if is_scattered else 0)
        body_lines = filler_sentences.copy()
        for setting_line in setting_lines:
            body_lines.insert(
                chooser.randint(0, len(body_lines)) if is_scattered else len(body_lines),
                setting_line,
            )
        return Chat(_prepend_intro(intro, "\n".join(body_lines)), tuple(turns))

    return build_chat


def _to_repeat(seed: int) -> Callable[[int], Chat]:
    generator = random.Random(seed)
    draw_entry = generator.choice((words.person, words.code_word, lambda generator: words.digits(generator, 3, 8)))
    entry_count = generator.randint(2, 6)
    used_entries: set[str] = set()
    entries = [_draw_unused(draw_entry, generator, used_entries) for _ in range(entry_count)]
    list_name = f"{generator.choice(words.PROJECTS)} list"
    position, take_sentences = generator.random(), _first(_filler(generator))
    intro = generator.choice(words.INTROS)
    entry_list = ", ".join(entries)

    def build_chat(sentence_count: int) -> Chat:
        body = _scatter([f"The {list_name} reads: {entry_list}."], take_sentences(sentence_count), [position])
        return Chat(_prepend_intro(intro, body), ((f"Repeat the {list_name}.", entry_list),))

    return build_chat


def _about_people(seed: int) -> Callable[[int], Chat]:
    generator = random.Random(seed)
    used_names: set[str] = set()
    person_count = generator.randint(2, 5)
    shared_job = generator.choice(words.JOBS)
    matching_people = [_draw_unused(words.person, generator, used_names) for _ in range(person_count)]
    other_sentences = [
        f"{_draw_unused(words.person, generator, used_names)} came too." for _ in range(generator.randint(0, 2))
    ]
    statements = [
        generator.choice(words.KINDS[0].statements).format(s=person_name, v=shared_job)
        for person_name in matching_people
    ]
    positions = [generator.random() for _ in statements + other_sentences]
    ordered_people = [
        person_name for _, person_name in sorted(zip(positions[:person_count], matching_people, strict=True))
    ]
    take_sentences, intro = _first(_filler(generator)), generator.choice(words.INTROS)

    def build_chat(sentence_count: int) -> Chat:
        body = _scatter([*statements, *other_sentences], take_sentences(sentence_count), positions)
        question = f"Name everyone in the text who is a {shared_job}."
        return Chat(_prepend_intro(intro, body), ((question, ", ".join(ordered_people)),))

    return build_chat


def _draw_unused(draw_value: Callable[[random.Random], str], generator: random.Random, used_values: set[str]) -> str:
    """Draw an unused value; append a number if all values are used."""
    for _ in range(50):
        candidate = draw_value(generator)
        if candidate not in used_values:
            break
    else:
        candidate = f"{candidate} {len(used_values)}"
    used_values.add(candidate)
    return candidate


def _prepend_intro(intro: str, body: str) -> str:
    return f"{intro}\n{body}" if intro else body


_TEXT_KINDS: dict[str, Callable[[int], Callable[[int], Chat]]] = {
    "facts": _about_facts,
    "table": _about_table,
    "settings": _about_settings,
    "repeat": _to_repeat,
    "people": _about_people,
}
