"""Runs on disk and their publications."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvbench.leaderboard.publication import Publication, publish
from kvbench.runs.store import RunStore

from ..report.conftest import Frames, make_run

Publish = Callable[..., Publication]


def save_run(folder: Path, frames: Frames, **grid: Any) -> Path:
    """Write frames as the tables of a finished run."""
    cells, samples = frames
    with RunStore(folder) as store:
        store.save_grid(
            {
                "policies": [*dict.fromkeys(cells["policy"])],
                "tasks": [*dict.fromkeys(cells["task"])],
                "samples": int(cells["samples"].max()),
                "out": str(folder),
                **grid,
            }
        )
        store.write(cells, samples)
    return folder


def with_scores(frames: Frames, score: float, **setting: str) -> Frames:
    """The run with all samples of some cells at one score."""
    cells, samples = frames[0].copy(), frames[1].copy()
    for frame in (cells, samples):
        chosen = pd.Series(True, index=frame.index)
        for column, value in setting.items():
            chosen &= frame[column] == value
        frame.loc[chosen, "score"] = score
    return cells, samples


@pytest.fixture
def published(tmp_path: Path) -> Publish:
    """A function that writes frames as a run and publishes it."""

    def publish_frames(name: str = "run", frames: Frames | None = None, **grid: Any) -> Publication:
        run = save_run(tmp_path / name, frames or make_run(samples=12), **grid)
        return publish(run, tmp_path / "board")

    return publish_frames
