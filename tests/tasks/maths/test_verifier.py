from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.errors import UserError
from kvbench_tasks.maths import verifier as module
from kvbench_tasks.maths.verifier import Verifier


@pytest.fixture(scope="module")
def verify() -> Iterator[Verifier]:
    made = Verifier(seconds=3.0)
    assert made(r"\frac{1}{2}", "0.5")
    yield made
    made.close()


@pytest.mark.slow
def test_an_endless_expression_is_not_equal_and_does_not_hang(verify: Verifier) -> None:
    before = time.monotonic()
    assert not verify("5", "9^{9^{9^{9^9}}}")
    assert time.monotonic() - before < 3.0 + 2.0
    assert verify(r"\sqrt{4}", "2")


@pytest.mark.slow
def test_deeply_nested_nonsense_is_not_equal_and_does_not_crash(verify: Verifier) -> None:
    assert not verify("5", "(" * 400 + "1" + ")" * 399)
    assert verify("2^3", "8")


def test_a_dead_process_is_replaced(verify: Verifier) -> None:
    assert verify._process is not None
    verify._process.kill()
    verify._process.wait()
    assert verify("1+1", "2")


def test_threads_get_their_own_answers(verify: Verifier) -> None:
    """math-verify itself raises outside the main thread."""
    said: dict[int, bool] = {}

    def ask(i: int) -> None:
        said[i] = verify(f"{i}+1", f"{i + i % 2}")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == {i: i % 2 == 1 for i in range(8)}


def test_a_verifier_that_does_not_start_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "worker.py"
    broken.write_text("print('ModuleNotFoundError: No module named math_verify')")
    monkeypatch.setattr(module, "_WORKER", broken)
    with pytest.raises(UserError, match=r"does not start: ModuleNotFoundError.*pip install") as info:
        Verifier()("1", "2")
    assert "\n" not in str(info.value)


def test_the_process_ends_itself_where_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a `kill -9` of the run: the comparison goes on, but not for ever."""
    hasty = tmp_path / "worker.py"
    hasty.write_text(module._WORKER.read_text().replace("_SECONDS = 60", "_SECONDS = 1"))
    monkeypatch.setattr(module, "_WORKER", hasty)
    patient = Verifier(seconds=60.0)
    before = time.monotonic()
    assert not patient("5", "9^{9^{9^{9^9}}}")
    assert time.monotonic() - before < 30
    patient.close()


def test_nothing_is_left_behind(verify: Verifier) -> None:
    assert verify("3", "6/2")
    process = verify._process
    assert process is not None
    verify.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
