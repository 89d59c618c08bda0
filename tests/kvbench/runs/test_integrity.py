"""Damaged tables are noticed, whatever bit flips, and never end in a traceback."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import kvbench
from kvbench.cli.app import call
from kvbench.errors import UserError
from kvbench.runs.folders import summarise
from kvbench.runs.schema import CELLS_SCHEMA, SAMPLES_SCHEMA
from kvbench.runs.store import RunStore
from tests.sweeps import slow_but

TABLES = ("cells.parquet", "samples.parquet")
FLIPS = 120


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three cells of 20 samples, whose means are those of their samples."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("integrity") / "run"
    cells, samples = [], []
    for name in ("full", "snapkv", "random"):
        rows = []
        for i in range(20):
            row: dict[str, Any] = {}
            for field in SAMPLES_SCHEMA:
                kind = str(field.type)
                row[field.name] = (
                    [f"t{i}"] if "list" in kind
                    else f"{name} {field.name} {i}" if kind == "string"
                    else float(rng.random()) if kind == "double"
                    else int(rng.integers(1000))
                )  # fmt: skip
            rows.append(row | {"cell": name, "error": "", "sample_id": f"s{i}"})
        frame = pd.DataFrame(rows)
        cell: dict[str, Any] = {}
        for field in CELLS_SCHEMA:
            kind = str(field.type)
            cell[field.name] = (
                True if kind == "bool"
                else f"{name} {field.name}" if kind == "string"
                else frame[field.name].mean()
                if field.name in frame and kind == "double"
                else 0.5 if kind == "double" else 3
            )  # fmt: skip
        cells.append(cell | {"cell": name, "status": "ok", "samples": 20, "task": "vt"})
        cells[-1] |= {"metric": "score", "data_hash": "d", "policy": name, "budget": "0.2"}
        samples.append(frame)
    with RunStore(path) as store:
        store.save_grid({"policies": ["snapkv"], "tasks": ["vt"]})
        store.write(pd.DataFrame(cells), pd.concat(samples))
    return path


def without_record(run: Path, folder: Path) -> Path:
    """A copy as earlier versions wrote it: no record, no checksums."""
    shutil.copytree(run, folder)
    for name in TABLES:
        pq.write_table(pq.read_table(run / name).replace_schema_metadata(), folder / name)
    return folder


def flipped(folder: Path, name: str) -> Iterator[int]:
    """Flip one random bit of a table at a time."""
    path = folder / name
    content = path.read_bytes()
    draw = random.Random(7)
    for _ in range(FLIPS):
        bit = draw.randrange(len(content) * 8)
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        yield bit
    path.write_bytes(content)


def loaded(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    try:
        return kvbench.load(folder)
    except UserError as error:
        if "\n" in str(error):
            raise
        return None


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(TABLES, TABLES[0]))
def test_no_flipped_bit_changes_data_unnoticed(run: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    right = kvbench.load(folder)
    noticed = 0
    for bit in flipped(folder, name):
        found = loaded(folder)
        noticed += found is None
        for frame, other in zip(found or right, right, strict=True):
            pd.testing.assert_frame_equal(frame, other, obj=f"bit {bit}")
        summarise(folder)  # `kvbench list runs`
    assert noticed == FLIPS if name == "samples.parquet" else noticed  # some bytes hold no data


@pytest.mark.parametrize("name", slow_but(TABLES, TABLES[0]))
def test_a_flipped_bit_in_an_older_table_is_never_a_traceback(run: Path, tmp_path: Path, name: str) -> None:
    folder = without_record(run, tmp_path / "run")
    assert loaded(folder) is not None
    for _ in flipped(folder, name):
        if (found := loaded(folder)) is not None:
            cells, samples = found
            means = samples.groupby("cell")["score"].mean()
            assert cells.set_index("cell")["score"].to_dict() == pytest.approx(means.to_dict())
        summarise(folder)


def test_what_is_damaged_is_one_line_for_every_command(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    path = folder / "samples.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)
    here = str(folder)
    for command in (["report", here], ["table", here], ["compare", here, here],
                    ["view", here, "--no-open"]):  # fmt: skip
        assert call(command) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"kvbench: {path} is not the table that cells.parquet was written")
        assert said.count("\n") == 1


@pytest.mark.parametrize("column", ["score", "held_entries", "kv_bytes_full"])
@pytest.mark.parametrize("record", [True, False])
def test_a_missing_number_is_one_line(run: Path, tmp_path: Path, column: str, record: bool) -> None:
    cells, samples = kvbench.load(run)
    cells.loc[1, column] = np.nan
    folder = tmp_path / "run"
    with RunStore(folder) as store:
        store.write(cells, samples)
    if not record:
        folder = without_record(folder, tmp_path / "old")
    with pytest.raises(UserError, match=f"{column} (is not a number|of vt, snapkv at 0.2)"):
        kvbench.load(folder)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_nothing_but_nan_is_one_line(run: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    frame = pd.read_parquet(run / name)
    frame[frame.select_dtypes("number").columns] = np.nan
    frame.to_parquet(folder / name)
    assert loaded(folder) is None


@pytest.mark.parametrize(("name", "column"), [(TABLES[0], "samples"), (TABLES[1], "score")])
def test_older_tables_that_do_not_agree_are_told(run: Path, tmp_path: Path, name: str, column: str) -> None:
    folder = without_record(run, tmp_path / "run")
    frame = pd.read_parquet(folder / name)
    frame.loc[frame["cell"] == "snapkv", column] *= 2
    frame.to_parquet(folder / name)
    with pytest.raises(UserError, match=f"do not agree on {column} of vt, snapkv at 0.2"):
        kvbench.load(folder)


def test_tables_of_two_runs_are_not_one_run(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    cells, samples = kvbench.load(run)
    with RunStore(folder) as store:
        store.write(cells, samples.assign(response="another"))
    shutil.copy(run / "cells.parquet", folder / "cells.parquet")
    with pytest.raises(UserError, match="is not the table that"):
        kvbench.load(folder)


def test_a_score_that_is_no_mean_need_not_be_that_of_its_samples(run: Path, tmp_path: Path) -> None:
    cells, samples = kvbench.load(run)
    for is_mean in (False, True):
        with RunStore(tmp_path / f"run{is_mean}") as store:
            store.write(cells.assign(score=7.0, score_lo=-np.inf, is_mean=is_mean), samples)
        folder = without_record(tmp_path / f"run{is_mean}", tmp_path / f"old{is_mean}")
        if is_mean:
            with pytest.raises(UserError, match="do not agree on score"):
                kvbench.load(folder)
        else:
            assert (kvbench.load(folder)[0]["score"] == 7).all()
