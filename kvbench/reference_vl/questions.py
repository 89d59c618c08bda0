"""Questions about pictures that a dialogue has shown, with one word as the answer."""

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
class Question:
    """A question and its answer.

    Attributes:
        kind: A key of `KINDS`.
        words: The words of the question.
        answer: The word of the answer.
        cells: The cells that the answer depends on: picture (its place in the sample) and cell.
        name: Name of the picture that it asks about; 0 if it names none or two.
        compared: Places of the two pictures that it compares, if it does.
    """

    kind: str
    words: tuple[str, ...]
    answer: str
    cells: tuple[tuple[int, int], ...] = ()
    name: int = 0
    compared: tuple[int, ...] = ()


@dataclasses.dataclass
class Scene:
    """What has been shown and said when a question is asked.

    Attributes:
        pictures: Every picture so far.
        notes: The word noted for a picture, by the picture's place in `pictures`.
        hints: Cells that the text pointed to: picture and cell.
        ordinals: Probability that a picture is called "second image" and not "image 2".
    """

    pictures: list[Picture] = dataclasses.field(default_factory=list)
    notes: dict[int, str] = dataclasses.field(default_factory=dict)
    hints: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    ordinals: float = 0.0


def cell_word(picture: Picture, cell: int) -> str:
    """Return the name of a cell: its row as a letter and its column as a number."""
    row, column = divmod(cell, picture.side)
    return CELLS[4 * row + column]


def image_words(name: int, rng: np.random.Generator, ordinals: float = 0.0) -> tuple[str, str]:
    """Return what the text calls a picture: "image 2", or "second image" at times."""
    if ordinals and rng.random() < ordinals:
        return ORDINALS[name - 1], "image"
    return "image", NAMES[name - 1]


def _pick(rng: np.random.Generator, items: Sequence[T]) -> T:
    return items[int(rng.integers(len(items)))]


def _salient(scene: Scene, rng: np.random.Generator) -> tuple[int, int] | None:
    """Draw a cell with an object; cells that stand out are drawn more often than others."""
    if scene.hints and rng.random() < _HINTED:
        return _pick(rng, scene.hints)
    full = [(n, cell) for n, picture in enumerate(scene.pictures) for cell in picture.full()]
    large = [(n, cell) for n, cell in full if scene.pictures[n].large[cell]]
    if large and rng.random() < _LARGE:
        return _pick(rng, large)
    return _pick(rng, full) if full else None


def _cell(attribute: str) -> Callable[[Scene, np.random.Generator], Question | None]:
    def make(scene: Scene, rng: np.random.Generator) -> Question | None:
        place = _salient(scene, rng)
        if place is None:
            return None
        picture, cell = scene.pictures[place[0]], place[1]
        called = image_words(picture.name, rng, scene.ordinals)
        words = (attribute, *called, cell_word(picture, cell))
        answer = _attribute(picture, cell, attribute)
        return Question(attribute, words, answer, (place,), picture.name)

    return make


def _attribute(picture: Picture, cell: int, attribute: str) -> str:
    return COLOURS[picture.colour(cell)] if attribute == "colour" else SHAPES[picture.shape(cell)]


def _only(scene: Scene, rng: np.random.Generator) -> Question | None:
    """Ask for the colour of a shape that a picture has only once."""
    places = []
    for n, picture in enumerate(scene.pictures):
        counts = Counter(picture.shape(cell) for cell in picture.full())
        places += [(n, cell) for cell in picture.full() if counts[picture.shape(cell)] == 1]
    if not places:
        return None
    n, cell = _pick(rng, places)
    picture = scene.pictures[n]
    called = image_words(picture.name, rng, scene.ordinals)
    words = ("colour", *called, SHAPES[picture.shape(cell)])
    return Question("only", words, COLOURS[picture.colour(cell)], ((n, cell),), picture.name)


def _which(scene: Scene, rng: np.random.Generator) -> Question | None:
    """Ask for the picture of an object that no other picture has."""
    holders: dict[int, set[int]] = {}
    for n, picture in enumerate(scene.pictures):
        for cell in picture.full():
            holders.setdefault(picture.objects[cell], set()).add(n)
    alone = [(thing, *where) for thing, where in sorted(holders.items()) if len(where) == 1]
    if not alone:
        return None
    thing, n = _pick(rng, alone)
    picture = scene.pictures[n]
    colour, shape = divmod(thing, len(SHAPES))
    words = ("which", "image", COLOURS[colour], SHAPES[shape])
    cells = tuple((n, cell) for cell in picture.full() if picture.objects[cell] == thing)
    return Question("which", words, NAMES[picture.name - 1], cells)


def _matching(picture: Picture, word: str) -> list[int]:
    """Return the cells of a picture whose colour or shape is `word`."""
    if word in COLOURS:
        return [cell for cell in picture.full() if COLOURS[picture.colour(cell)] == word]
    return [cell for cell in picture.full() if SHAPES[picture.shape(cell)] == word]


def _count(scene: Scene, rng: np.random.Generator) -> Question | None:
    """Ask how often a picture has a colour or shape; rare counts are drawn as often as others."""
    by_count: dict[int, list[tuple[int, str]]] = {}
    for n, picture in enumerate(scene.pictures):
        full = [thing for thing in picture.objects if thing != EMPTY]
        colours = Counter(COLOURS[thing // len(SHAPES)] for thing in full)
        shapes = Counter(SHAPES[thing % len(SHAPES)] for thing in full)
        for word in (*COLOURS, *SHAPES):
            count = colours[word] + shapes[word]
            if count < len(COUNTS):
                by_count.setdefault(count, []).append((n, word))
    counts = sorted(by_count)
    weights = np.array([0.4 if count == 0 else 1.0 for count in counts])
    count = counts[int(rng.choice(len(counts), p=weights / weights.sum()))]
    n, word = _pick(rng, by_count[count])
    picture = scene.pictures[n]
    called = image_words(picture.name, rng, scene.ordinals)
    cells = tuple((n, cell) for cell in _matching(picture, word))
    words = ("count", *called, word)
    return Question("count", words, COUNTS[count], cells, picture.name)


def _more(scene: Scene, rng: np.random.Generator) -> Question | None:
    """Ask which of two pictures has more of a colour or shape."""
    if len(scene.pictures) < 2:
        return None
    for attempt in range(24):
        word = _pick(rng, (*COLOURS, *SHAPES))
        a, b = rng.permutation(len(scene.pictures))[:2].tolist()
        first, second = (_matching(scene.pictures[n], word) for n in (a, b))
        # Most pairs would have none of it in one picture; look for a real comparison first.
        enough = first and second if attempt < 12 else first or second
        if len(first) == len(second) or not enough:
            continue
        pictures = scene.pictures[a], scene.pictures[b]
        called = [image_words(each.name, rng, scene.ordinals) for each in pictures]
        words = ("more", *called[0], *called[1], word)
        answer = NAMES[pictures[len(second) > len(first)].name - 1]
        cells = (*((a, cell) for cell in first), *((b, cell) for cell in second))
        return Question("more", words, answer, cells, compared=(a, b))
    return None


def _same(scene: Scene, rng: np.random.Generator) -> Question | None:
    """Ask whether two pictures have the same colour, or the same shape, in one cell."""
    attribute = _pick(rng, ("colour", "shape"))
    wanted = bool(rng.random() < 0.5)
    by_word: dict[str, list[tuple[int, int, str]]] = {}
    for n, picture in enumerate(scene.pictures):
        for cell in picture.full():
            word = cell_word(picture, cell)
            by_word.setdefault(word, []).append((n, cell, _attribute(picture, cell, attribute)))
    pairs = [
        (word, a, b)
        for word, places in by_word.items()
        for i, a in enumerate(places)
        for b in places[:i]
        if (a[2] == b[2]) == wanted
    ]
    if not pairs:
        return None
    word, *places = _pick(rng, pairs)
    first, second = (places[int(n)] for n in rng.permutation(2))
    called = [
        image_words(scene.pictures[n].name, rng, scene.ordinals) for n in (first[0], second[0])
    ]
    words = ("same", attribute, *called[0], *called[1], word)
    answer = YES if wanted else NO
    compared = (first[0], second[0])
    return Question("same", words, answer, (first[:2], second[:2]), compared=compared)


def _note(scene: Scene, rng: np.random.Generator) -> Question | None:
    """Ask for the word that the text noted for a picture."""
    if not scene.notes:
        return None
    n = _pick(rng, sorted(scene.notes))
    picture = scene.pictures[n]
    words = ("note", *image_words(picture.name, rng, scene.ordinals))
    return Question("note", words, scene.notes[n], (), picture.name)


KINDS: dict[str, Callable[[Scene, np.random.Generator], Question | None]] = {
    "colour": _cell("colour"),
    "shape": _cell("shape"),
    "only": _only,
    "which": _which,
    "count": _count,
    "more": _more,
    "same": _same,
    "note": _note,
}
"""Makers of questions; None where the scene has nothing to ask about."""


def chance(kind: str, pictures: int) -> float:
    """Return the share of right answers by guessing among the words that can answer."""
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
