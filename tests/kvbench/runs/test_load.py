"""The tables of runs, written and read."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kvbench
from kvbench.errors import UserError
from kvbench.runs.load import load_frames, responses_of
from kvbench.runs.schema import (
    CELLS_SCHEMA,
    METRICS_SCHEMA,
    SAMPLES_SCHEMA,
    SCHEMA_VERSION,
    ScoredCell,
    missing_columns,
)
from kvbench.runs.store import RunStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def make_frames(cell: str = "c", samples: int = 2) -> tuple[pd.DataFrame, pd.DataFrame]:
    kinds: dict[str, Any] = {"string": "t", "int32": 1, "int64": 2, "double": 0.5, "bool": True}
    row = {f.name: kinds[str(f.type)] for f in CELLS_SCHEMA}
    cells = pd.DataFrame([{**row, "cell": cell, "samples": samples, "diff": np.nan}])
    kinds["list<element: string>"] = kinds["list<item: string>"] = ["a", "b"]
    row = {f.name: kinds[str(f.type)] for f in SAMPLES_SCHEMA}
    rows = [{**row, "cell": cell, "sample_id": f"s{n}", "error": ""} for n in range(samples)]
    return cells, pd.DataFrame(rows)


def test_the_tables_have_the_types_of_the_design(run: Path) -> None:
    with RunStore(run) as store:
        store.write(*make_frames())
    assert pq.read_schema(run / "cells.parquet").equals(CELLS_SCHEMA)
    assert pq.read_schema(run / "samples.parquet").equals(SAMPLES_SCHEMA)
    cells, samples = load_frames(run)
    assert list(cells.columns) == CELLS_SCHEMA.names
    assert str(cells["samples"].dtype) == "int32"
    assert np.isnan(cells["diff"][0])
    assert list(samples["target"][0]) == ["a", "b"]


def test_empty_tables_keep_their_types(run: Path) -> None:
    cells, samples = make_frames()
    with RunStore(run) as store:
        store.write(cells[:0], samples[:0])
    assert pq.read_schema(run / "cells.parquet").equals(CELLS_SCHEMA)
    assert [len(frame) for frame in load_frames(run)] == [0, 0]


def test_a_wrong_column_is_refused_and_the_old_table_stays(run: Path) -> None:
    cells, samples = make_frames()
    with RunStore(run) as store:
        store.write(cells, samples)
        with pytest.raises(ValueError, match="colour, score"):
            store.write(cells.rename(columns={"score": "colour"}), samples)
    assert load_frames(run)[0]["score"].tolist() == [0.5]
    assert not list(run.glob(".*.part"))


def test_runs_are_joined_and_a_shared_cell_comes_from_the_longer_one(tmp_path: Path) -> None:
    for name, cell, count in (("a", "c", 2), ("b", "c", 5), ("d", "other", 1)):
        with RunStore(tmp_path / name) as store:
            store.write(*make_frames(cell, count))
    cells, samples = load_frames([tmp_path / name for name in "abd"])
    assert cells["cell"].tolist() == ["c", "other"]
    assert cells["samples"].tolist() == [5, 1]
    assert samples["cell"].tolist() == ["c"] * 5 + ["other"]


def test_runs_that_differ_in_the_score_of_a_shared_cell_are_named(tmp_path: Path) -> None:
    scores = {"first": 0.75, "second": 0.25, "rounded": 0.75 + 1e-12, "longer": 0.25}
    for name, score in scores.items():
        cells, samples = make_frames(samples=3 if name == "longer" else 2)
        with RunStore(tmp_path / name) as store:
            store.write(cells.assign(score=score, status="ok", task="vt", policy="snapkv", budget="0.2"), samples)
    first, second, rounded, longer = (tmp_path / name for name in scores)
    with pytest.warns(UserWarning, match="for the same cells \\(1\\)") as warned:
        cells, _ = load_frames([first, second])
    assert list(cells["score"]) == [0.75]
    message = str(warned[0].message)
    assert f"such as vt, snapkv at 0.2: 0.75 in {first} and 0.25 in {second};" in message
    with pytest.warns(UserWarning, match="the same cells"):
        cells, _ = load_frames([second, first])
    assert list(cells["score"]) == [0.25]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_frames([first, rounded])
        load_frames([first, longer])


def test_a_shared_cell_comes_from_the_run_with_more_repeats(tmp_path: Path) -> None:
    for name, repeats in (("a", 1), ("b", 3), ("d", 3)):
        cells, samples = make_frames()
        more = [samples.assign(repeat=k, response=name) for k in range(repeats)]
        with RunStore(tmp_path / name) as store:
            store.write(cells, pd.concat(more))
    cells, samples = load_frames([tmp_path / name for name in "abd"])
    assert len(cells) == 1
    assert samples["response"].tolist() == ["b"] * 6


def test_cells_and_samples_can_be_chosen(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder, policies in zip(folders, (("full", "snapkv"), ("snapkv", "random")), strict=True):
        frames = [make_frames(policy, 4) for policy in policies]
        cells = pd.concat([c.assign(policy=c["cell"]) for c, _ in frames])
        with RunStore(folder) as store:
            store.write(cells, pd.concat([s for _, s in frames]))
    cells, samples = kvbench.load(folders, ["cell", "sample_id"], where={"policy": "snapkv"})
    assert cells["cell"].tolist() == ["snapkv"]
    assert samples.to_numpy().tolist() == [["snapkv", f"s{n}"] for n in range(4)]
    cells, samples = kvbench.load(folders, where={"policy": ["full", "random"], "task": "t"})
    assert cells["cell"].tolist() == ["full", "random"]
    assert samples["cell"].tolist() == ["full"] * 4 + ["random"] * 4
    assert [len(frame) for frame in kvbench.load(folders, where={"task": "other"})] == [0, 0]
    with pytest.raises(UserError, match=r"cells have no column 'polcy'.*policy"):
        kvbench.load(folders, where={"polcy": "snapkv"})
    for coded in (True, False):
        found = load_frames(folders[0], coded=coded, where={"policy": "random"})
        assert [len(frame) for frame in found] == [0, 0]
        _, samples = load_frames(folders, coded=coded, where={"policy": "random"})
        assert samples["cell"].tolist() == ["random"] * 4
    cells, samples = load_frames(folders, sample_ids=["s3", "s1", "s9"])
    assert len(cells) == 3
    assert samples["sample_id"].tolist() == ["s1", "s3"] * 3
    assert responses_of(folders)(["s1", "s3"]).equals(samples)


def test_what_holds_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cells\.parquet is missing"):
        load_frames(tmp_path)
    with pytest.raises(UserError, match="name at least one run"):
        load_frames([])
    for name in ("cells.parquet", "samples.parquet"):
        (tmp_path / name).write_bytes(b"not parquet")
    with pytest.raises(UserError, match="cannot read"):
        load_frames(tmp_path)


def test_tables_without_the_columns_of_images_can_still_be_read(run: Path, tmp_path: Path) -> None:
    with RunStore(run) as store:
        store.write(*make_frames())
    new = tmp_path / "new"
    shutil.copytree(run, new)
    for name in ("cells.parquet", "samples.parquet"):
        table = pq.read_table(run / name).replace_schema_metadata()
        assert (table.select(["visual_tokens", "held_visual"]).to_pandas() != 0).all(axis=None)
        later = {column.name for column in missing_columns(2)}
        old = table.drop_columns(sorted(later.intersection(table.column_names)))
        version = pa.array([2] * len(old), pa.int32())
        old = old.set_column(old.column_names.index("schema"), "schema", version)
        pq.write_table(old, run / name)
    cells, samples = load_frames(run)
    for frame, schema in ((cells, CELLS_SCHEMA), (samples, SAMPLES_SCHEMA)):
        assert list(frame.columns) == schema.names
        assert (frame[["visual_tokens", "held_visual"]] == 0).all(axis=None)
        assert (frame["kv_bytes_read"] == frame["kv_bytes_live"]).all()
        assert (frame["schema"] == SCHEMA_VERSION).all() and frame["schema"].dtype == "int32"
    assert (samples["prompt_end"] == "").all() and (samples["metrics"] == "").all() and cells["is_mean"].all()
    for folders in (run, [run, new]):
        _, coded = load_frames(folders, coded=True)
        assert coded["prompt_end"].dtype == "category"
        assert coded.groupby("cell", observed=True).size().to_dict() == (samples.groupby("cell").size().to_dict())


def test_another_schema_is_refused(run: Path) -> None:
    cells, samples = make_frames()
    with RunStore(run) as store:
        store.write(cells, samples)
    pq.read_table(run / "cells.parquet").to_pandas().assign(schema=99).to_parquet(run / "cells.parquet")
    with pytest.raises(UserError, match=f"not written with schema {SCHEMA_VERSION}"):
        load_frames(run)


def write_metrics(folder: Path, task: str = "t", *metrics: str, judge: str = "") -> None:
    """Write a run of one task with a full cache and a failed cell; metric i gives sample j the score i + j / 10."""
    cells, samples = make_frames(f"{task}-full", 3)
    labels = [name.partition(",") for name in metrics]
    facts = {"task": task, "metric": labels[0][0] + judge, "higher_is_better": True, "status": "ok", "error": ""}
    whole = cells.iloc[0].to_dict() | facts | {"score": 0.1}
    scores = [{name: i + j / 10 for i, name in enumerate(metrics)} for j in range(3)]
    rows = [
        whole
        | {"metric": name + judge, "filter": kind, "score": i + 0.1, "diff": -float(i), "higher_is_better": i != 1}
        for i, (name, _, kind) in enumerate(labels)
    ]
    failed = whole | {"cell": f"{task}-failed", "status": "error", "error": "no luck", "score": np.nan}
    columns = samples.assign(
        schema=SCHEMA_VERSION,
        task=task,
        score=[0.0, 0.1, 0.2],
        metrics=[json.dumps(score) if len(metrics) > 1 else "" for score in scores],
    ).to_dict("list")
    none = {name: [] for name in columns}
    metric_rows = [{name: row[name] for name in METRICS_SCHEMA.names} for row in (*rows, failed | {"filter": ""})]
    with RunStore(folder) as store:
        store.write_scored(
            [ScoredCell(whole, metric_rows[:-1], columns), ScoredCell(failed, metric_rows[-1:], none)], {}
        )


def test_another_metric_replaces_the_scores_of_cells_and_samples(run: Path) -> None:
    write_metrics(run, "t", "acc", "loss", "exact,strict", "exact,loose")
    cells, samples = kvbench.load(run, metric="loss")
    assert cells["metric"].tolist() == ["loss", "loss"] and not cells["higher_is_better"].any()
    assert cells["score"][0] == 1.1 and cells["diff"][0] == -1 and np.isnan(cells["score"][1])
    assert cells["status"].tolist() == ["ok", "error"] and cells["error"].tolist() == ["", "no luck"]
    assert samples["score"].tolist() == [1.0, 1.1, 1.2]
    for coded in (True, False):
        cells, samples = load_frames(run, ["score"], coded=coded, metric="exact,loose")
        assert cells["metric"][0] == "exact,loose" and samples["score"].tolist() == [3.0, 3.1, 3.2]
        assert list(samples.columns) == ["score"]
    assert kvbench.load(run, metric="exact")[0]["metric"][0] == "exact,strict", "the first filter counts"
    assert responses_of(run, "loss")(["s1"])["score"].tolist() == [1.1]
    with pytest.raises(UserError, match=r"no task has the metric 'f1'; there are acc, loss, exact,strict, exact"):
        kvbench.load(run, metric="f1")


def test_tasks_without_the_metric_keep_their_own_with_a_warning(tmp_path: Path) -> None:
    write_metrics(tmp_path / "a", "a", "acc", "loss")
    write_metrics(tmp_path / "b", "b", "f1")
    with pytest.warns(UserWarning, match=r"because they lack loss: b$"):
        cells, samples = kvbench.load([tmp_path / "a", tmp_path / "b"], metric="loss")
    assert cells["metric"].tolist() == ["loss", "loss", "f1", "f1"]
    assert samples["score"].tolist() == [1.0, 1.1, 1.2, 0.0, 0.1, 0.2]


def test_a_judged_metric_is_named_without_its_judge(run: Path) -> None:
    write_metrics(run, "t", "overall", "richness", judge=" (local judge)")
    for name in ("richness", "richness (local judge)"):
        cells, samples = kvbench.load(run, metric=name)
        assert cells["metric"][0] == "richness (local judge)" and samples["score"].tolist() == [1.0, 1.1, 1.2]
    with pytest.raises(UserError, match=r"there are overall, richness$"):
        kvbench.load(run, metric="style")


def test_runs_of_earlier_versions_have_no_other_metrics(run: Path) -> None:
    write_metrics(run, "t", "acc", "loss")
    stored = pq.read_table(run / "cells.parquet")
    record = json.loads(stored.schema.metadata[b"kvbench"])
    del record["metrics_sha256"]
    pq.write_table(stored.replace_schema_metadata({b"kvbench": json.dumps(record)}), run / "cells.parquet")
    (run / "metrics.parquet").unlink()
    assert len(kvbench.load(run)[0]) == 2
    with pytest.raises(UserError, match="run the same command again"):
        kvbench.load(run, metric="loss")


def test_a_changed_table_of_metrics_is_refused(run: Path) -> None:
    write_metrics(run, "t", "acc", "loss")
    path = run / "metrics.parquet"
    pq.write_table(pq.read_table(path).slice(1), path)
    with pytest.raises(UserError, match=r"metrics\.parquet is not the table that cells\.parquet was written with"):
        kvbench.load(run)
    path.unlink()
    assert len(kvbench.load(run)[0]) == 2, "a run can be kept without it"
    with pytest.raises(UserError, match="run the same command again"):
        kvbench.load(run, metric="loss")
