"""Samples of the tasks `shapes_vqa` and `shapes_dialogue`, as neutral values.

Both show two to eight pictures between words of filler. The text names every picture ("image 2 :"),
notes a word for some of them, and points to cells that are likelier to be asked about ("look
image 2 a1 ."). Large objects are likelier as well; nobody asks for the object of an empty cell.

`vqa` shows all pictures first and then asks questions. In `dialogue`, later turns bring new
pictures or go back to earlier ones, and earlier answers stay in the history, as in MMDU.

A sample depends only on settings, seed and index.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from kvbench.reference_vl.pictures import EMPTY, Picture
from kvbench.reference_vl.questions import KINDS, Question, Scene, cell_word, image_words
from kvbench.reference_vl.words import COLOURS, FILLER, NAMES, SHAPES, TAGS

_ATTEMPTS = 20

Part = str | Picture
"""Text (words separated by spaces), or a picture."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What samples look like; pairs are inclusive ranges.

    Attributes:
        images: Pictures of a sample.
        sides: Possible numbers of cells per row of a picture.
        filler: Filler words of a sample.
        turns: Turns of a dialogue.
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
    """What the user shows and says, and the questions about all that was shown so far."""

    parts: tuple[Part, ...]
    questions: tuple[Question, ...]


Exchange = tuple[tuple[Part, ...], Question]
"""One message of the user (parts, then the question) and the answer to it."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """The turns of a dialogue; `vqa` has one."""

    turns: tuple[Turn, ...]

    def exchanges(self) -> list[Exchange]:
        """Return all questions as one dialogue; those after the first of a turn bring no parts."""
        return [
            (() if n else turn.parts, question)
            for turn in self.turns
            for n, question in enumerate(turn.questions)
        ]

    def asked(self, turn: int, question: int = 0) -> list[Exchange]:
        """Return the dialogue up to one question, without the other questions of its turn."""
        before = Sample(self.turns[:turn]).exchanges()
        return [*before, (self.turns[turn].parts, self.turns[turn].questions[question])]


def pictures(exchanges: list[Exchange]) -> list[Picture]:
    """Return the pictures of a dialogue in order."""
    return [part for parts, _ in exchanges for part in parts if isinstance(part, Picture)]


def messages(exchanges: list[Exchange]) -> list[dict[str, Any]]:
    """Return messages for the chat template: the history, then the last question, unanswered.

    The last part of each user message is the text of its question. An image part is only
    ``{"type": "image"}``; `pictures` returns the images in order.
    """
    result: list[dict[str, Any]] = []
    for parts, question in exchanges:
        content = [
            {"type": "image"} if isinstance(part, Picture) else {"type": "text", "text": part}
            for part in parts
        ]
        content.append({"type": "text", "text": " ".join(question.words)})
        result.append({"role": "user", "content": content})
        result.append({"role": "assistant", "content": question.answer})
    return result[:-1]


def vqa(settings: Settings, seed: int, index: int) -> Sample:
    """Return sample `index` of `shapes_vqa`: all pictures, then questions that are asked apart."""
    rng = np.random.default_rng([seed, index, 0])
    maker = _Maker(settings, rng, (seed, index, 0))
    return Sample((maker.turn(maker.count, 1.0),))


def dialogue(settings: Settings, seed: int, index: int) -> Sample:
    """Return sample `index` of `shapes_dialogue`: several turns with pictures in the first ones."""
    rng = np.random.default_rng([seed, index, 1])
    maker = _Maker(settings, rng, (seed, index, 1))
    turns = int(rng.integers(settings.turns[0], settings.turns[1] + 1))
    first = min(maker.count, int(rng.integers(2, 5)))
    arrivals = [first] + [0] * (turns - 1)
    for _ in range(maker.count - first):
        arrivals[int(rng.integers(1, turns)) if turns > 1 else 0] += 1
    shares = rng.dirichlet([2.0] + [0.7] * (turns - 1))
    return Sample(
        tuple(
            maker.turn(count, float(share)) for count, share in zip(arrivals, shares, strict=True)
        )
    )


class _Maker:
    """Makes the turns of one sample in order."""

    def __init__(self, settings: Settings, rng: np.random.Generator, seed: tuple[int, ...]) -> None:
        self.settings = settings
        self.rng = rng
        self.seed = seed
        self.count = int(rng.integers(settings.images[0], settings.images[1] + 1))
        names = list(range(1, len(NAMES) + 1))
        self.names = rng.permutation(names).tolist() if settings.shuffled else names
        self.words = int(rng.integers(settings.filler[0], settings.filler[1] + 1))
        self.tags = [TAGS[n] for n in rng.permutation(len(TAGS))]
        self.asked: set[tuple[str, ...]] = set()
        self.scene = Scene(ordinals=0.0 if settings.shuffled else settings.ordinals)

    def turn(self, arrivals: int, share: float) -> Turn:
        """Return a turn with new pictures and its share of the filler."""
        rng, scene = self.rng, self.scene
        statements: list[list[Part]] = []
        for _ in range(arrivals):
            statements.append(self._show())
        # Notes and hints can also come later than their picture, as in a real dialogue.
        late = [self._late_hint() for _ in range(int(rng.random() < 0.4))] if scene.pictures else []
        statements += [[text] for text in late if text]
        spare = round(self.words * share)
        cuts = np.sort(rng.integers(0, spare + 1, len(statements))).tolist()
        filler = [FILLER[n] for n in rng.integers(0, len(FILLER), spare)]
        parts: list[Part] = []
        start = 0
        for cut, statement in zip([*cuts, spare], [*statements, []], strict=True):
            _add(parts, " ".join(filler[start:cut]))
            start = cut
            for part in statement:
                _add(parts, part)
        return Turn(tuple(parts), tuple(self._ask() for _ in range(self.settings.questions)))

    def _show(self) -> list[Part]:
        """Return a new picture with what is said about it."""
        rng, scene, settings = self.rng, self.scene, self.settings
        n = len(scene.pictures)
        picture = self._picture(n)
        scene.pictures.append(picture)
        parts: list[Part] = [f"image {NAMES[picture.name - 1]} :", picture]
        full = picture.full()
        hints = min(len(full), int(rng.integers(0, settings.hints + 1)))
        for cell in rng.permutation(full)[:hints].tolist() if full else []:
            parts.append(self._hint(n, cell))
        if rng.random() < settings.notes:
            scene.notes[n] = self.tags.pop()
            called = image_words(picture.name, rng, scene.ordinals)
            parts.append(f"note {' '.join(called)} {scene.notes[n]} .")
        return parts

    def _late_hint(self) -> str:
        full = [(n, c) for n, picture in enumerate(self.scene.pictures) for c in picture.full()]
        return self._hint(*full[int(self.rng.integers(len(full)))]) if full else ""

    def _hint(self, n: int, cell: int) -> str:
        picture = self.scene.pictures[n]
        self.scene.hints.append((n, cell))
        called = image_words(picture.name, self.rng, self.scene.ordinals)
        return f"look {' '.join(called)} {cell_word(picture, cell)} ."

    def _picture(self, n: int) -> Picture:
        """Return a picture: blank, with few repeated objects, or with random ones."""
        rng, shown = self.rng, self.scene.pictures
        side = int(rng.choice(self.settings.sides))
        cells = side * side
        things = len(COLOURS) * len(SHAPES)
        if n and rng.random() < self.settings.blank:
            objects = [EMPTY] * cells
        else:
            palette = rng.integers(0, things, 3 if rng.random() < 0.4 else 64)
            objects = palette[rng.integers(0, len(palette), cells)].tolist()
            share = rng.uniform(0.35, 0.9)
            kept = rng.random(cells) < share
            kept[int(rng.integers(cells))] = True
            objects = [thing if keep else EMPTY for thing, keep in zip(objects, kept, strict=True)]
            if shown and rng.random() < 0.4:
                self._copy(shown[int(rng.integers(len(shown)))], objects, side)
        large = (rng.random(cells) < 0.15).tolist()
        return Picture(
            self.names[n],
            side,
            tuple(objects),
            tuple(big and thing != EMPTY for big, thing in zip(large, objects, strict=True)),
            (*self.seed, n),
        )

    def _copy(self, source: Picture, objects: list[int], side: int) -> None:
        """Give some cells the colour or the shape that `source` has in the same cell."""
        for cell in source.full():
            row, column = divmod(cell, source.side)
            at = row * side + column
            if max(row, column) >= side or objects[at] == EMPTY:
                continue
            colour, shape = divmod(objects[at], len(SHAPES))
            draw = self.rng.random()
            if draw < 0.35:
                colour = source.colour(cell)
            elif draw < 0.7:
                shape = source.shape(cell)
            objects[at] = colour * len(SHAPES) + shape

    def _ask(self) -> Question:
        weights = np.array(self.settings.kinds, dtype=np.float64)
        kinds = list(KINDS)
        for attempt in itertools.count():
            # Some picture has an object, so that a kind with positive weight fits in the end.
            kind = kinds[int(self.rng.choice(len(kinds), p=weights / weights.sum()))]
            question = KINDS[kind](self.scene, self.rng)
            # A question that was asked before would be answered from the history.
            if question and (question.words not in self.asked or attempt >= _ATTEMPTS):
                break
        assert question
        self.asked.add(question.words)
        return question


def _add(parts: list[Part], part: Part) -> None:
    """Append a part; text goes on where the last part is text as well."""
    if isinstance(part, str) and parts and isinstance(parts[-1], str):
        parts[-1] = f"{parts[-1]} {part}".strip()
    elif part:
        parts.append(part)
