from __future__ import annotations

import pytest

from kvbench.errors import UserError
from kvbench.papers.published.browse import Filter, as_printed, contents, overview
from kvbench.papers.published.results import paper
from kvbench.tables.outputs import markdown

FIGURES = [f for t in paper("criticalkv").tables.values() for f in t.figures]


def test_a_policy_is_known_by_our_name_and_by_the_papers() -> None:
    ours = Filter(policies=["critical_snapkv"]).apply(FIGURES)
    assert ours == Filter(policies=["snapkv W/ ours"]).apply(FIGURES)
    assert {f.method for f in ours} == {"SnapKV w/ ours"}


def test_a_policy_stands_for_its_settings_and_a_group_for_its_tasks() -> None:
    settings = {f.policy for f in Filter(policies=["criticalkv"]).apply(FIGURES)}
    assert {"criticalkv", "criticalkv:first_stage=0.3"} <= settings
    kept = Filter(tasks=["ruler"], members={"ruler": ("vt", "qa_1")}).apply(FIGURES)
    assert {f.task for f in kept} == {"ruler", "vt", "qa_1"}


def test_filters_join() -> None:
    kept = Filter(["snapkv", "adakv"], ["vt"], ["llama", "qwen"]).apply(FIGURES)
    assert {(f.policy, f.task) for f in kept} == {("snapkv", "vt"), ("adakv", "vt")}
    assert {f.model for f in kept} == {"Llama-3.1-8B-Instruct", "Qwen2.5-32B"}
    assert len(kept) == 4


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Filter(policies=["snapkv", "adkv"]), "unknown policy 'adkv'; did you mean adakv"),
        (
            Filter(tasks=["niah_multikey1"]),
            "unknown task 'niah_multikey1'; did you mean niah_multi",
        ),
        (Filter(models=["llamma-3.1-8b"]), "unknown model 'llamma-3.1-8b'; did you mean Llama-3.1"),
    ],
)
def test_a_name_that_fits_nothing_is_an_error(wanted: Filter, message: str) -> None:
    with pytest.raises(UserError, match=message):
        wanted.apply(FIGURES)


def test_a_table_has_the_rows_and_columns_of_the_paper() -> None:
    critical = paper("criticalkv")
    text = markdown(as_printed(critical, critical.table("5"), critical.table("5").figures))
    lines = text.splitlines()
    assert lines[0].startswith("criticalkv, Table 5 (B.5)")
    assert "| Full Cache | 80% Cache Budget: AdaKV | 80% Cache Budget: &#43; Ours |" in lines[2]
    assert lines[4] == ("| Retr.KV (5 turns) | 52.20 | 52.00 | 52.60 | 41.20 | 42.00 | 19.40 | 19.80 |")
    assert lines[-1] == "contexts cut to 100K tokens"


def test_a_cell_of_two_numbers_and_an_empty_one_are_shown() -> None:
    critical, d2o = paper("criticalkv"), paper("dbtrimkv")
    times = as_printed(critical, critical.table("6"), critical.table("6").figures)
    assert times.rows[0].cells == ("30k", "30.57 / 1.00", "22.31 / 1.37", "22.48 / 1.36")
    sparse = as_printed(d2o, d2o.table("1"), d2o.table("1").figures)
    (fast,) = (line for line in sparse.rows if line.cells[0] == "FastV*")
    assert fast.cells[1:6] == (None, None, None, None, "46.0")


def test_lists_count_what_passed() -> None:
    kept = Filter(tasks=["vt"]).apply(FIGURES)
    assert overview(kept).rows[0].cells[1:3] == ("1", "21")
    assert [line.cells[:2] for line in contents(paper("criticalkv"), kept).rows] == [("1", "21")]
