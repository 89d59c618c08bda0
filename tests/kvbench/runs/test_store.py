from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvbench
from kvbench.errors import UserError
from kvbench.runs.load import load_frames, responses_of
from kvbench.runs.schema import CELLS_SCHEMA, SAMPLES_SCHEMA
from kvbench.runs.store import Response, RunStore


def make_response(number: int = 0, **changes: Any) -> Response:
    usual = Response(
        cell="c" * 16,
        sample_id=f"s{number}",
        question_id=0,
        repeat=0,
        doc_id=number,
        context_id=f"x{number}",
        response=f'answer {number} é\n\u2028 \\ "quoted" \x00',
        stop="eos",
        error="",
        context_tokens=1000,
        question_tokens=20,
        generated_tokens=4,
        budget_entries=800,
        held_entries=800,
        kv_bytes_live=1,
        kv_bytes_allocated=2,
        kv_bytes_full=3,
        prefill_s=0.5,
        compress_s=0.25,
        decode_s=1e-9,
    )
    return dataclasses.replace(usual, **changes)


def filled(path: Path, count: int = 3) -> list[Response]:
    responses = [make_response(number) for number in range(count)]
    with RunStore(path) as store:
        store.save_grid({"policies": ["a"]})
        store.append(responses)
    return responses


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


# --- responses ------------------------------------------------------------------------------------


def test_what_was_appended_is_there_when_opened_again(run: Path) -> None:
    responses = filled(run)
    with RunStore(run) as store:
        assert store.responses() == responses
        assert store.keys() == {("c" * 16, f"s{n}", 0, 0) for n in range(3)}
        store.append([make_response(3)])
        store.append([])
        assert len(store.responses()) == 4
    assert len((run / "responses.jsonl").read_bytes().splitlines()) == 4


@given(st.text(st.characters(codec="utf-8")), st.floats(allow_nan=False), st.integers())
def test_any_text_and_number_reads_back(text: str, seconds: float, count: int) -> None:
    response = make_response(response=text, prefill_s=seconds, doc_id=count)
    with tempfile.TemporaryDirectory() as folder:
        with RunStore(folder) as store:
            store.save_grid({})
            store.append([response])
        with RunStore(folder) as store:
            assert store.responses() == [response]


def test_a_torn_tail_is_cut_wherever_the_write_stopped(run: Path) -> None:
    responses = filled(run)
    path = run / "responses.jsonl"
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        with RunStore(run) as store:
            assert store.responses() == responses[:2]
            store.append([responses[2]])
        assert path.read_bytes() == whole


def test_a_flipped_bit_in_a_line_drops_that_line(run: Path) -> None:
    responses = filled(run)
    path = run / "responses.jsonl"
    whole = path.read_bytes()
    first, second = whole.index(b"\n") + 1, whole[:-1].rindex(b"\n")
    for place in range(first, second, 3):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match=r"damaged line\(s\) were moved"):
            store = RunStore(run)
        with store:
            assert store.responses() == [responses[0], responses[2]]
            store.append([responses[1]])
        with warnings.catch_warnings(), RunStore(run) as store:
            warnings.simplefilter("error")  # mended: nothing is said again
            assert store.keys() == {response.key for response in responses}


def test_a_flipped_newline_drops_both_its_lines(run: Path) -> None:
    responses = filled(run)
    path = run / "responses.jsonl"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\x0b", 1))
    with pytest.warns(UserWarning, match=r"1 damaged"), RunStore(run) as store:
        assert store.responses() == responses[2:]


def test_lines_of_another_version_are_left_alone(run: Path) -> None:
    filled(run, 1)
    path = run / "responses.jsonl"
    payload = b'{"cell":"old"}'
    path.write_bytes(
        path.read_bytes() + b'{"crc":"%08x","r":%s}\n' % (zlib.crc32(payload), payload)
    )
    before = path.read_bytes()
    with pytest.raises(UserError, match="another version"):
        RunStore(run)
    assert path.read_bytes() == before


@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("content", ["mine\n", '{"id": 1}\n{"id": 2}\n', "no newline"])
def test_responses_that_are_no_runs_are_left_alone(
    tmp_path: Path, content: str, grid: bool
) -> None:
    (tmp_path / "responses.jsonl").write_text(content)
    if grid:
        (tmp_path / "grid.yaml").write_text("mine: too\n")
    with pytest.raises(UserError, match="written"):
        RunStore(tmp_path)
    assert (tmp_path / "responses.jsonl").read_text() == content


def test_a_damaged_line_is_kept_aside(run: Path) -> None:
    filled(run)
    path = run / "responses.jsonl"
    path.write_bytes(path.read_bytes().replace(b"s1", b"sX", 1))
    with pytest.warns(UserWarning, match="moved"), RunStore(run):
        pass
    assert b"sX" in (run / "responses.jsonl.damaged").read_bytes()


def test_fresh_throws_away_nothing_but_a_run(tmp_path: Path) -> None:
    (tmp_path / "cells.parquet").write_text("mine")
    with pytest.raises(UserError, match="not written by kvbench"):
        RunStore(tmp_path, fresh=True)
    assert (tmp_path / "cells.parquet").read_text() == "mine"


def test_an_error_is_tried_again_and_then_replaced(run: Path) -> None:
    with RunStore(run) as store:
        store.save_grid({})
        store.append([make_response(0, error="out of memory"), make_response(1)])
        done = store.keys()
        assert {sample for _, sample, _, _ in done} == {"s1"}
    with RunStore(run) as store:
        assert len(store.responses()) == 2
        store.append([make_response(0)])
        done = store.keys()
        assert {sample for _, sample, _, _ in done} == {"s0", "s1"}
        assert len(store.responses()) == 2
    with RunStore(run) as store:
        assert [response.error for response in store.responses()] == ["", ""]


def test_a_full_disk_leaves_no_half_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    responses = filled(run)
    real = os.write
    with RunStore(run) as store:

        def full(descriptor: int, block: Any) -> int:
            if len(block) < 300:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, block[:250])

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(UserError, match="No space left"):
            store.append([make_response(3), make_response(4)])
        monkeypatch.undo()
        assert store.responses() == responses
        store.append([make_response(3)])
    with RunStore(run) as store:
        assert store.responses() == [*responses, make_response(3)]


def test_a_killed_writer_loses_nothing_that_was_appended(run: Path) -> None:
    program = f"""
        import dataclasses, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_store import RunStore, make_response
        with RunStore({str(run)!r}) as store:
            store.save_grid({{}})
            number = len(store.keys())
            while True:
                store.append([make_response(number)])
                number += 1
                print(number, flush=True)
    """
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            for _ in range(5):
                said = int(child.stdout.readline())
            child.send_signal(signal.SIGKILL)
        with RunStore(run) as store:
            done = store.responses()
            assert len(done) >= said
            assert done == [make_response(number) for number in range(len(done))]


# --- the folder -----------------------------------------------------------------------------------


def _open(path: Path, answers: Any) -> None:
    try:
        with RunStore(path):
            answers.put("open")
    except UserError as error:
        answers.put(str(error))


def test_a_second_process_is_refused_until_the_first_is_done(run: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def answer() -> str:
        child = context.Process(target=_open, args=(run, answers))
        child.start()
        said: str = answers.get(timeout=30)
        child.join()
        return said

    with RunStore(run):
        assert f"in use by another run (process {os.getpid()})" in answer()
    assert answer() == "open"


def test_fresh_throws_away_the_run_and_nothing_else(run: Path) -> None:
    filled(run)
    (run / "mine.txt").write_text("keep")
    with RunStore(run) as store:
        store.save_grid({"policies": ["a"]})
    with RunStore(run, fresh=True) as store:
        assert not store.keys()
    assert (run / "mine.txt").exists()
    assert not (run / "grid.yaml").exists()


def test_fresh_does_not_touch_a_folder_in_use(run: Path) -> None:
    responses = filled(run)
    with RunStore(run) as store:
        with pytest.raises(UserError, match="in use"):
            RunStore(run, fresh=True)
        assert store.responses() == responses
    with RunStore(run) as store:
        assert store.responses() == responses


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        RunStore(tmp_path / "file")


def test_the_grid_is_saved_as_a_config(run: Path) -> None:
    from kvbench.runs.grid import Grid

    grid = Grid.from_dict({"policies": "snapkv:window=64", "tasks": "vt", "budgets": "0.2,full"})
    with RunStore(run) as store:
        store.save_grid(grid.to_dict())
    assert Grid.from_yaml(run / "grid.yaml") == grid


# --- tables ---------------------------------------------------------------------------------------


def make_frames(cell: str = "c", samples: int = 2) -> tuple[pd.DataFrame, pd.DataFrame]:
    kinds: dict[str, Any] = {"string": "t", "int32": 1, "int64": 2, "double": 0.5, "bool": True}
    row = {f.name: kinds[str(f.type)] for f in CELLS_SCHEMA}
    cells = pd.DataFrame([{**row, "cell": cell, "samples": samples, "diff": np.nan}])
    kinds["list<element: string>"] = kinds["list<item: string>"] = ["a", "b"]
    row = {f.name: kinds[str(f.type)] for f in SAMPLES_SCHEMA}
    rows = [{**row, "cell": cell, "sample_id": f"s{n}"} for n in range(samples)]
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
    (tmp_path / "cells.parquet").write_bytes(b"not parquet")
    with pytest.raises(UserError, match="cannot read"):
        load_frames(tmp_path)


def test_tables_without_the_columns_of_images_can_still_be_read(run: Path, tmp_path: Path) -> None:
    with RunStore(run) as store:
        store.write(*make_frames())
    new = tmp_path / "new"
    shutil.copytree(run, new)
    for name in ("cells.parquet", "samples.parquet"):
        table = pq.read_table(run / name)
        assert (table.select(["visual_tokens", "held_visual"]).to_pandas() != 0).all(axis=None)
        later = {"visual_tokens", "held_visual", "prompt_end", "kv_bytes_read"}
        old = table.drop_columns(sorted(later.intersection(table.column_names)))
        version = pa.array([2] * len(old), pa.int32())
        old = old.set_column(old.column_names.index("schema"), "schema", version)
        pq.write_table(old, run / name)
    cells, samples = load_frames(run)
    for frame, schema in ((cells, CELLS_SCHEMA), (samples, SAMPLES_SCHEMA)):
        assert list(frame.columns) == schema.names
        assert (frame[["visual_tokens", "held_visual"]] == 0).all(axis=None)
        assert (frame["kv_bytes_read"] == frame["kv_bytes_live"]).all()
        assert (frame["schema"] == 4).all() and frame["schema"].dtype == "int32"
    assert (samples["prompt_end"] == "").all()
    for folders in (run, [run, new]):
        _, coded = load_frames(folders, coded=True)
        assert coded["prompt_end"].dtype == "category"
        assert coded.groupby("cell", observed=True).size().to_dict() == (
            samples.groupby("cell").size().to_dict()
        )


def test_another_schema_is_refused(run: Path) -> None:
    cells, samples = make_frames()
    with RunStore(run) as store:
        store.write(cells, samples)
    pq.read_table(run / "cells.parquet").to_pandas().assign(schema=99).to_parquet(
        run / "cells.parquet"
    )
    with pytest.raises(UserError, match="not written with schema 4"):
        load_frames(run)
