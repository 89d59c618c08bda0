"""The samples of a report, sorted by cell once, so that every part of it finds its own at once."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvbench.stats import Floats

COLUMNS = tuple(
    "cell sample_id question_id repeat context_id extra context_tokens question_tokens score "
    "response held_entries".split()
)
"""The columns of `samples.parquet` that a report reads."""

Integers = npt.NDArray[np.int64]


class Samples:
    """The samples of runs.

    If a cell has several scores of the same response, the last one counts.

    Args:
        frame: The frame of `samples.parquet`, with `COLUMNS` at least. Texts can be categories.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame.reset_index(drop=True)
        self._keys, self._of_context = _keys(self._frame)
        codes, names = pd.factorize(frame["cell"])
        order = np.argsort(codes, kind="stable")
        counts = np.bincount(codes, minlength=len(names))
        starts = np.cumsum(counts) - counts
        self._rows = {
            str(name): self._last(order[start : start + count])
            for name, start, count in zip(names, starts, counts, strict=True)
        }

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def of(self, cells: Iterable[object]) -> pd.DataFrame:
        """The rows of some cells, in the order of the frame."""
        return self._frame.iloc[np.sort(self._found(cells))]

    def wide(self, cells: Iterable[str]) -> tuple[Floats, npt.NDArray[np.intp]]:
        """Scores of some cells by response, and the context of each response.

        Args:
            cells: The cells; one that has no samples is a column of NaN.

        Returns:
            `[responses, cells]`, NaN where a cell lacks the response; `[responses]`, ascending from
            0. Responses are sorted by context, sample, question and repeat. Both are empty if no
            cell has a sample.
        """
        cells = list(cells)
        parts = [self._rows.get(cell, _NONE) for cell in cells]
        rows = np.concatenate([*parts, _NONE])
        keys, place = np.unique(self._keys[rows], return_inverse=True)
        values = np.full((len(keys), len(cells)), np.nan)
        column = np.repeat(np.arange(len(cells)), list(map(len, parts)))
        values[place, column] = self._frame["score"].to_numpy(np.float64)[rows]
        return values, np.unique(keys // self._of_context, return_inverse=True)[1]

    def told(self, cell: str) -> Integers:
        """What a cell did with each question, `[responses, 3]`, sorted by question.

        Returns:
            A number for the question; one for the response, the same for the same text in all
            cells; and the entries that were held. Empty if the frame has no responses.
        """
        rows = self._rows.get(cell, _NONE) if "response" in self._frame else _NONE
        rows = rows[np.argsort(self._keys[rows])]
        return np.column_stack([self._keys[rows], self._told[rows]])

    @functools.cached_property
    def _told(self) -> Integers:
        if "response" not in self._frame:
            return np.empty((0, 2), dtype=np.int64)
        held = self._frame["held_entries"].to_numpy(np.int64)
        return np.column_stack([pd.factorize(self._frame["response"])[0], held])

    def _found(self, cells: Iterable[object]) -> Integers:
        rows = (self._rows.get(str(cell), _NONE) for cell in cells)
        return np.concatenate([*rows, _NONE])

    def _last(self, rows: Integers) -> Integers:
        """The last row of every response of a cell."""
        backwards = rows[::-1]
        _, last = np.unique(self._keys[backwards], return_index=True)
        return rows if len(last) == len(rows) else np.sort(backwards[last])


_NONE = np.empty(0, dtype=np.int64)


def _keys(frame: pd.DataFrame) -> tuple[Integers, int]:
    """A number for each response, in the order of context, sample, question and repeat.

    Returns:
        `[n]`; the numbers of one context, divided by the second value, are the same number.
    """
    keys = _ranks(frame["context_id"])
    of_context = 1
    for name in ("sample_id", "question_id", "repeat"):
        ranks = _ranks(frame[name])
        count = int(ranks.max(initial=0)) + 1
        keys = keys * count + ranks
        of_context *= count
    return keys, of_context


def _ranks(column: pd.Series) -> Integers:
    """The place of each value among the sorted values, from 0."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        places = np.argsort(np.argsort(column.cat.categories.astype(str).to_numpy()))
        return places.astype(np.int64)[column.cat.codes.to_numpy()]
    return pd.factorize(column, sort=True)[0].astype(np.int64)
