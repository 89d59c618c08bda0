from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from kvbench.errors import UserError
from kvbench.papers.layouts.measures import Config, ScoreSource, load, merged
from kvbench.regression import significance

from ...report.conftest import make_run, unaveraged
from .conftest import measures_of, write_run

VT, CWE = ScoreSource("vt"), ScoreSource("cwe")
SNAP = Config("reference", "snapkv", "0.2", "context", 1024, 0)


def test_a_score_is_looked_up_by_configuration_and_task() -> None:
    cells, samples = make_run(samples=8)
    measures = measures_of((cells, samples))
    mine = cells[(cells["policy"] == "snapkv") & (cells["budget"] == "0.2")]
    assert measures.score(SNAP, VT) == float(mine.loc[mine["task"] == "vt", "score"].iloc[0])
    assert measures.score(SNAP.full, VT) == float(cells.loc[0, "full_score"])
    assert measures.live_bytes(SNAP, VT) / measures.full_bytes(SNAP, VT) == pytest.approx(0.204)
    for other in (replace(SNAP, budget="0.3"), replace(SNAP, model="x"), replace(SNAP, seed=1)):
        assert math.isnan(measures.score(other, VT))
        assert math.isnan(measures.live_bytes(other, VT))


def test_a_task_of_natural_length_has_any_length() -> None:
    measures = measures_of(make_run(tasks=["vt"], lengths=(0,), samples=8))
    assert measures.score(SNAP, VT) == measures.score(replace(SNAP, length=0), VT)


def test_a_live_dialogue_has_its_own_full_cache() -> None:
    cells, samples = make_run(["snapkv"], ["0.2"], ["vt"], samples=8, moments=("turns",))
    live = replace(SNAP, moment="turns")
    assert measures_of((cells, samples)).row(live.full, VT) is None
    cells.loc[cells["policy"] == "full", "moment"] = "turns"
    assert measures_of((cells, samples)).row(live.full, VT) is not None


def test_a_failed_cell_has_no_score() -> None:
    measures = measures_of(make_run(failed=[("snapkv", "0.2", "vt")], samples=8))
    assert math.isnan(measures.score(SNAP, VT))
    assert measures.row(SNAP, VT) is not None


def test_a_part_of_a_task_is_the_mean_of_its_samples() -> None:
    cells, samples = make_run(["snapkv"], ["0.2"], ["vt"], samples=9)
    samples["extra"] = [json.dumps({"kind": "ab"[i % 2]}) for i in samples["doc_id"]]
    measures = measures_of((cells, samples))
    mine = samples[(samples["policy"] == "snapkv") & (samples["doc_id"] % 2 == 1)]
    assert measures.score(SNAP, ScoreSource("vt", "kind", "b")) == pytest.approx(mine["score"].mean())
    assert math.isnan(measures.score(SNAP, ScoreSource("vt", "kind", "c")))


def test_one_task_is_tested_as_by_the_statistics() -> None:
    cells, samples = make_run(samples=20)
    measures = measures_of((cells, samples))
    pairs = measures.paired(SNAP, SNAP.full, ((VT, 1.0),))
    vt = samples[samples["task"] == "vt"]
    own, full = (
        dict(zip(part["sample_id"], part["score"], strict=True))
        for part in (vt[(vt["policy"] == "snapkv") & (vt["budget"] == "0.2")],
                     vt[vt["policy"] == "full"])
    )  # fmt: skip
    contexts = dict(zip(vt["sample_id"], vt["context_id"], strict=True))
    assert pairs.tested(20_000).p == pytest.approx(significance.paired_p(own, full, contexts))
    assert pairs.gap == pytest.approx(sum(own[k] - full[k] for k in own) / 20)


def test_tasks_of_a_mean_weigh_the_same_whatever_their_samples() -> None:
    cells, samples = make_run(samples=20)
    few = samples[(samples["task"] == "vt") | (samples["doc_id"] < 5)]
    pairs = measures_of((cells, few)).paired(SNAP, SNAP.full, ((VT, 0.5), (CWE, 0.5)))
    one = few[(few["policy"] == "snapkv") & (few["budget"] == "0.2")]
    gap = one.groupby("task")["score"].mean() - few[few["policy"] == "full"].groupby("task")["score"].mean()
    assert pairs.gap == pytest.approx(gap.mean())
    assert len(set(pairs.contexts.values())) == 25


def test_responses_that_only_one_has_are_not_compared() -> None:
    cells, samples = make_run(samples=8)
    part = samples[(samples["policy"] == "full") | (samples["doc_id"] < 3)]
    measures = measures_of((cells, part))
    assert len(measures.paired(SNAP, SNAP.full, ((VT, 1.0),)).first) == 3
    nothing = measures.paired(SNAP, replace(SNAP, policy="x"), ((VT, 1.0),))
    assert math.isnan(nothing.gap)
    assert math.isnan(nothing.tested(1000).p)


# --- several runs ---------------------------------------------------------------------------------


def test_runs_complete_each_other(tmp_path: Path) -> None:
    one = write_run(make_run(["snapkv"], ["0.2"], ["vt"], samples=6), tmp_path / "a")
    two = write_run(make_run(["adakv"], ["0.2"], ["vt"], samples=6), tmp_path / "b")
    measures = load([one, two], {})
    assert set(measures.cells["policy"]) == {"full", "snapkv", "adakv"}
    assert len(measures.cells) == 3


def test_one_measurement_on_two_machines_counts_once() -> None:
    cells, _ = make_run(["snapkv"], ["0.2"], ["vt"], samples=6)
    again = cells.assign(cell="x" + cells["cell"], device="cuda")
    both = merged(pd.concat([cells, again], ignore_index=True))
    assert len(both) == len(cells)


def test_a_cell_that_failed_gives_way() -> None:
    cells, _ = make_run(["snapkv"], ["0.2"], ["vt"], samples=6)
    bad = cells.assign(cell="x" + cells["cell"], status="error", score=math.nan)
    for order in ((cells, bad), (bad, cells)):
        assert set(merged(pd.concat(order, ignore_index=True))["status"]) == {"ok"}


def test_two_scores_of_the_same_are_one_clear_error(tmp_path: Path) -> None:
    cells, samples = make_run(["snapkv"], ["0.2"], ["vt"], samples=6)
    one = write_run((cells, samples), tmp_path / "a")
    other = cells.assign(cell="x" + cells["cell"], dtype="bfloat16", score=0.125)
    two = write_run((other, samples.assign(cell="x" + samples["cell"])), tmp_path / "b")
    with pytest.raises(UserError) as error:
        load([one, two], {"policy": ["snapkv"]})
    text = str(error.value)
    assert f"{one} and {two} have two scores of vt, full" in text
    assert "and 0.125; they differ in dtype (float32 and bfloat16)" in text
    assert "\n" not in text


def test_other_data_is_another_measurement() -> None:
    cells, _ = make_run(["snapkv"], ["0.2"], ["vt"], samples=6)
    other = cells.assign(cell="x" + cells["cell"], match="x" + cells["match"], data_hash="new")
    with pytest.raises(UserError, match=r"they differ in data hash \(abab\w+ and new\)"):
        merged(pd.concat([cells, other], ignore_index=True))


def test_what_is_chosen_is_kept_and_full_stays(tmp_path: Path) -> None:
    folder = write_run(make_run(samples=6), tmp_path / "a")
    chosen = load([folder], {"policy": ["snapkv"], "budget": ["0.2"], "task": ["ruler"]}).cells
    assert set(chosen["policy"]) == {"full", "snapkv"}
    assert set(chosen["budget"]) == {"full", "0.2"}
    assert set(chosen["task"]) == {"vt", "cwe"}
    natural = make_run(tasks=["longbench_lcc"], lengths=(0,), samples=6)
    more = write_run(natural, tmp_path / "b")
    assert set(load([folder, more], {"length": ["1024"]}).cells["length"]) == {0, 1024}
    with pytest.raises(UserError, match=r"--budget 0\.3: not in the run; it has full, 0\.1, 0\.2"):
        load([folder], {"budget": ["0.2", "0.3"]})
    with pytest.raises(UserError, match="--task longbench: not in the run; it has vt, cwe"):
        load([folder], {"task": ["longbench"]})


def test_a_part_of_a_score_that_is_no_mean_is_unknown() -> None:
    cells, samples = make_run(["snapkv"], ["0.2"], ["vt"], samples=9)
    samples["extra"] = [json.dumps({"kind": "ab"[i % 2]}) for i in samples["doc_id"]]
    measures = measures_of(unaveraged((cells, samples), "vt"))
    assert measures.score(SNAP, VT) == 5
    assert math.isnan(measures.score(SNAP, ScoreSource("vt", "kind", "b")))
