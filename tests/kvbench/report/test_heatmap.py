"""Heat maps name informed policies and metrics of fidelity as what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from kvbench.report import heatmap
from kvbench.report.frames import prepare

from .conftest import make_run


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, instead of files."""
    kept: list[Figure] = []

    def keep(figure: Figure, *_: object) -> list[Path]:
        kept.append(figure)
        return []

    monkeypatch.setattr(heatmap, "save", keep)
    return kept


def test_panels_of_informed_policies_are_marked(figures: list[Figure], tmp_path: Path) -> None:
    frames = make_run(["snapkv", "oracle"], ("0.1",), ["niah"], samples=6, depths=(0, 50, 100))
    heatmap.draw_heatmaps(prepare(*frames), tmp_path)
    titles = [axes.get_title(loc="left").replace("\n", "") for axes in figures[0].axes if axes.images]
    assert titles[:3] == ["full", "snapkv, 0.1", "oracle (informed), 0.1"]


def test_a_map_of_kl_has_its_name_and_four_digits(figures: list[Figure], tmp_path: Path) -> None:
    cells, samples = make_run(["snapkv"], ("0.1",), ["niah"], samples=6, depths=(0, 50, 100))
    samples["score"] = [1e-13] * 6 + [0.1772] * 6
    (drawn,) = heatmap.draw_heatmaps(prepare(cells.assign(metric="kl"), samples), tmp_path)
    texts = {text.get_text() for axes in figures[0].axes for text in axes.texts}
    assert texts == {"1e-13", "0.1772"}
    assert "KL, nats, n = 2" in drawn.title
    assert "KL, nats" in [axes.get_ylabel() for axes in figures[0].axes]
