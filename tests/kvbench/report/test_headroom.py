"""Policies that see the answer compete with none, and the distance to them is shown at the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvbench.report.against import differences
from kvbench.report.frames import prepare, unit_scale
from kvbench.report.front import front_of
from kvbench.report.headroom import headroom, headroom_tables
from kvbench.report.panel import panels
from kvbench.report.rendering import write_report
from kvbench.report.verdict import cheapest
from kvbench.tables.outputs import markdown, plain_text
from kvbench.tables.table import Name

from .conftest import STRENGTH, make_run


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Snapkv and the best one, which sees the answer."""
    monkeypatch.setitem(STRENGTH, "oracle", 0.99)
    cells, samples = make_run(policies=("snapkv", "oracle"), budgets=("0.1", "0.2"))
    return cells.assign(kl=np.where(cells["policy"] == "snapkv", 0.5, 0.25)), samples


def test_headroom_is_the_paired_difference_at_the_same_budget(frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    rows = headroom(prepare(*frames)).set_index("budget")
    wanted = differences(*frames, "oracle").set_index("budget")
    assert list(rows["policy"]) == ["snapkv", "snapkv"]
    for column in ("score", "diff", "diff_lo", "diff_hi"):
        assert rows[column].to_dict() == wanted[column].to_dict()
    assert (rows["kl"] == 0.5).all() and (rows["informed_kl"] == 0.25).all()
    (table,) = headroom_tables(headroom(prepare(*frames)))
    assert "KL, nats" in markdown(table) and "not the best possible" in markdown(table)


def test_other_bytes_are_interpolated_and_what_is_outside_is_left_out(
    frames: tuple[pd.DataFrame, pd.DataFrame],
) -> None:
    cells, samples = frames
    is_moved = (cells["policy"] == "snapkv") & (cells["budget"] == "0.1")
    cells["kv_bytes_live"] = cells["kv_bytes_live"].where(~is_moved, 1.4 * cells["kv_bytes_live"])
    is_out = (cells["policy"] == "snapkv") & (cells["budget"] == "0.2")
    cells["kv_bytes_live"] = cells["kv_bytes_live"].where(~is_out, 2 * cells["kv_bytes_live"])
    results = prepare(cells, samples)
    (row,) = headroom(results).to_dict("records")
    curve = results.overall[results.overall["policy"] == "oracle"].sort_values("share")
    expected = np.interp(np.log(row["share"]), np.log(curve["share"]), curve["score"])
    assert row["informed_score"] == pytest.approx(expected)
    assert row["diff"] == pytest.approx(row["score"] - expected)
    assert np.isnan(row["diff_lo"])


def test_it_is_on_no_front_and_never_chosen(frames: tuple[pd.DataFrame, pd.DataFrame], tmp_path: Path) -> None:
    results = prepare(*frames)
    (panel,) = panels(results)
    points = panel.overall[panel.overall["policy"] != "full"].reset_index(drop=True)
    assert set(points["policy"].iloc[front_of(points)]) == {"snapkv"}
    assert cheapest(panel.overall, unit_scaled=True, within=0.5).row["policy"] == "snapkv"
    alone = points[points["policy"] == "oracle"].reset_index(drop=True)
    assert len(front_of(alone)) == 0
    ((_, names), *_) = panel.names()
    assert names[:3] == [Name("full"), Name("snapkv"), Name("snapkv")]
    assert names[3:] == [(Name("oracle"), " (informed)")] * 2
    assert "## Headroom" in write_report(results, tmp_path)[0].read_text(encoding="utf-8")


def test_without_an_informed_policy_there_is_none() -> None:
    assert not len(headroom(prepare(*make_run())))


def test_distances_in_nats_are_never_shown_in_points() -> None:
    cells = prepare(*make_run())
    assert unit_scale(cells.overall)
    assert not unit_scale(cells.overall.assign(metric="kl"))


def test_the_reference_is_marked_and_rows_are_ordered_by_budget(frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    (table,) = headroom_tables(headroom(prepare(*make_run(("snapkv", "criticalkv", "oracle"), ("0.2", "0.1")))))
    assert plain_text(table.title).endswith("headroom to oracle (informed)")
    assert (Name("oracle"), " (informed)") in [column.title for column in table.columns]
    rows = [tuple(map(plain_text, row.cells[:2])) for row in table.rows]
    assert rows == [("0.1", "snapkv"), ("0.1", "criticalkv"), ("0.2", "snapkv"), ("0.2", "criticalkv")]
    (table,) = headroom_tables(headroom(prepare(*frames)))
    assert plain_text(table.columns[-1].title) == "KL of oracle (informed)"


def test_plain_oracle_is_the_reference_and_the_others_are_named() -> None:
    cells, samples = make_run(("oracle:target=reference", "oracle", "snapkv"), ("0.2",))
    cells["informed"] = cells["policy"].str.startswith("oracle")
    rows = headroom(prepare(cells, samples))
    assert set(rows["informed_policy"]) == {"oracle"}
    (table,) = headroom_tables(rows)
    assert plain_text(table.notes[-1]) == "Informed policies that are not used here: oracle:target=reference."


def test_scores_that_are_kl_are_shown_once(frames: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    cells, samples = frames
    (table,) = headroom_tables(headroom(prepare(cells.assign(metric="kl", higher_is_better=False), samples)))
    titles = [plain_text(column.title) for column in table.columns]
    assert titles == ["budget", "policy", "KV held", "KL, nats", "oracle (informed)", "difference"]
