"""Which samples of a run a policy loses: what the full cache answers and the policy does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import UserError
from kvbench.runs.cell import Cell
from kvbench.runs.load import load_frames
from kvbench.tables.text import listed

ANSWERED = 0.5
"""Least score of the full cache with which it answers a sample; a policy loses it with at most half of that score."""

_LABELS = ["model", "task", "length", "policy", "budget", "moment"]
"""What names a cell of a run; versions and devices may have changed since."""

_Key = tuple[str, int]
"""Sample and question."""


@dataclass(frozen=True)
class RecordedAnswer:
    """One answer of a run."""

    response: str
    score: float


class RunAnswers:
    """The answers of a run, by cell and sample.

    Args:
        folder: Folder of the run.

    Raises:
        UserError: The run cannot be read, has no full cache or no responses, or a lower score is better.
    """

    def __init__(self, folder: Path) -> None:
        columns = ["cell", "sample_id", "question_id", "repeat", "error", "response", "score"]
        cells, samples = load_frames(folder, columns)
        if not (cells["policy"] == "full").any():
            raise UserError(f"{folder} has no full cache to compare with; run it again without --no-full")
        falling = cells.loc[~cells["higher_is_better"].astype(bool), "task"].unique()
        if len(falling):
            raise UserError(f"{falling[0]} measures texts, so no answer can be lost; choose another --task")
        self.folder = folder
        named = samples.merge(cells[["cell", *_LABELS]], on="cell")
        named = named[(named["repeat"] == 0) & (named["error"] == "")]
        self._answers: dict[tuple[str, ...], dict[_Key, RecordedAnswer]] = {}
        for names, rows in named.groupby(_LABELS, sort=False):
            self._answers[tuple(map(str, names))] = {
                (str(sample_id), int(question_id)): RecordedAnswer(str(response), float(score))
                for sample_id, question_id, response, score in zip(
                    *(rows[column].tolist() for column in ("sample_id", "question_id", "response", "score")),
                    strict=True,
                )
            }

    def full(self, cell: Cell) -> Mapping[_Key, RecordedAnswer]:
        """Return the full cache's answers to the questions of a cell."""
        return self._answers.get((cell.model, cell.task, str(cell.length), "full", "full", ""), {})

    def of(self, cell: Cell) -> Mapping[_Key, RecordedAnswer]:
        """Return the answers of a cell.

        Raises:
            UserError: The run has none; if it does not have the policy, the policies that it has are named.
        """
        names = [str(cell.labels[column]) for column in _LABELS]
        if tuple(names) not in self._answers:
            model, task, length, policy, budget, moment = names
            policies = list(dict.fromkeys(known for _, _, _, known, _, _ in self._answers))
            if policy not in policies:
                raise UserError(f"{self.folder} has no answers of {policy}; it has {listed(policies)}")
            raise UserError(
                f"{self.folder} has no answers of {policy} at {budget}, moment {moment}, on {task}, length {length}, "
                f"with {model}; run this cell first, or leave it out"
            )
        return self._answers[tuple(names)]


def is_answered(full: RecordedAnswer) -> bool:
    """Return whether the full cache answers a sample."""
    return full.score >= ANSWERED


def is_lost(full: RecordedAnswer, other: RecordedAnswer) -> bool:
    """Return whether a policy loses a sample that the full cache answers."""
    return is_answered(full) and other.score <= full.score / 2


def common_opening(contexts: Sequence[tuple[int, ...]]) -> int:
    """Return how many first tokens all contexts share; 0 for a single one."""
    if len(contexts) < 2:
        return 0
    first, last = min(contexts), max(contexts)
    shared = (index for index, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return next(shared, min(len(first), len(last)))
