"""Scores of which less is better are marked wherever they are shown."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.report import render, run_table
from kvbench.report.pareto_figures import _score_label


def shown(cells: Any, samples: Any) -> str:
    out = StringIO()
    Console(file=out, width=120).print(run_table(cells, samples))
    return out.getvalue()


def test_less_is_better(run_frames: Any, tmp_path: Path) -> None:
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"], samples=12)
    down = cells.assign(higher_is_better=False, metric="nll_per_token")
    for name in ("score", "score_lo", "score_hi", "full_score"):
        down[name] += 7.0
    table = shown(down, samples)
    assert "score ↓" in table and "↓ lower is better: nll_per_token" in table
    text = render(down, samples, tmp_path / "down")[0].read_text()
    assert "| score ↓ |" in text and "`vt`, metric `nll_per_token`" in text
    assert _score_label(False, down) == "nll_per_token (lower is better)"
    assert "score ↓" not in shown(cells, samples)
    assert _score_label(True, cells) == "score (0 to 100)"
    assert _score_label(False, cells) == "string_match"
    assert "score ↓" not in render(cells, samples, tmp_path / "up")[0].read_text()
