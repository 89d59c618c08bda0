"""The samples of a report, sorted by cell once for fast lookup."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pandas as pd

from kvbench.stats import Floats

COLUMNS = tuple(
    "cell sample_id question_id repeat context_id extra context_tokens question_tokens score "
    "response held_entries".split()
)
"""Columns of `samples.parquet` that a report needs."""

Integers = npt.NDArray[np.int64]


def natural_key(name: object) -> list[str | int]:
    """Return a sort key by which numbers in names ascend: `2` before `10`."""
    return [int(part) if index % 2 else part for index, part in enumerate(re.split(r"([0-9]+)", str(name)))]


class Samples:
    """The samples of runs. If a cell has several scores for the same response, the last one counts.

    Args:
        frame: The frame of `samples.parquet`, at least `COLUMNS`. Texts can be categories.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame.reset_index(drop=True)
        self._keys, self._keys_per_context = _keys(self._frame)
        cell_codes, cell_names = pd.factorize(frame["cell"])
        row_order = np.argsort(cell_codes, kind="stable")
        row_counts = np.bincount(cell_codes, minlength=len(cell_names))
        row_starts = np.cumsum(row_counts) - row_counts
        self._rows = {
            str(cell_name): self._last(row_order[row_start : row_start + row_count])
            for cell_name, row_start, row_count in zip(cell_names, row_starts, row_counts, strict=True)
        }

    def __len__(self) -> int:
        return sum(map(len, self._rows.values()))

    def of(self, cell_ids: Iterable[object]) -> pd.DataFrame:
        """Return the rows of some cells, in the order of the frame."""
        return self._frame.iloc[np.sort(self._found(cell_ids))]

    def wide(self, cell_ids: Iterable[str]) -> tuple[Floats, npt.NDArray[np.intp]]:
        """Return the scores of some cells by response, and the context of each response.

        Args:
            cell_ids: The cells; one without samples is a column of NaN.

        Returns:
            `[responses, cells]`, NaN if a cell lacks the response; `[responses]`, ascending from 0. Responses are
            sorted by context, sample, question and repeat. Both are empty if no cell has a sample.
        """
        cell_ids = list(cell_ids)
        cell_rows = [self._rows.get(cell_id, _NONE) for cell_id in cell_ids]
        row_indices = np.concatenate([*cell_rows, _NONE])
        response_keys, key_indices = np.unique(self._keys[row_indices], return_inverse=True)
        score_matrix = np.full((len(response_keys), len(cell_ids)), np.nan)
        column_indices = np.repeat(np.arange(len(cell_ids)), list(map(len, cell_rows)))
        score_matrix[key_indices, column_indices] = self._frame["score"].to_numpy(np.float64)[row_indices]
        return score_matrix, np.unique(response_keys // self._keys_per_context, return_inverse=True)[1]

    def answer_table(self, cell_id: str) -> Integers:
        """Return codes of question and response and the held entries of a cell, `[responses, 3]`, sorted by question.

        Equal responses have the same code in all cells. Empty if the frame has no responses.
        """
        row_indices = self._by_question(cell_id)
        return np.column_stack([self._keys[row_indices], self._answer_codes[row_indices]])

    def scores_by_question(self, cell_id: str) -> Floats:
        """Return the scores of the responses in `answer_table`, `[responses]`."""
        return self._frame["score"].to_numpy(np.float64)[self._by_question(cell_id)]

    def _by_question(self, cell_id: str) -> Integers:
        """Return the rows of a cell's responses, sorted by question; none if the frame has no responses."""
        row_indices = self._rows.get(cell_id, _NONE) if "response" in self._frame else _NONE
        return row_indices[np.argsort(self._keys[row_indices])]

    @functools.cached_property
    def _answer_codes(self) -> Integers:
        if "response" not in self._frame:
            return np.empty((0, 2), dtype=np.int64)
        held_entries = self._frame["held_entries"].to_numpy(np.int64)
        return np.column_stack([pd.factorize(self._frame["response"])[0], held_entries])

    def _found(self, cell_ids: Iterable[object]) -> Integers:
        row_arrays = (self._rows.get(str(cell_id), _NONE) for cell_id in cell_ids)
        return np.concatenate([*row_arrays, _NONE])

    def _last(self, row_indices: Integers) -> Integers:
        """Return the last row of every response of a cell."""
        reversed_rows = row_indices[::-1]
        _, last_positions = np.unique(self._keys[reversed_rows], return_index=True)
        return row_indices if len(last_positions) == len(row_indices) else np.sort(reversed_rows[last_positions])


_NONE = np.empty(0, dtype=np.int64)


def _keys(frame: pd.DataFrame) -> tuple[Integers, int]:
    """Return a key for each response, ordered by context, sample, question and repeat, and the keys per context.

    The integer quotient of both identifies the context.
    """
    response_keys = _ranks(frame["context_id"])
    keys_per_context = 1
    for column_name in ("sample_id", "question_id", "repeat"):
        value_ranks = _ranks(frame[column_name])
        rank_count = int(value_ranks.max(initial=0)) + 1
        response_keys = response_keys * rank_count + value_ranks
        keys_per_context *= rank_count
    return response_keys, keys_per_context


def _ranks(column: pd.Series) -> Integers:
    """Return the rank of each value, from 0."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        category_ranks = np.argsort(np.argsort(column.cat.categories.astype(str).to_numpy()))
        return category_ranks.astype(np.int64)[column.cat.codes.to_numpy()]
    return pd.factorize(column, sort=True)[0].astype(np.int64)
