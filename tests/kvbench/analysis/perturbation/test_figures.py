"""What the figures of a perturbation analysis show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvbench.analysis import maps
from kvbench.analysis.perturbation import comparison, figures
from tests.kvbench.analysis.perturbation.test_comparison import table

CONTEXTS = list("abcdefgh")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The figures of two policies at two budgets by the beginning of their names."""
    kept: dict[str, Any] = {}

    def keep(figure: Any, stem: Path, formats: Any) -> list[Path]:
        kept[stem.name.split("-t")[0]] = figure
        return []

    monkeypatch.setattr(figures, "save", keep)
    monkeypatch.setattr(maps, "save", keep)
    rng = np.random.default_rng(0)
    parts = []
    for budget, size in (("0.1", 1.0), ("0.4", 40.0)):  # the second panel has the largest numbers
        old = rng.random((8, 3, 2)) * size
        parts.append(table({"old": old, "new": old * [1.0, 3.0]}, CONTEXTS, budget))
    heads = pd.concat(parts, ignore_index=True)
    layers = heads[heads["head"] == 0].assign(l1_forward=np.nan)
    cells, pairs = comparison.cells(heads), comparison.pairs(heads)
    figures.draw_perturbation(heads, layers, pairs, cells, Path())
    return kept


def titles(figure: Any) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.texts).split())


def test_no_band_is_cut_off(drawn: dict[str, Any]) -> None:
    tops = []
    for ax in drawn["layers"].axes:
        assert ax.get_ylim()[0] == 0
        tops += [collection.get_paths()[0].vertices[:, 1].max() for collection in ax.collections]
    assert len(tops) == 4
    assert all(ax.get_ylim()[1] >= max(tops) for ax in drawn["layers"].axes)


def test_a_logarithmic_axis_says_so(drawn: dict[str, Any]) -> None:
    assert all(ax.get_xscale() == "log" for ax in drawn["budgets"].axes)
    assert "budget, log scale" in titles(drawn["budgets"])
    assert "log" not in titles(drawn["layers"])


def test_maps_say_how_many_questions_they_show_and_where_colours_end(drawn: dict[str, Any]) -> None:
    figure = drawn["heads-new-vs-old"]
    assert "new against old" in titles(figure) and "n = 8 questions per head" in titles(figure)
    images = [ax.images[0] for ax in figure.axes if ax.images]
    bars = [image.colorbar for image in images if image.colorbar]
    assert [bar.extend for bar in bars] == ["neither", "max"]  # head 1 changes by 200%
    assert [bar.mappable.get_clim() for bar in bars] == [(0, 100), (-100, 100)]
