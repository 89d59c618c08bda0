"""Samples of the tasks `shapes_vqa` and `shapes_dialogue`, as neutral values.

Both show two to eight pictures between words of filler. The text names every picture ("image 2 :"), notes a word for
some of them, and points to cells that are more likely to be asked about ("look image 2 a1 ."). So are large objects; no
question asks for the object of an empty cell.

`vqa` shows all pictures first and then asks questions. In `dialogue`, later turns bring new pictures or go back to
earlier ones, and earlier answers stay in the history, as in MMDU.

A sample depends only on settings, seed and index.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from kvbench.reference_vl.pictures import EMPTY, Picture
from kvbench.reference_vl.questions import KINDS, PictureQuestion, Scene, cell_word, image_words
from kvbench.reference_vl.words import COLOURS, FILLER, NAMES, SHAPES, TAGS

_ATTEMPTS = 20

Part = str | Picture
"""Text (words separated by spaces), or a picture."""


@dataclasses.dataclass(frozen=True)
class DialogueSettings:
    """Settings of samples; pairs are inclusive ranges.

    Attributes:
        images: Pictures per sample.
        sides: Possible numbers of cells per row of a picture.
        filler: Filler words per sample.
        turns: Turns per dialogue.
        questions: Questions per turn.
        kinds: Weight of each kind of question, in the order of `KINDS`.
        ordinals: Probability that a picture is called "second image" and not "image 2".
        shuffled: Whether names are random; otherwise pictures are numbered from 1.
        hints: Maximum cells of a picture that the text points to.
        notes: Probability that the text notes a word for a picture.
        blank: Probability that a picture is empty.
    """

    images: tuple[int, int] = (2, 8)
    sides: tuple[int, ...] = (2, 3, 4)
    filler: tuple[int, int] = (8, 40)
    turns: tuple[int, int] = (4, 8)
    questions: int = 1
    kinds: tuple[float, ...] = (3, 2, 2, 2, 2, 2, 2, 1)
    ordinals: float = 0.25
    shuffled: bool = False
    hints: int = 2
    notes: float = 0.4
    blank: float = 0.1


@dataclasses.dataclass(frozen=True)
class Turn:
    """Pictures and text of one user turn, and the questions about everything shown so far."""

    parts: tuple[Part, ...]
    questions: tuple[PictureQuestion, ...]


Exchange = tuple[tuple[Part, ...], PictureQuestion]
"""One message of the user (parts, then the question) and the answer to it."""


@dataclasses.dataclass(frozen=True)
class DialogueSample:
    """The turns of a dialogue; `vqa` has one."""

    turns: tuple[Turn, ...]

    def exchanges(self) -> list[Exchange]:
        """Return all questions as one dialogue; those after the first of a turn bring no parts."""
        return [
            (() if question_index else turn.parts, question)
            for turn in self.turns
            for question_index, question in enumerate(turn.questions)
        ]

    def asked(self, turn: int, question: int = 0) -> list[Exchange]:
        """Return the dialogue up to one question, without the other questions of its turn."""
        earlier_exchanges = DialogueSample(self.turns[:turn]).exchanges()
        return [*earlier_exchanges, (self.turns[turn].parts, self.turns[turn].questions[question])]


def pictures(exchanges: list[Exchange]) -> list[Picture]:
    """Return the pictures of a dialogue in order."""
    return [
        message_part
        for message_parts, _ in exchanges
        for message_part in message_parts
        if isinstance(message_part, Picture)
    ]


def messages(exchanges: list[Exchange]) -> list[dict[str, Any]]:
    """Return messages for the chat template: the history, then the last question, unanswered.

    The last part of each user message is the text of its question. An image part is only
    ``{"type": "image"}``; `pictures` returns the images in order.
    """
    chat_messages: list[dict[str, Any]] = []
    for message_parts, question in exchanges:
        content = [
            {"type": "image"} if isinstance(message_part, Picture) else {"type": "text", "text": message_part}
            for message_part in message_parts
        ]
        content.append({"type": "text", "text": " ".join(question.words)})
        chat_messages.append({"role": "user", "content": content})
        chat_messages.append({"role": "assistant", "content": question.answer})
    return chat_messages[:-1]


def vqa(settings: DialogueSettings, seed: int, index: int) -> DialogueSample:
    """Return sample `index` of `shapes_vqa`: all pictures, followed by independent questions."""
    generator = np.random.default_rng([seed, index, 0])
    turn_maker = _Maker(settings, generator, (seed, index, 0))
    return DialogueSample((turn_maker.turn(turn_maker.count, 1.0),))


def dialogue(settings: DialogueSettings, seed: int, index: int) -> DialogueSample:
    """Return sample `index` of `shapes_dialogue`: several turns with pictures in the first ones."""
    generator = np.random.default_rng([seed, index, 1])
    turn_maker = _Maker(settings, generator, (seed, index, 1))
    turn_count = int(generator.integers(settings.turns[0], settings.turns[1] + 1))
    first_count = min(turn_maker.count, int(generator.integers(2, 5)))
    arrivals = [first_count] + [0] * (turn_count - 1)
    for _ in range(turn_maker.count - first_count):
        arrivals[int(generator.integers(1, turn_count)) if turn_count > 1 else 0] += 1
    filler_shares = generator.dirichlet([2.0] + [0.7] * (turn_count - 1))
    return DialogueSample(
        tuple(
            turn_maker.turn(picture_count, float(filler_share))
            for picture_count, filler_share in zip(arrivals, filler_shares, strict=True)
        )
    )


class _Maker:
    """Generator of the turns of one sample, in order."""

    def __init__(self, settings: DialogueSettings, generator: np.random.Generator, seed: tuple[int, ...]) -> None:
        self.settings = settings
        self.rng = generator
        self.seed = seed
        self.count = int(generator.integers(settings.images[0], settings.images[1] + 1))
        picture_names = list(range(1, len(NAMES) + 1))
        self.names = generator.permutation(picture_names).tolist() if settings.shuffled else picture_names
        self.words = int(generator.integers(settings.filler[0], settings.filler[1] + 1))
        self.tags = [TAGS[tag_index] for tag_index in generator.permutation(len(TAGS))]
        self.asked: set[tuple[str, ...]] = set()
        self.scene = Scene(ordinals=0.0 if settings.shuffled else settings.ordinals)

    def turn(self, new_pictures: int, filler_share: float) -> Turn:
        """Return a turn with new pictures and its part of the filler."""
        generator, scene = self.rng, self.scene
        statements: list[list[Part]] = []
        for _ in range(new_pictures):
            statements.append(self._show())
        # Notes and hints can also come later than their picture, as in a real dialogue.
        late_hints = [self._late_hint() for _ in range(int(generator.random() < 0.4))] if scene.pictures else []
        statements += [[hint_text] for hint_text in late_hints if hint_text]
        filler_count = round(self.words * filler_share)
        insert_points = np.sort(generator.integers(0, filler_count + 1, len(statements))).tolist()
        filler_words = [FILLER[word_index] for word_index in generator.integers(0, len(FILLER), filler_count)]
        turn_parts: list[Part] = []
        slice_start = 0
        for insert_point, statement in zip([*insert_points, filler_count], [*statements, []], strict=True):
            _add(turn_parts, " ".join(filler_words[slice_start:insert_point]))
            slice_start = insert_point
            for statement_part in statement:
                _add(turn_parts, statement_part)
        return Turn(tuple(turn_parts), tuple(self._ask() for _ in range(self.settings.questions)))

    def _show(self) -> list[Part]:
        """Return a new picture with the text about it."""
        generator, scene, settings = self.rng, self.scene, self.settings
        picture_index = len(scene.pictures)
        picture = self._picture(picture_index)
        scene.pictures.append(picture)
        statement_parts: list[Part] = [f"image {NAMES[picture.name - 1]} :", picture]
        full_cells = picture.full()
        hint_count = min(len(full_cells), int(generator.integers(0, settings.hints + 1)))
        for cell in generator.permutation(full_cells)[:hint_count].tolist() if full_cells else []:
            statement_parts.append(self._hint(picture_index, cell))
        if generator.random() < settings.notes:
            scene.notes[picture_index] = self.tags.pop()
            image_phrase = image_words(picture.name, generator, scene.ordinals)
            statement_parts.append(f"note {' '.join(image_phrase)} {scene.notes[picture_index]} .")
        return statement_parts

    def _late_hint(self) -> str:
        full_cells = [
            (picture_index, cell)
            for picture_index, picture in enumerate(self.scene.pictures)
            for cell in picture.full()
        ]
        return self._hint(*full_cells[int(self.rng.integers(len(full_cells)))]) if full_cells else ""

    def _hint(self, picture_index: int, cell: int) -> str:
        picture = self.scene.pictures[picture_index]
        self.scene.hints.append((picture_index, cell))
        image_phrase = image_words(picture.name, self.rng, self.scene.ordinals)
        return f"look {' '.join(image_phrase)} {cell_word(picture, cell)} ."

    def _picture(self, picture_index: int) -> Picture:
        """Return a picture: blank, with few repeated objects, or with random ones."""
        generator, earlier_pictures = self.rng, self.scene.pictures
        side_length = int(generator.choice(self.settings.sides))
        cell_count = side_length * side_length
        object_count = len(COLOURS) * len(SHAPES)
        if picture_index and generator.random() < self.settings.blank:
            objects = [EMPTY] * cell_count
        else:
            palette = generator.integers(0, object_count, 3 if generator.random() < 0.4 else 64)
            objects = palette[generator.integers(0, len(palette), cell_count)].tolist()
            fill_rate = generator.uniform(0.35, 0.9)
            kept_mask = generator.random(cell_count) < fill_rate
            kept_mask[int(generator.integers(cell_count))] = True
            objects = [
                object_code if is_kept else EMPTY for object_code, is_kept in zip(objects, kept_mask, strict=True)
            ]
            if earlier_pictures and generator.random() < 0.4:
                self._copy(
                    earlier_pictures[int(generator.integers(len(earlier_pictures)))],
                    objects,
                    side_length,
                )
        large_flags = (generator.random(cell_count) < 0.15).tolist()
        return Picture(
            self.names[picture_index],
            side_length,
            tuple(objects),
            tuple(
                is_large and object_code != EMPTY for is_large, object_code in zip(large_flags, objects, strict=True)
            ),
            (*self.seed, picture_index),
        )

    def _copy(self, source: Picture, objects: list[int], side_length: int) -> None:
        """Give some cells the colour or the shape that `source` has in the same cell."""
        for cell in source.full():
            row, column = divmod(cell, source.side)
            position = row * side_length + column
            if max(row, column) >= side_length or objects[position] == EMPTY:
                continue
            colour, shape = divmod(objects[position], len(SHAPES))
            random_draw = self.rng.random()
            if random_draw < 0.35:
                colour = source.colour(cell)
            elif random_draw < 0.7:
                shape = source.shape(cell)
            objects[position] = colour * len(SHAPES) + shape

    def _ask(self) -> PictureQuestion:
        kind_weights = np.array(self.settings.kinds, dtype=np.float64)
        question_kinds = list(KINDS)
        for attempt in itertools.count():
            # Some picture has an object, so that a kind with positive weight fits in the end.
            question_kind = question_kinds[
                int(self.rng.choice(len(question_kinds), p=kind_weights / kind_weights.sum()))
            ]
            question = KINDS[question_kind](self.scene, self.rng)
            # A question that was asked before would be answered from the history.
            if question and (question.words not in self.asked or attempt >= _ATTEMPTS):
                break
        assert question
        self.asked.add(question.words)
        return question


def _add(message_parts: list[Part], message_part: Part) -> None:
    """Append a part; adjacent texts are merged."""
    if isinstance(message_part, str) and message_parts and isinstance(message_parts[-1], str):
        message_parts[-1] = f"{message_parts[-1]} {message_part}".strip()
    elif message_part:
        message_parts.append(message_part)
