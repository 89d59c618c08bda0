"""Recipes beside their papers: every table and figure has one or a reason, and every difference is explained."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace

import pytest

from kvbench import cli, registry
from kvbench.errors import UserError
from kvbench.harness import catalogue
from kvbench.papers.layouts.from_papers import published_layout
from kvbench.papers.published.results import all_figures
from kvbench.papers.recipes import left_out, missing_parts, paper_items, recipe, recipes
from kvbench.papers.recipes.compare import DIFFERS, NOT_STATED, SAME, compared_settings

TABLES_AND_FIGURES = {"criticalkv": (22, 9), "dbtrimkv": (8, 14), "trimkv": (9, 26), "d2o": (21, 9)}
"""How many tables and figures each paper has; both are numbered without gaps, and the appendix continues."""


def bare(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


@pytest.mark.parametrize("paper", TABLES_AND_FIGURES)
def test_every_table_and_figure_of_a_paper_has_a_recipe_a_layout_or_a_reason(paper: str) -> None:
    tables, figures = TABLES_AND_FIGURES[paper]
    items = paper_items(paper)
    expected = [f"table {n}" for n in range(1, tables + 1)] + [f"figure {n}" for n in range(1, figures + 1)]
    assert [one.item for one in items] == expected
    for one in items:
        assert bool(one.recipe) != bool(one.reason)
        if one.recipe:
            assert recipe(one.recipe).item == one.item and one.title
        if one.layout:
            assert f"table {published_layout(one.layout).table.number}" == one.item


def test_a_reason_that_names_a_recipe_names_one_that_shows_the_item() -> None:
    for one in left_out():
        if found := re.fullmatch(r"(\S+) shows it as well", one.reason):
            kind, number = one.item.split()
            other = recipe(found[1])
            spans = re.findall(r"(\d+) to (\d+)", other.also)
            numbers = set(map(int, re.findall(r"\d+", other.also)))
            numbers |= {n for first, last in spans for n in range(int(first), int(last) + 1)}
            assert kind in other.also and int(number) in numbers, one


def test_the_list_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["list", "recipes", "--paper", "d2o"]) == 0
    said = capsys.readouterr().out
    assert "d2o-table18" in said and "figure 3" in said and "explains the method" in said
    assert cli.call(["list", "tasks", "--paper", "d2o"]) == 2
    assert "--paper is for kvbench list recipes" in capsys.readouterr().err
    with pytest.raises(UserError, match="did you mean criticalkv"):
        paper_items("critikalkv")


# --- nothing that is installed is denied ----------------------------------------------------------


@functools.cache
def installed() -> set[str]:
    """Names of policies, benchmarks and their tasks, without punctuation."""
    names = {*registry.names(registry.POLICIES), *catalogue.task_sets()}
    names |= {task for tasks in catalogue.task_sets().values() for task in tasks}
    return {bare(name) for name in names}


def denied(text: str) -> set[str]:
    """Words and pairs of words of a sentence that are names of what is installed."""
    words = re.sub(r"`[^`]*`", " ", text).split()
    spans = [*words, *map("".join, itertools.pairwise(words))]
    return {bare(span) for span in spans} & installed() - {"full", "local", "random"}


def test_published_results_have_the_policy_and_the_task_that_are_installed() -> None:
    names = installed()
    for figure in [figure for figure in all_figures() if figure.metric != "gain"]:  # whose row has lost its label
        assert figure.policy or bare(figure.method) not in names, figure
        assert figure.task or bare(figure.dataset) not in names, figure


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_lacks_what_its_table_prints_and_kvbench_does_not_have(name: str) -> None:
    one = recipe(name)
    lacks = " ".join(one.lacks)
    assert not denied(lacks)
    reads_images = any("vl" in model for model in registry.names(registry.MODELS))
    assert not (reads_images and re.search(r"\b(image|video)", lacks))
    assert missing_parts(one) == list(one.lacks), "every policy and task that it runs is installed"
    assert ("policy" in one.full) == any(compared.name == "policy" for compared in compared_settings(one))
    figures = [f for f in all_figures() if f.paper == one.paper and f"table {f.table}" == one.item]
    without = {f.method for f in figures if f.method and not f.policy}
    for method in without:
        assert method in lacks or bare(method) in bare(" ".join(one.differs)), method


def test_a_denied_policy_is_noticed() -> None:
    assert denied("SeerAttn-R, which keeps the full cache in host memory") == {"seerattnr"}
    assert denied("PyramidInfer and LoCoco, which are not among the policies") == {"pyramidinfer", "lococo"}
    assert not denied("w.o. EMA-Threshold and w.o. Both: `d2o` has no merging without a threshold")


# --- the settings of a paper beside the recipe's --------------------------------------------------


def verdicts(name: str) -> dict[str, str]:
    return {compared.name: compared.verdict for compared in compared_settings(recipe(name))}


def test_settings_of_tables_are_compared_with_what_is_published() -> None:
    assert verdicts("criticalkv-table1") == {
        "model": DIFFERS,  # Qwen2.5-32B or its instruct model: the paper does not say
        "policy": SAME,
        "budget": SAME,
        "task": SAME,
        "moment": SAME,
        "length": SAME,
        "samples": SAME,
    }
    assert verdicts("d2o-table11")["policy"] == SAME
    assert verdicts("d2o-table11")["model"] == NOT_STATED
    assert verdicts("dbtrimkv-table3")["task"] == SAME


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("criticalkv-table1", {"policy": ["snapkv"]}),
        ("criticalkv-table1", {"moment": "question"}),
        ("criticalkv-table2", {"budget": [0.2]}),
        ("d2o-table21", {"policy": ["snapkv", "streaming_llm", "h2o", "pyramidkv", "d2o"]}),
        ("trimkv-table1", {"task": ["longproc_countdown_2k"]}),
        ("trimkv-table5", {"batch": [4]}),
    ],
)
def test_a_changed_setting_differs(name: str, changes: dict[str, object]) -> None:
    one = recipe(name)
    (changed,) = changes
    assert verdicts(name)[changed] == SAME
    altered = compared_settings(replace(one, full={**one.full, **changes}))
    assert {c.name: c.verdict for c in altered}[changed] == DIFFERS


@pytest.mark.parametrize("name", recipes())
def test_every_difference_is_explained(name: str) -> None:
    one = recipe(name)
    said = bare(" ".join((*one.differs, *one.lacks)))
    for compared in compared_settings(one):
        if compared.verdict == DIFFERS:
            assert any(bare(text) in said for text in compared.of_paper), compared
