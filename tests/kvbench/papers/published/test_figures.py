from __future__ import annotations

from fractions import Fraction

import pytest
from setuptools import find_packages

from kvbench.errors import UserError
from kvbench.harness.catalogue import benchmarks
from kvbench.papers.published.results import FIELDS, PACKAGE, Figure, all_figures, paper, papers
from kvbench.spelling import policy

from ....test_packaging import ROOT

FIGURES = list(all_figures())


def value(paper: str, table: str, row: str, column: str, **more: str) -> str:
    (found,) = (
        f.value
        for f in FIGURES
        if (f.paper, f.table, f.row, f.column) == (paper, table, row, column)
        and all(getattr(f, name) == text for name, text in more.items())
    )
    return found


def test_the_data_package_is_found_where_the_wheel_looks_for_it() -> None:
    assert find_packages(str(ROOT / "results" / "published"), include=["kvbench*"]) == [PACKAGE]


def test_every_listed_table_has_figures() -> None:
    assert {name: list(map(int, one.tables)) for name, one in papers().items()} == {
        "criticalkv": [*range(1, 16)],
        "dbtrimkv": [*range(1, 9)],
        "trimkv": [*range(1, 10)],
        "d2o": [*range(1, 22)],
        "kvpress": [1],
    }
    assert all(t.figures for one in papers().values() for t in one.tables.values())


@pytest.mark.parametrize(
    ("place", "printed"),
    [
        (("criticalkv", "1", "HeadKV w/ ours", "VT", {"part": "Mistral-7B"}), "81.40"),
        (("criticalkv", "2", "Code", "w/ ours", {"part": "Qwen2.5-32B", "budget": "40%",
            "method": "HeadKV w/ ours"}), "46.54"),
        (("criticalkv", "13", "AdaKV w/ ours", "Ruler Avg.", {}), "44.13"),
        (("dbtrimkv", "2", "TrimKV", "MMStar", {"part": "64"}), "54.12"),
        (("dbtrimkv", "6", "DBTrimKV", "% vs Vanilla", {"part": "128"}), "104.10"),
        (("dbtrimkv", "7", "TRIM-KV", "Avg. Δ (%)", {}), "-9.24"),
        (("trimkv", "7", "TRIM-KV", "Temporal", {"part": "12288"}), "29.3"),
        (("trimkv", "8", "LocRet", "triviaqa", {}), "83.29"),
        (("d2o", "1", "D2O", "RB-P", {"part": "Falcon-7B"}), "7.32"),
        (("d2o", "18", "SirLLMs", "TREC", {}), "54.79"),
        (("kvpress", "1", "KeyDiff", "0.9", {}), "65"),
        (("d2o", "21", "H2O", "PRe", {"part": "Mistral-7B-Instruct (KV size = 64)"}), "66.03"),
    ],
)  # fmt: skip
def test_figures_are_those_of_the_papers(place: tuple[str, str, str, str, dict[str, str]], printed: str) -> None:
    *where, more = place
    assert value(*where, **more) == printed


def test_policies_and_tasks_are_ones_that_kvbench_has() -> None:
    for name in {f.policy for f in FIGURES} - {""}:
        assert str(policy(name)) == name
    groups, _ = benchmarks()
    known = {part for g in groups.values() for part in (*g.subsets, *g.leaves)} | {*groups}
    assert {f.task for f in FIGURES} - {""} <= known


def test_no_cell_is_there_twice() -> None:
    cells = [(f.paper, f.table, f.part, f.row, f.group, f.column, f.metric) for f in FIGURES]
    assert len(cells) == len({*cells}) > 3000


def test_budgets_are_parsed_as_they_are_printed() -> None:
    for f in FIGURES:
        if f.policy == "full":
            assert (f.budget, f.kept) == ("", "full")
        elif f.budget.endswith("visual tokens"):
            assert f.tokens == f.kept == f"visual:{f.budget.split()[0]}"
        elif f.budget.endswith("%"):
            assert Fraction(f.fraction) == Fraction(f.budget[:-1]) / 100
            assert (f.tokens, f.kept) == ("", f.fraction)
        else:
            assert (f.budget, "") == (f.tokens, f.fraction)
            assert f.kept == f.tokens


@pytest.mark.parametrize(("text", "half"), [("7", 0.5), ("7.0", 0.05), ("-0.30", 0.005)])
def test_rounding_is_half_of_the_last_printed_digit(text: str, half: float) -> None:
    figure = Figure(**dict.fromkeys(FIELDS, "") | {"value": text})
    assert figure.half_digit == pytest.approx(half)
    assert figure.number == float(text)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown paper 'dbtrim'; did you mean dbtrimkv"):
        paper("dbtrim")
    with pytest.raises(UserError, match="trimkv has no table '10' with figures; there are 1, 2"):
        paper("trimkv").table("10")
