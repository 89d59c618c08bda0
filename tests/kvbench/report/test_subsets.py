"""Means of the subsets that a benchmark names, in the summary."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvbench.benchmark import Benchmark
from kvbench.harness import catalogue
from kvbench.report import group_means, render
from kvbench.report.frames import prepare
from kvbench.report.panel import panels
from kvbench.report.strata import subset_means

SUBSETS = {"first_two": ("vt", "cwe"), "needles": ("niah",), "not_run": ("fwe",)}
TITLE = "Means of subsets (number of tasks) with the paired difference from full.\n\n"


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Benchmark(
        name="ruler",
        leaves=("vt", "cwe", "niah", "fwe"),
        docs=lambda *a, **k: [],
        yaml=Path(),
        subsets=SUBSETS,
    )
    monkeypatch.setattr(catalogue, "benchmark", {"ruler": bench}.get)


@pytest.mark.usefixtures("named")
def test_each_subset_has_the_mean_of_its_tasks(run_frames: Any, tmp_path: Path) -> None:
    cells, samples = run_frames(["snapkv"], ("0.1", "0.2"), ["vt", "cwe", "niah"])
    results = prepare(cells, samples)
    (panel,) = panels(results)
    found = subset_means(panel, results.samples)
    assert list(found) == ["first_two", "needles"]
    for name, means in found.items():
        mine = cells[cells["task"].isin(SUBSETS[name])]
        want = mine.groupby(["policy", "budget"])["score"].mean()
        got = means.set_index(["policy", "budget"])["score"]
        assert got.to_dict() == pytest.approx(want.to_dict())
        assert means.equals(group_means(mine.assign(share=1.0), samples))

    text = render(cells, samples, tmp_path)[0].read_text()
    lines = text.split(TITLE)[1].split("\n\n")[0].splitlines()
    assert lines[0] == "| policy | budget | `first_two` (2) | `needles` (1) |"
    assert len(lines) == 2 + 3
    full = found["first_two"].set_index("policy").loc["full", "score"]
    assert lines[2].startswith(f"| `full` | `full` | {100 * full:.1f} | ")
    assert re.fullmatch(r"\| `snapkv` \| `0\.1` \| [\d.]+ −[\d.]+ \[.+\] \| [\d.]+ −[\d.]+ \[.+\] \|", lines[3])


@pytest.mark.usefixtures("named")
def test_one_subset_alone_needs_no_table(run_frames: Any, tmp_path: Path) -> None:
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt", "cwe"])
    assert TITLE not in render(cells, samples, tmp_path)[0].read_text()


def test_a_group_that_is_not_installed_has_none(run_frames: Any, tmp_path: Path) -> None:
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt", "cwe"], group="elsewhere")
    assert TITLE not in render(cells, samples, tmp_path)[0].read_text()
