from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.runs.schema import Response
from kvbench.runs.store import RunStore


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
    path.write_bytes(path.read_bytes() + b'{"crc":"%08x","r":%s}\n' % (zlib.crc32(payload), payload))
    before = path.read_bytes()
    with pytest.raises(UserError, match="another version"):
        RunStore(run)
    assert path.read_bytes() == before


@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("content", ["mine\n", '{"id": 1}\n{"id": 2}\n', "no newline"])
def test_responses_that_are_no_runs_are_left_alone(tmp_path: Path, content: str, grid: bool) -> None:
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
