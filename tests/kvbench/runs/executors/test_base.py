"""While prompts are answered, Python looks for garbage among new objects only."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.runs.executors import base


class Knot:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()  # what the session has frozen
    yield
    assert not gc.get_freeze_count()
    gc.freeze()


def answer_with(monkeypatch: pytest.MonkeyPatch, do: Any) -> None:
    monkeypatch.setattr(base, "_answer", lambda *_: do())
    base.answer(SimpleNamespace(), [], [])  # type: ignore[arg-type]


def test_new_garbage_is_freed_and_older_garbage_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: dict[str, bool] = {}
    gc.disable()
    try:
        older = Knot()
        older_alive = weakref.ref(older)
        del older

        def do() -> None:
            new_alive = weakref.ref(Knot())
            gc.collect()
            alive.update(older=older_alive() is not None, new=new_alive() is not None)

        answer_with(monkeypatch, do)
    finally:
        gc.enable()
    gc.collect()
    assert alive == {"older": True, "new": False}
    assert older_alive() is None


def test_garbage_of_small_tasks_does_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []
    gc.disable()
    try:
        for _ in range(3):
            answer_with(monkeypatch, lambda: left.append(weakref.ref(Knot())))
            assert left[-1]() is None
    finally:
        gc.enable()


def test_a_failed_attempt_leaves_garbage_that_the_next_one_frees(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []

    def answer(*_: Any) -> None:
        if not left:
            cache = Knot()  # which the traceback holds until the next attempt
            left.append(weakref.ref(cache))
            raise torch.OutOfMemoryError("out of memory")
        gc.collect()
        assert left[0]() is None

    monkeypatch.setattr(base, "_answer", answer)
    batching = SimpleNamespace(halve=lambda: True, rows=1)
    worker: Any = SimpleNamespace(batching=batching, reporter=SimpleNamespace(message=lambda text: None))
    gc.disable()
    try:
        base.answer(worker, [], [])
    finally:
        gc.enable()


def test_objects_are_given_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def do() -> None:
        assert gc.get_freeze_count()
        raise ValueError("of a policy")

    with pytest.raises(ValueError, match="of a policy"):
        answer_with(monkeypatch, do)


def test_objects_that_a_caller_has_frozen_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()
    try:
        answer_with(monkeypatch, lambda: None)
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_the_command_line_collects_again_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbench.cli.app import _collect_after_startup

    usual = gc.get_threshold()
    _collect_after_startup()
    try:
        assert gc.get_threshold() != usual
        answer_with(monkeypatch, lambda: None)
        assert gc.get_threshold() == usual
    finally:
        gc.set_threshold(*usual)
