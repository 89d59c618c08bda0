"""Bars of the loss against the full cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from kvbench.errors import UserError
from kvbench.report import losses as bars
from kvbench.report.frames import prepare

from .conftest import make_run


def test_a_loss_is_the_part_of_the_full_score_that_is_missing() -> None:
    cells, samples = make_run(("snapkv", "keydiff"), ("0.1", "0.4"), ("vt", "cwe"), samples=20)
    found = bars.losses(prepare(cells, samples)).set_index(["policy", "budget"])
    assert len(found) == 4 and (found["tasks"] == 2).all()
    full = sum(cells[(cells["policy"] == "full") & (cells["task"] == task)]["score"].iloc[0] for task in ("vt", "cwe"))
    for (policy, budget), row in found.iterrows():
        kept = cells[(cells["policy"] == policy) & (cells["budget"] == budget)]["score"].sum()
        assert row["loss"] == pytest.approx((full - kept) / full)
    lower = cells.assign(higher_is_better=cells["task"] != "cwe")
    assert (bars.losses(prepare(lower, samples))["tasks"] == 1).all()


def test_every_budget_has_a_panel_with_a_bar_per_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    saved = bars.save
    monkeypatch.setattr(bars, "save", lambda figure, *rest: (drawn.append(figure), saved(figure, *rest))[1])
    cells, samples = make_run(("snapkv", "keydiff", "random"), ("0.1", "0.4"), samples=20)
    results = prepare(cells, samples)
    paths = bars.draw_losses(results, tmp_path)
    assert {path.name for path in paths} == {"losses-ruler.png", "losses-ruler.svg"}
    expected = bars.losses(results)
    for axes, budget in zip(drawn[0].axes, ("0.1", "0.4"), strict=True):
        widths = [patch.get_width() for patch in axes.patches]  # type: ignore[attr-defined]
        np.testing.assert_allclose(widths, 100 * expected[expected["budget"] == budget]["loss"])
    labels: list[Any] = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert labels == ["snapkv", "keydiff", "random"]


def test_without_the_full_cache_there_is_no_loss(tmp_path: Path) -> None:
    cells, samples = make_run(with_full=False, samples=5)
    with pytest.raises(UserError, match="there is no loss to draw"):
        bars.draw_losses(prepare(cells, samples), tmp_path)
