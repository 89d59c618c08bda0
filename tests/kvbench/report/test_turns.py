"""Live dialogues have a full cache of their own, which no other moment is held against."""

from __future__ import annotations

import pandas as pd
from rich.console import Console

from kvbench.report import group_means, run_table
from kvbench.report.frames import pick, prepare, tasks_at_chance, uncompared

from .conftest import make_run


def both() -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    context = make_run(("random",), budgets=("0.2",), tasks=("dialogue",), group="dialogue")
    live = make_run(
        ("random",),
        budgets=("0.2",),
        tasks=("dialogue",),
        group="dialogue",
        moments=("turns",),
        full_level=0.4,
    )
    for frame in live:
        frame.loc[frame["policy"] == "full", "moment"] = "turns"
        frame["cell"] = frame["cell"] + "t"
    return (*context, *live)


def test_each_moment_is_paired_with_its_own_full() -> None:
    cells, samples, live_cells, live_samples = both()
    joint = group_means(pd.concat([cells, live_cells]), pd.concat([samples, live_samples]))
    for own_cells, own_samples in ((cells, samples), (live_cells, live_samples)):
        alone = group_means(own_cells, own_samples)
        for row in alone.itertuples():
            (found,) = joint[(joint["policy"] == row.policy) & (joint["moment"] == row.moment)].itertuples()
            assert (found.score, found.full_score, found.diff, found.diff_lo, found.diff_hi) == (
                row.score,
                row.full_score,
                row.diff,
                row.diff_lo,
                row.diff_hi,
            )


def test_panels_hold_their_own_full() -> None:
    cells, samples, live_cells, live_samples = both()
    results = prepare(pd.concat([cells, live_cells]), pd.concat([samples, live_samples]))
    panels = results.variants("reference")
    assert {v.moment for v in panels} == {"context", "turns"}
    for variant in panels:
        rows = pick(results.cells, variant)
        assert len(rows) == 2
        assert set(rows["moment"]) == ({"turns"} if variant.moment == "turns" else {"context", ""})
    assert uncompared(results.cells) == tasks_at_chance(results.cells) == []
    alone = pd.concat([cells, live_cells[live_cells["policy"] != "full"]])
    assert uncompared(alone) == ["dialogue"]


def test_a_run_of_nothing_but_full_at_turns_has_a_table() -> None:
    *_, cells, samples = both()
    console = Console(width=100, record=True)
    console.print(run_table(cells[cells["policy"] == "full"], samples))
    assert "full" in console.export_text() and "no cells" not in console.export_text()


def test_a_run_without_full_is_held_against_the_full_of_another() -> None:
    cells, samples = make_run(("snapkv", "random"), budgets=("0.2",))
    split = cells["policy"] == "random"
    apart = cells.assign(discriminative=cells["discriminative"] & ~split)
    pd.testing.assert_frame_equal(group_means(apart, samples), group_means(cells, samples))
    assert tasks_at_chance(prepare(apart, samples).cells) == []
