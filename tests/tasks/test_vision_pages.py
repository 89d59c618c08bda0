"""The READMEs of the tasks with images and videos: licence, version, data; and docs/vision.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbench import registry
from kvbench.benchmark import Benchmark
from kvbench.harness.catalogue import benchmarks
from kvbench.spelling import policy

ROOT = Path(__file__).parents[2]
WITH_HUB = sorted(n for n, b in benchmarks()[0].items() if b.media and b.sources)


@pytest.mark.parametrize("name", WITH_HUB)
def test_a_readme_says_what_the_benchmark_is(name: str) -> None:
    bench: Benchmark = registry.get(registry.TASKS, name)
    page = " ".join((Path(bench.yaml) / "README.md").read_text().split())
    assert f"Licence: {bench.licence}" in page
    assert f"Version: {bench.version}." in page
    assert f"`{bench.metric}`" in page
    for source in {source for leaf in bench.sources.values() for source in leaf}:
        assert f"`{source.dataset}`" in page
        assert source.config is None or source.config in page
    overview = (ROOT / "docs" / "vision.md").read_text()
    assert all(f"`{leaf}`" in overview for leaf in bench.leaves)
    assert f"kvbench_tasks/{Path(bench.yaml).name}/README.md" in overview


def test_there_are_the_tasks_that_the_overview_names() -> None:
    assert {"mmdu", "mathvision", "mmstar", "gqa", "textvqa", "mme", "videomme"} <= set(WITH_HUB)


@pytest.mark.parametrize("page", ["Makefile", "README.md", "docs/vision.md"])
def test_commands_with_policies_that_prune_images_have_visual_budgets(page: str) -> None:
    """Any other budget is spent on text first, so that the images would be gone."""
    pruners = {name for name in registry.names(registry.POLICIES) if _prunes(name)} | {"pruning"}
    text = (ROOT / page).read_text().replace("\\\n", " ")
    commands = re.findall(r"kvbench run .*--policy (\S+).*?--budget (\S+)", text)
    told = [budgets for names, budgets in commands if pruners & set(names.split(","))]
    assert told
    assert all(b.startswith("visual:") for budgets in told for b in budgets.split(","))


def _prunes(name: str) -> bool:
    return policy(name).group == "pruning"
