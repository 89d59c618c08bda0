"""Screens at common widths: no word is broken, no name is squeezed away, and no line is too long."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench import cli, registry

WIDTHS = [80, 100, 120]
WIDE = 1000
POLICIES = ["snapkv", "criticalkv", "keydiff"]
RUN = ["run", "--policy", ",".join(POLICIES), "--task", "vt,cwe", "--length", "256", "--samples", "2"]
BENCH = ["bench", "--policy", ",".join(POLICIES), "--context", "32,64", "--generate", "2", "--repeats", "1"]

Screen = Callable[..., str]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Screen:
    """A function that runs a command at a width and returns its two streams, after checking its lines."""

    def run(width: int, *arguments: str) -> str:
        for variable in ("COLUMNS", "TERMINAL_WIDTH"):
            monkeypatch.setenv(variable, str(width))
        assert cli.call(arguments) == 0
        captured = capsys.readouterr()
        text = captured.out + captured.err
        assert max(map(len, text.splitlines())) <= width
        return text

    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("screens")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.call([*RUN, "--quiet"]) == 0
    return folder


def words(text: str) -> set[str]:
    """Words without digits, because times differ from run to run; `of` is in the titles of split tables."""
    return {word for word in text.split() if not any(map(str.isdigit, word))} - {"of"}


def lines_of_rules(text: str) -> list[str]:
    """The characters of a table's lines, which are as long as its columns are wide."""
    return [word for word in words(text) if set(word) <= set("┏━┳┓┃┡╇┩│└─┴┘├┼┤")]


def assert_whole_words(narrow: str, wide: str) -> None:
    assert words(narrow) - set(lines_of_rules(narrow)) <= words(wide)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_policy_has_one_line(screen: Screen, width: int) -> None:
    _, *lines, _ = screen(width, "list", "policies").splitlines()
    assert [line.split()[0] for line in lines] == registry.names(registry.POLICIES)
    _, *wide_lines, _ = screen(WIDE, "list", "policies").splitlines()
    for line, wide_line in zip(lines, wide_lines, strict=True):
        assert wide_line.startswith(line.rstrip().removesuffix("…"))
        assert "…" not in line or len(line) == width


@pytest.mark.parametrize("width", WIDTHS)
def test_one_policy_is_shown_in_full(screen: Screen, width: int) -> None:
    text = screen(width, "list", "policies", "critical_adakv")
    assert_whole_words(text, screen(WIDE, "list", "policies", "critical_adakv"))
    (record,) = json.loads(screen(WIDE, "list", "policies", "critical_adakv", "--json"))
    for value in (record["is"], record["summary"], record["paper"], *record["moments"]):
        assert set(value.split()) <= set(text.replace(";", "").replace(",", "").split()) | set(text.split())


def test_only_policies_and_runs_can_be_selected(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["list", "policies", "snapvk"]) == 2
    assert "did you mean snapkv" in capsys.readouterr().err
    assert cli.call(["list", "models", "smollm2"]) == 2
    assert "leave out 'smollm2'" in capsys.readouterr().err


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["tasks", "models", "layouts", "recipes"])
def test_lists_break_between_words(screen: Screen, kind: str, width: int) -> None:
    assert_whole_words(screen(width, "list", kind), screen(WIDE, "list", kind))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_is_listed_with_its_policies(
    screen: Screen, runs: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    text = screen(width, "list", "runs")
    assert text.splitlines()[0].strip() == f"results/{next(Path('results').iterdir()).name}"
    assert f"  policies: {', '.join(POLICIES)} " in text
    assert_whole_words(text, screen(WIDE, "list", "runs"))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_names_its_policies_and_its_notes_keep_their_words(
    screen: Screen, runs: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    text = screen(width, *RUN)
    assert all(f"│ {policy} " in text for policy in POLICIES)
    assert "wrote results/" in text and "responses.jsonl" in text
    assert_whole_words(text, screen(WIDE, *RUN))


def test_every_table_of_a_bench_names_its_policies(
    screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wide = screen(WIDE, *BENCH, "--out", "bench")
    for width in WIDTHS:
        text = screen(width, *BENCH, "--out", "bench")
        tables = text.count("┏")
        assert tables >= 2
        assert all(text.count(f"│ {policy} ") == tables for policy in POLICIES)
        assert_whole_words(text, wide)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_help_of_run_ends_with_examples(screen: Screen, width: int) -> None:
    _, examples = screen(width, "run", "--help").split("Examples:")
    commands = [line.strip() for line in examples.splitlines() if line.strip()]
    assert len(commands) == 3
    assert all(command.startswith("kvbench run --policy ") for command in commands)
