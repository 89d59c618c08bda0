"""Questions with one-word answers about the pictures of a dialogue."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from kvbench.reference_vl.pictures import EMPTY, Picture
from kvbench.reference_vl.words import (
    CELLS,
    COLOURS,
    COUNTS,
    NAMES,
    NO,
    ORDINALS,
    SHAPES,
    YES,
)

T = TypeVar("T")

_HINTED, _LARGE = 0.5, 0.4


@dataclasses.dataclass(frozen=True)
class PictureQuestion:
    """A question and its answer.

    Attributes:
        kind: A key of `KINDS`.
        words: Words of the question.
        answer: One-word answer.
        cells: Cells that the answer depends on: picture index in the sample, and cell.
        name: Name of the picture asked about; 0 if none or two are named.
        compared: Indices of the two pictures compared, if any.
    """

    kind: str
    words: tuple[str, ...]
    answer: str
    cells: tuple[tuple[int, int], ...] = ()
    name: int = 0
    compared: tuple[int, ...] = ()


@dataclasses.dataclass
class Scene:
    """Pictures and statements so far when a question is asked.

    Attributes:
        pictures: All pictures so far.
        notes: Word noted for a picture, by its index in `pictures`.
        hints: Cells that the text pointed to: picture and cell.
        ordinals: Probability that a picture is called "second image" and not "image 2".
    """

    pictures: list[Picture] = dataclasses.field(default_factory=list)
    notes: dict[int, str] = dataclasses.field(default_factory=dict)
    hints: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    ordinals: float = 0.0


def cell_word(shape_picture: Picture, cell: int) -> str:
    """Return the name of a cell: its row as a letter and its column as a number."""
    row, column = divmod(cell, shape_picture.side)
    return CELLS[4 * row + column]


def image_words(number: int, generator: np.random.Generator, ordinals: float = 0.0) -> tuple[str, str]:
    """Return what the text calls a picture: "image 2", or "second image" at times."""
    if ordinals and generator.random() < ordinals:
        return ORDINALS[number - 1], "image"
    return "image", NAMES[number - 1]


def _pick(generator: np.random.Generator, candidates: Sequence[T]) -> T:
    return candidates[int(generator.integers(len(candidates)))]


def _salient(scene: Scene, generator: np.random.Generator) -> tuple[int, int] | None:
    """Draw a cell with an object, preferring salient cells."""
    if scene.hints and generator.random() < _HINTED:
        return _pick(generator, scene.hints)
    full_cells = [
        (picture_index, cell) for picture_index, picture in enumerate(scene.pictures) for cell in picture.full()
    ]
    large_cells = [
        (picture_index, cell) for picture_index, cell in full_cells if scene.pictures[picture_index].large[cell]
    ]
    if large_cells and generator.random() < _LARGE:
        return _pick(generator, large_cells)
    return _pick(generator, full_cells) if full_cells else None


def _cell(attribute: str) -> Callable[[Scene, np.random.Generator], PictureQuestion | None]:
    def make_question(scene: Scene, generator: np.random.Generator) -> PictureQuestion | None:
        position = _salient(scene, generator)
        if position is None:
            return None
        picture, cell = scene.pictures[position[0]], position[1]
        image_phrase = image_words(picture.name, generator, scene.ordinals)
        question_words = (attribute, *image_phrase, cell_word(picture, cell))
        answer_word = _attribute(picture, cell, attribute)
        return PictureQuestion(attribute, question_words, answer_word, (position,), picture.name)

    return make_question


def _attribute(picture: Picture, cell: int, attribute: str) -> str:
    return COLOURS[picture.colour(cell)] if attribute == "colour" else SHAPES[picture.shape(cell)]


def _only(scene: Scene, generator: np.random.Generator) -> PictureQuestion | None:
    """Ask for the colour of a shape that a picture has only once."""
    positions = []
    for picture_index, picture in enumerate(scene.pictures):
        shape_counts = Counter(picture.shape(cell) for cell in picture.full())
        positions += [(picture_index, cell) for cell in picture.full() if shape_counts[picture.shape(cell)] == 1]
    if not positions:
        return None
    picture_index, cell = _pick(generator, positions)
    picture = scene.pictures[picture_index]
    image_phrase = image_words(picture.name, generator, scene.ordinals)
    question_words = ("colour", *image_phrase, SHAPES[picture.shape(cell)])
    return PictureQuestion(
        "only",
        question_words,
        COLOURS[picture.colour(cell)],
        ((picture_index, cell),),
        picture.name,
    )


def _which(scene: Scene, generator: np.random.Generator) -> PictureQuestion | None:
    """Ask for the picture of an object that no other picture has."""
    object_pictures: dict[int, set[int]] = {}
    for picture_index, picture in enumerate(scene.pictures):
        for cell in picture.full():
            object_pictures.setdefault(picture.objects[cell], set()).add(picture_index)
    unique_objects = [
        (object_code, *picture_set)
        for object_code, picture_set in sorted(object_pictures.items())
        if len(picture_set) == 1
    ]
    if not unique_objects:
        return None
    object_code, picture_index = _pick(generator, unique_objects)
    picture = scene.pictures[picture_index]
    colour, shape = divmod(object_code, len(SHAPES))
    question_words = ("which", "image", COLOURS[colour], SHAPES[shape])
    object_cells = tuple((picture_index, cell) for cell in picture.full() if picture.objects[cell] == object_code)
    return PictureQuestion("which", question_words, NAMES[picture.name - 1], object_cells)


def _matching(picture: Picture, attribute_word: str) -> list[int]:
    """Return the cells of a picture whose colour or shape is `attribute_word`."""
    if attribute_word in COLOURS:
        return [cell for cell in picture.full() if COLOURS[picture.colour(cell)] == attribute_word]
    return [cell for cell in picture.full() if SHAPES[picture.shape(cell)] == attribute_word]


def _count(scene: Scene, generator: np.random.Generator) -> PictureQuestion | None:
    """Ask how often a picture has a colour or shape; rare counts are drawn as often as others."""
    by_count: dict[int, list[tuple[int, str]]] = {}
    for picture_index, picture in enumerate(scene.pictures):
        picture_objects = [object_code for object_code in picture.objects if object_code != EMPTY]
        colour_counts = Counter(COLOURS[object_code // len(SHAPES)] for object_code in picture_objects)
        shape_counts = Counter(SHAPES[object_code % len(SHAPES)] for object_code in picture_objects)
        for word in (*COLOURS, *SHAPES):
            count = colour_counts[word] + shape_counts[word]
            if count < len(COUNTS):
                by_count.setdefault(count, []).append((picture_index, word))
    known_counts = sorted(by_count)
    weights = np.array([0.4 if count == 0 else 1.0 for count in known_counts])
    count = known_counts[int(generator.choice(len(known_counts), p=weights / weights.sum()))]
    picture_index, word = _pick(generator, by_count[count])
    picture = scene.pictures[picture_index]
    image_phrase = image_words(picture.name, generator, scene.ordinals)
    counted_cells = tuple((picture_index, cell) for cell in _matching(picture, word))
    question_words = ("count", *image_phrase, word)
    return PictureQuestion("count", question_words, COUNTS[count], counted_cells, picture.name)


def _more(scene: Scene, generator: np.random.Generator) -> PictureQuestion | None:
    """Ask which of two pictures has more of a colour or shape."""
    if len(scene.pictures) < 2:
        return None
    for attempt in range(24):
        attribute_word = _pick(generator, (*COLOURS, *SHAPES))
        first_index, second_index = generator.permutation(len(scene.pictures))[:2].tolist()
        first_cells, second_cells = (
            _matching(scene.pictures[picture_index], attribute_word) for picture_index in (first_index, second_index)
        )
        # In most pairs, one picture has none of it; try to find a real comparison first.
        is_comparable = first_cells and second_cells if attempt < 12 else first_cells or second_cells
        if len(first_cells) == len(second_cells) or not is_comparable:
            continue
        compared = scene.pictures[first_index], scene.pictures[second_index]
        image_phrases = [image_words(picture.name, generator, scene.ordinals) for picture in compared]
        question_words = ("more", *image_phrases[0], *image_phrases[1], attribute_word)
        answer_word = NAMES[compared[len(second_cells) > len(first_cells)].name - 1]
        relevant_cells = (
            *((first_index, cell) for cell in first_cells),
            *((second_index, cell) for cell in second_cells),
        )
        return PictureQuestion(
            "more",
            question_words,
            answer_word,
            relevant_cells,
            compared=(first_index, second_index),
        )
    return None


def _same(scene: Scene, generator: np.random.Generator) -> PictureQuestion | None:
    """Ask whether two pictures have the same colour, or the same shape, in one cell."""
    attribute = _pick(generator, ("colour", "shape"))
    expects_same = bool(generator.random() < 0.5)
    cells_by_word: dict[str, list[tuple[int, int, str]]] = {}
    for index, picture in enumerate(scene.pictures):
        for cell in picture.full():
            cell_name = cell_word(picture, cell)
            cells_by_word.setdefault(cell_name, []).append((index, cell, _attribute(picture, cell, attribute)))
    cell_pairs = [
        (cell_name, left_cell, right_cell)
        for cell_name, positions in cells_by_word.items()
        for pair_index, left_cell in enumerate(positions)
        for right_cell in positions[:pair_index]
        if (left_cell[2] == right_cell[2]) == expects_same
    ]
    if not cell_pairs:
        return None
    cell_name, *positions = _pick(generator, cell_pairs)
    first_cell, second_cell = (positions[int(index)] for index in generator.permutation(2))
    image_phrases = [
        image_words(scene.pictures[index].name, generator, scene.ordinals) for index in (first_cell[0], second_cell[0])
    ]
    question_words = ("same", attribute, *image_phrases[0], *image_phrases[1], cell_name)
    answer_word = YES if expects_same else NO
    picture_indices = (first_cell[0], second_cell[0])
    return PictureQuestion(
        "same",
        question_words,
        answer_word,
        (first_cell[:2], second_cell[:2]),
        compared=picture_indices,
    )


def _note(scene: Scene, generator: np.random.Generator) -> PictureQuestion | None:
    """Ask for the word that the text noted for a picture."""
    if not scene.notes:
        return None
    picture_index = _pick(generator, sorted(scene.notes))
    picture = scene.pictures[picture_index]
    question_words = ("note", *image_words(picture.name, generator, scene.ordinals))
    return PictureQuestion("note", question_words, scene.notes[picture_index], (), picture.name)


KINDS: dict[str, Callable[[Scene, np.random.Generator], PictureQuestion | None]] = {
    "colour": _cell("colour"),
    "shape": _cell("shape"),
    "only": _only,
    "which": _which,
    "count": _count,
    "more": _more,
    "same": _same,
    "note": _note,
}
"""Question generators; they return None if the scene has no suitable content."""


def chance(kind: str, pictures: int) -> float:
    """Return the accuracy of guessing among the possible answers."""
    return {
        "colour": 1 / len(COLOURS),
        "shape": 1 / len(SHAPES),
        "only": 1 / len(COLOURS),
        "which": 1 / pictures,
        "count": 1 / len(COUNTS),
        "more": 1 / 2,
        "same": 1 / 2,
        "note": 1 / pictures,
    }[kind]
