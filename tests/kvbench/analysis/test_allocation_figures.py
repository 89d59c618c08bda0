"""What the figures of an allocation analysis show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvbench.analysis import maps
from kvbench.analysis.allocation import draw_allocation


def drawn(monkeypatch: pytest.MonkeyPatch, moment: str, compressions: int) -> Any:
    """The figure of a policy at two budgets on 3 layers of 2 KV heads."""
    figures: list[Any] = []
    monkeypatch.setattr(maps, "save", lambda figure, stem, formats: figures.append(figure) or [])
    share = np.array([0.3, 1.7, 1.0, 1.0, 0.6, 1.4])  # 1 - (1 - 0.3) is a little above 0.3
    rows = [
        {
            "model": "tiny", "task": "vt", "length": 512, "moment": moment, "policy": "adakv",
            "budget": budget, "layer": i // 2, "kv_head": i % 2, "entries": 100 * budget * x,
            "share": x, "compressions": compressions,
        }
        for budget in (0.1, 0.2)
        for i, x in enumerate(share)
    ]  # fmt: skip
    draw_allocation(pd.DataFrame(rows).astype({"budget": str}), Path())
    (figure,) = figures
    return figure


@pytest.mark.parametrize(
    ("moment", "compressions", "n"),
    [("context", 6, "6 contexts"), ("context", 1, "1 context"), ("question", 12, "12 questions")],
)
def test_maps_say_what_they_average_over(
    moment: str, compressions: int, n: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn(monkeypatch, moment, compressions)
    said = " ".join(" ".join(text.get_text() for text in figure.texts).split())
    assert f"adakv, entries per KV head · vt · tiny, n = {n} per KV head" in said
    assert " KV head" in said and "layer" in said


def test_colours_reach_the_largest_number_and_have_no_arrow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = [ax.images[0] for ax in drawn(monkeypatch, "context", 6).axes if ax.images]
    assert len(images) == 2
    assert all(image.get_clim() == pytest.approx((0.3, 1.7)) for image in images)
    assert [image.colorbar.extend for image in images if image.colorbar] == ["neither"]
