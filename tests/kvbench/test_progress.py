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


def test_a_line_names_the_unit_the_phase_and_the_estimate_it_is_given() -> None:
    said: list[str] = []
    clock = Clock()
    lines = LineProgress(said.append, min_interval=10, clock=clock)
    lines.start(1000, "reference", "tokens")
    lines.phase("prefill")
    clock.now += 10
    lines.advance(100, 42.0)
    lines.phase("decode")
    clock.now += 10
    lines.advance(100)
    lines.advance(800)
    lines.stop()
    assert said == [
        "reference: 100/1000 tokens, prefill, 42 s left",
        "reference: 200/1000 tokens, decode, 1 min 20 s left",
        "reference: 1000/1000 tokens in 20 s",
    ]


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_bar_shows_phase_count_and_time_left_on_one_line(width: int) -> None:
    clock, console = Clock(), Console(file=io.StringIO(), force_terminal=True, width=width)
    bar = Bar(console, clock)
    bar.start(713000, "reference", "tokens")
    bar.phase("compress")
    clock.now += 5
    bar.advance(312400, 3700.0)
    shown = screen(console, bar)
    assert shown.startswith("reference: compress") and shown.endswith("312400/713000 tokens 0:05, 1:01:40 left")
    clock.now += 60  # nothing happens, and the time left goes on
    assert screen(console, bar).endswith(" 1:05, 1:00:40 left")
    clock.now += 1
    bar.advance(400600, 0.0)
    assert "713000/713000 tokens 1:06" in screen(console, bar)
    bar.stop()


def screen(console: Console, bar: Bar) -> str:
    """The line of a bar."""
    assert bar._bar is not None
    other = Console(file=io.StringIO(), width=console.width, color_system=None)
    with other.capture() as capture:
        other.print(bar._bar.get_renderable())
    (line,) = capture.get().splitlines()
    return line.strip()


def test_updates_of_a_bar_in_quick_succession_are_shown_together() -> None:
    clock, console = Clock(), Console(file=io.StringIO(), force_terminal=True, width=100)
    bar = Bar(console, clock)
    bar.start(100, "model", "tokens")
    for _ in range(9):
        clock.now += 0.0625
        bar.advance(2)
    assert bar._bar is not None and bar._bar.tasks[0].completed == 16
    bar.stop()
    assert bar._bar is None
