"""One policy against another at the same budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from kvbench.errors import UserError
from kvbench.report.against import differences, left_out, tables, write
from kvbench.stats import paired
from kvbench.tables.outputs import terminal

from .conftest import make_run, unaveraged


def test_of_one_task_it_is_the_paired_difference() -> None:
    cells, samples = make_run(("snapkv", "criticalkv", "random"), tasks=("vt",))
    found = differences(cells, samples, "snapkv")
    assert set(found["policy"]) == {"criticalkv", "random"} and len(found) == 6
    for row in found.itertuples():
        scores = {}
        for policy in ("snapkv", str(row.policy)):
            mine = samples[(samples["policy"] == policy) & (samples["budget"] == row.budget)]
            keys = list(zip(mine["sample_id"], mine["question_id"], mine["repeat"], strict=True))
            scores[policy] = dict(zip(keys, mine["score"], strict=True))
            clusters = dict(zip(keys, mine["context_id"], strict=True))
        want = paired(scores[str(row.policy)], scores["snapkv"], clusters)
        assert (row.diff, row.diff_lo, row.diff_hi) == pytest.approx((want.mean, want.lo, want.hi), abs=1e-9)
        assert row.score - row.base_score == pytest.approx(row.diff, abs=1e-9)


def test_over_tasks_the_differences_of_the_tasks_are_averaged() -> None:
    cells, samples = make_run(("snapkv", "criticalkv"), budgets=("0.2",), tasks=("vt", "cwe"))
    both = differences(cells, samples, "snapkv")["diff"].item()
    apart = [differences(cells[cells["task"] == t], samples, "snapkv")["diff"].item() for t in ("vt", "cwe")]
    assert both == pytest.approx(sum(apart) / 2)


@pytest.mark.parametrize("shorter", ["snapkv", "criticalkv"])
def test_all_numbers_of_a_row_are_over_the_questions_that_both_have(shorter: str) -> None:
    cells, samples = make_run(("snapkv", "criticalkv"), budgets=("0.2",), tasks=("vt",))
    part = samples[(samples["policy"] != shorter) | (samples["doc_id"] < 20)]
    (row,) = differences(cells, part, "snapkv").itertuples()
    by = part[part["doc_id"] < 20].pivot(index="doc_id", columns="policy", values="score")
    assert row.base_score == pytest.approx(by["snapkv"].mean())
    assert row.score == pytest.approx(by["criticalkv"].mean())
    assert row.diff == pytest.approx(by["criticalkv"].mean() - by["snapkv"].mean())
    longer = part[part["policy"] != shorter].groupby("policy")["score"].mean()
    assert longer.drop("full").item() not in (pytest.approx(row.base_score), pytest.approx(row.score))


def test_it_is_shown_and_written(tmp_path: Path) -> None:
    cells, samples = make_run(("snapkv", "criticalkv"), budgets=("0.2",))
    found = differences(cells, samples, "snapkv")
    console = Console(width=120, record=True)
    for table in tables(found, "snapkv"):
        console.print(terminal(table))
    assert "against snapkv" in console.export_text()
    text = write(found, "snapkv", tmp_path / "a" / "b.md").read_text()
    assert text.count("`criticalkv`") == 1


def test_a_policy_that_was_not_run_is_named_with_the_nearest() -> None:
    cells, samples = make_run(("snapkv", "criticalkv"), budgets=("0.2",))
    with pytest.raises(UserError, match="did you mean snapkv"):
        differences(cells, samples, "snapvk")


def test_a_score_that_is_no_mean_is_left_out() -> None:
    frames = make_run(("snapkv", "criticalkv"), budgets=("0.2",), tasks=("vt", "cwe"))
    cells, samples = unaveraged(frames, "cwe")
    assert left_out(frames[0]) == ""
    assert left_out(cells).startswith("Not compared: cwe. A score that is not a mean over samples")
    found = differences(cells, samples, "snapkv")
    assert found["tasks"].item() == 1
    alone = differences(*make_run(("snapkv", "criticalkv"), ("0.2",), ("vt",)), "snapkv")
    assert found["diff"].item() == alone["diff"].item()
    assert not len(differences(*unaveraged(unaveraged(frames, "vt"), "cwe"), "snapkv"))


def test_an_informed_base_is_marked(tmp_path: Path) -> None:
    found = differences(*make_run(("snapkv", "oracle"), budgets=("0.2",)), "oracle")
    text = write(found, "oracle", tmp_path / "a.md").read_text()
    assert text.startswith("# Against `oracle` (informed)\n")
    assert "against `oracle` (informed)\n" in text and "| `oracle` (informed) |" in text
