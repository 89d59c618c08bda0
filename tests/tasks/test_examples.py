"""A third party's benchmark runs from an installed package."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "kvbench_example_task"

SCRIPT = """
import json, kvbench
from kvbench import cli, registry
print(registry.origin(registry.TASKS, "example"))
assert cli.call(["data", "fetch", "example"]) == 0
run = kvbench.run({"policy": "snapkv", "budget": 0.5, "task": "example_boxes", "length": 96,
                   "samples": 4, "out": "out"})
print(json.dumps(run.cells[["task", "group", "policy", "metric", "score", "status"]]
                 .to_dict("records")))
"""


@pytest.fixture(scope="module")
def package() -> ModuleType:
    file = EXAMPLE / "kvbench_example_task" / "__init__.py"
    spec = importlib.util.spec_from_file_location("kvbench_example_task", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_an_installed_package_is_found_by_its_entry_point_and_runs(tmp_path: Path) -> None:
    source = shutil.copytree(EXAMPLE, tmp_path / "source")
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--no-build-isolation", "--target", str(target), str(source)], check=True)
    path = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path, "KVBENCH_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    origin, nothing, cells = done.stdout.splitlines()
    assert origin == "kvbench-example-task==0.1.0"
    assert nothing == "example: nothing to fetch"
    full, snapkv = json.loads(cells)
    common = {"task": "example_boxes", "group": "example", "metric": "found", "status": "ok"}
    assert full.items() >= {**common, "policy": "full", "score": 1.0}.items()
    assert snapkv.items() >= {**common, "policy": "snapkv"}.items()


@pytest.mark.parametrize("lexicon", ["natural", "reference"])
def test_rows_fit_and_do_not_depend_on_their_number(package: ModuleType, lexicon: str) -> None:
    def rows(samples: int, **changes: Any) -> Any:
        options = {"length": 200, "seed": 0, "lexicon": lexicon, **changes}

        def size(context: str, question: str) -> int:
            return len((context + question).split())

        return package.docs("example_boxes", samples=samples, size=size, **options)

    many = rows(8)
    assert rows(3) == many[:3]
    assert rows(3, seed=1) != many[:3]
    for row in many:
        words = (row["context"] + row["question"]).split()
        assert 190 < len(words) + row["max_new_tokens"] <= 200
        asked = row["question"].split()[6 if lexicon == "natural" else 1].rstrip("?")
        told = f"Box {asked} holds {{}} coins." if lexicon == "natural" else f"note {asked} {{}} ."
        assert row["context"].count(told.format(row["outputs"][0])) == 1


def test_the_metric_needs_the_whole_output_first(package: ModuleType) -> None:
    spec = importlib.util.spec_from_file_location("example_metric", EXAMPLE / "kvbench_example_task" / "metric.py")
    assert spec is not None
    assert spec.loader is not None
    metric = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(metric)
    doc = {"outputs": ["4409"]}
    scores = {r: metric.found(doc, [r])["found"] for r in (" 4409.", "4409 coins", "44091", "7, 4409")}
    assert scores == {" 4409.": 1.0, "4409 coins": 1.0, "44091": 0.0, "7, 4409": 0.0}
