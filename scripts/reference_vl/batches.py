"""Batches of training samples: tokens, M-RoPE positions, patches, and what to predict."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from kvbench.reference_vl import dialogues, words
from kvbench.reference_vl.dialogues import Exchange
from kvbench.reference_vl.pictures import CELL, EMPTY, Picture, draw
from kvbench.reference_vl.questions import PictureQuestion
from kvbench.reference_vl.words import COLOURS, IDS, NAMES, ORDINALS, SHAPES
from scripts.reference_vl.model import MERGE, PATCH

_NONE = -1
CUES = (*NAMES, *COLOURS)
"""Words that the auxiliary loss on questions reads."""


@dataclasses.dataclass
class Encoded:
    """A dialogue as tokens.

    Attributes:
        ids: Token ids.
        positions: M-RoPE position of each token: time, row and column.
        visual: Index of each visual token.
        answers: Index of each answer's word.
        notes: Index of each noted word, and place of its picture's name in `NAMES`.
        exchanges: The dialogue.
    """

    ids: list[int]
    positions: list[tuple[int, int, int]]
    visual: list[int]
    answers: list[int]
    notes: list[tuple[int, int]]
    exchanges: list[Exchange]


def encode(exchanges: list[Exchange]) -> Encoded:
    """Return the tokens of a dialogue with all its answers.

    They equal those of the chat template with one image token per cell, and the positions equal
    `get_rope_index` of transformers; both are tested.
    """
    ids: list[int] = []
    positions: list[tuple[int, int, int]] = []
    visual: list[int] = []
    answers: list[int] = []
    notes: list[tuple[int, int]] = []
    at = 0

    def text(new: Sequence[str]) -> None:
        nonlocal at
        ids.extend(IDS[word] for word in new)
        positions.extend((n, n, n) for n in range(at, at + len(new)))
        at += len(new)

    text([words.BOS])
    for parts, question in exchanges:
        text([words.USER])
        for part in parts:
            if isinstance(part, str):
                said = part.split()
                notes.extend(_noted(said, len(ids)))
                text(said)
                continue
            text([words.VISION_START])
            visual.extend(range(len(ids), len(ids) + part.side**2))
            ids.extend([IDS[words.IMAGE]] * part.side**2)
            grid = range(part.side)
            positions.extend((at, at + row, at + column) for row in grid for column in grid)
            at += part.side
            text([words.VISION_END])
        text([*question.words, words.ASSISTANT])
        answers.append(len(ids))
        text([question.answer, words.END])
    return Encoded(ids, positions, visual, answers, notes, exchanges)


def _noted(said: Sequence[str], start: int) -> list[tuple[int, int]]:
    """Return the noted words of a text that begins at token `start`; see `Encoded.notes`."""
    result = []
    for n, word in enumerate(said):
        if word == "note":
            first, second = said[n + 1 : n + 3]
            name = NAMES.index(second) if second in NAMES else ORDINALS.index(first)
            result.append((start + n + 3, name))
    return result


@dataclasses.dataclass
class Batch:
    """A training batch of `rows` dialogues, padded on the right to `length` tokens.

    Attributes:
        ids: Token ids, `[rows, length]`.
        positions: M-RoPE positions, `[3, rows, length]`.
        patches: Patches of the pictures of each side, `[patches, 1176]`, by cells per row.
        order: Places of these pictures' cells among all cells, in the order of `patches`.
        visual: Flat index into `ids` of each cell's visual token, `[cells]`.
        colours: Colour of each cell, `[cells]`; `len(COLOURS)` if empty.
        shapes: Shape of each cell, `[cells]`; `len(SHAPES)` if empty.
        cells: Index into `words.CELLS` of each cell, `[cells]`.
        named: Flat index into `ids` of all tokens that belong to a picture: visual tokens and
            noted words, `[named]`.
        names: Index into `NAMES` of the picture of each of them, `[named]`.
        answers: Flat index into `ids` of each answer, `[answers]`.
        cues: Index into `CUES` of the word before the last of each question that says where to
            look, `[answers]`; -1 for other questions.
        needed: Which tokens of its row each answer depends on, `[2, answers, length]`: the cells
            of the two pictures that are compared; twice the same tokens for other questions.
        kinds: Kind of each question.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    patches: dict[int, torch.Tensor]
    order: torch.Tensor
    visual: torch.Tensor
    colours: torch.Tensor
    shapes: torch.Tensor
    cells: torch.Tensor
    named: torch.Tensor
    names: torch.Tensor
    answers: torch.Tensor
    cues: torch.Tensor
    needed: torch.Tensor
    kinds: list[str]


def make_batch(samples: Sequence[Encoded], rng: np.random.Generator) -> Batch:
    """Pad dialogues to one length and draw their pictures anew."""
    length = max(len(sample.ids) for sample in samples)
    ids = np.full((len(samples), length), IDS[words.PAD])
    positions = np.zeros((len(samples), length, 3), dtype=np.int64)
    visual: list[int] = []
    answers: list[int] = []
    cues: list[int] = []
    needed: list[np.ndarray] = []
    kinds: list[str] = []
    shown: list[Picture] = []
    noted: list[tuple[int, int]] = []
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = sample.ids
        positions[row, : len(sample.ids)] = sample.positions
        visual += [row * length + n for n in sample.visual]
        answers += [row * length + n for n in sample.answers]
        shown += dialogues.pictures(sample.exchanges)
        noted += [(row * length + n, name) for n, name in sample.notes]
        for _, question in sample.exchanges:
            kinds.append(question.kind)
            cues.append(_cue(question))
            needed.append(_needed(question, sample, length))
    objects = np.array([thing for picture in shown for thing in picture.objects])
    empty = objects == EMPTY
    places = np.concatenate([4 * (np.arange(p.side**2) // p.side) + np.arange(p.side**2) % p.side for p in shown])
    sides = np.concatenate([np.full(p.side**2, p.side) for p in shown])
    names = [picture.name - 1 for picture in shown for _ in picture.objects]
    order = np.argsort(sides, kind="stable")
    patches = patchify(draw(shown, rng))
    return Batch(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(positions).permute(2, 0, 1),
        patches={int(side): patches[np.flatnonzero(sides == side)].flatten(0, 1) for side in np.unique(sides)},
        order=torch.from_numpy(order),
        visual=torch.tensor(visual),
        colours=torch.from_numpy(np.where(empty, len(COLOURS), objects // len(SHAPES))),
        shapes=torch.from_numpy(np.where(empty, len(SHAPES), objects % len(SHAPES))),
        cells=torch.from_numpy(places),
        named=torch.tensor([*visual, *(n for n, _ in noted)]),
        names=torch.tensor([*names, *(name for _, name in noted)]),
        answers=torch.tensor(answers),
        cues=torch.tensor(cues),
        needed=torch.from_numpy(np.stack(needed, 1)),
        kinds=kinds,
    )


def _cue(question: PictureQuestion) -> int:
    if question.kind == "which":
        return CUES.index(question.words[-2])
    return question.name - 1 if question.name else _NONE


def _needed(question: PictureQuestion, sample: Encoded, length: int) -> np.ndarray:
    """Return which tokens the answer depends on, `[2, length]`; see `Batch.needed`."""
    starts = np.cumsum([0, *(len(p.objects) for p in dialogues.pictures(sample.exchanges))])
    tokens = np.zeros((2, length), dtype=bool)
    if question.kind == "note":
        tokens[:, sample.ids.index(IDS[question.answer])] = True
    for n, cell in question.cells:
        token = sample.visual[int(starts[n]) + cell]
        for side in range(2):
            tokens[side, token] = not question.compared or question.compared[side] == n
    return tokens


def patchify(cells: np.ndarray) -> torch.Tensor:
    """Cut cells, uint8 `[cells, CELL, CELL, 3]`, into float32 patches `[cells, 4, 1176]`.

    The patches are those of the image processor: a cell is one block of merged patches.
    """
    x = torch.from_numpy(cells).float().div_(127.5).sub_(1)
    side = CELL // PATCH
    x = x.view(-1, side, PATCH, side, PATCH, 3).permute(0, 1, 3, 5, 2, 4)
    x = x[:, :, :, :, None].expand(-1, -1, -1, -1, 2, -1, -1)
    return x.reshape(len(cells), MERGE * MERGE, 3 * 2 * PATCH * PATCH)
