from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvbench.progress import Bar, Late, LineProgress, Reporter, Silent, duration, reporter


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lines_come_now_and_then_with_the_time_left() -> None:
    said: list[str] = []
    clock = Clock()
    lines = LineProgress(said.append, min_interval=10, clock=clock)
    lines.start(100, "vt")
    for _ in range(30):
        clock.now += 1
        lines.advance()
    assert said == [f"vt: {n}/100, {duration(100 - n)} left" for n in (10, 20, 30)]
    lines.message("a line")
    lines.advance(70)
    lines.stop()
    lines.stop()
    assert said[3:] == ["a line", "vt: 100/100 in 30 s"]


def test_a_new_stretch_of_work_ends_the_one_before() -> None:
    said: list[str] = []
    lines = LineProgress(said.append, clock=Clock())
    lines.start(5, "one")
    lines.advance(5)
    lines.start(5, "two")
    assert said == ["one: 5/5 in 0 s"]
    lines.stop()
    assert len(said) == 1  # nothing of the second was done


@pytest.mark.parametrize("terminal", [True, False])
def test_the_console_decides_between_bar_and_lines(terminal: bool) -> None:
    text = io.StringIO()
    found = reporter(Console(file=text, force_terminal=terminal, width=100))
    assert isinstance(found, Bar if terminal else LineProgress)
    found.stop()
    found.start(4, "vt [1/2]")
    found.advance(4)
    found.message("kept [bold] as it is")
    found.stop()
    found.stop()
    assert "kept [bold] as it is" in text.getvalue()
    assert "4/4" in text.getvalue()


def test_the_silent_one_is_a_reporter() -> None:
    found: Reporter = Silent()
    found.start(1, "x")
    found.advance()
    found.message("x")
    found.stop()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_stretch_is_told_of_once_it_has_taken_seconds() -> None:
    said: list[str] = []
    clock = Clock()
    lines = LineProgress(said.append, min_interval=2, clock=clock)
    quick = Late(lines, 100, "quick", clock)
    for _ in range(100):
        quick.advance()
    quick.stop()
    assert said == []
    slow = Late(lines, 9, "slow", clock)
    for _ in range(9):
        clock.now += 1
        slow.advance()
    slow.stop()
    assert said[0].startswith("slow: 5/9") and said[-1].startswith("slow: 9/9")
    nobody = Late(None, 1, "nobody", clock)
    clock.now += 9
    nobody.advance()
    nobody.stop()
