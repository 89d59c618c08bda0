"""YAML that is too large, names itself or holds values that nothing can read is one line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from kvbench.errors import UserError
from kvbench.runs.folders import find_runs
from kvbench.runs.grid import Grid
from kvbench.runs.values import read_yaml
from kvbench.runs.yaml_loader import Loader

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{key}: &{key} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, key in zip("abcdefghijk", "bcdefghijkl", strict=True)
)
LONG = "9" * 400
LONGER = "9" * 5000


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{BOMB}policies: *l\ntasks: vt\n", "more than 100,000 values, counting what aliases"),
        (f"{BOMB}m: {{<<: [*l]}}\n", "more than 100,000 values"),
        ("policies: &a [*a]\n", "an alias contains itself"),
        ("policies: " + "[" * 100_000, "nested too deeply"),
        ("policies: [" + "a, " * 100_000 + "]", "more than 100,000 values"),
        (f"samples: {LONGER}\n", "is not a valid int"),
        ("samples: !!int ''\n", "'' is not a valid int"),
        ("samples: !!float ''\n", "'' is not a valid float"),
        ("samples: !!bool maybe\n", "'maybe' is not a valid bool"),
        ("samples: !!timestamp now\n", "YAML takes now for a date"),
        ("samples: 2001-99-99\n", "YAML takes 2001-99-99 for a date"),
    ],
)
def test_what_cannot_be_loaded_is_one_short_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    begin = time.process_time()
    with pytest.raises(UserError, match=says) as caught:
        read_yaml(path)
    assert time.process_time() - begin < 60
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"samples: {LONG}", "samples must be an integer"),
        (f"samples: 0x{'f' * 4000}", "for another number"),
        (f"samples: '{LONGER}'", "samples must be an integer"),
        (f"temperature: {LONG}", "temperature must be a number"),
        (f"gpus_per_cell: {LONG}", "gpus_per_cell must be"),
        (f"budgets: {LONG}", "budget .* out of range"),
        (f"budgets: '{LONGER}'", "budget .* is not a number"),
        (f"cache_memory: {LONG}GB", "cache_memory must be a size"),
        (f"moments: chunked:{LONGER}", "chunk size is not a number"),
        (f"truncate: middle:{LONGER}", "unknown truncation"),
        ("quantization: [x]", r"unknown quantization \['x'\]"),
        ("dtype: [x]", r"unknown dtype \['x'\]"),
        ("executor: {a: 1}", "unknown executor"),
        ("judge: [x]", "unknown judge"),
        ("models: [[x]]", "models must be a value or a list of values"),
        (r'out: "a\0b"', "out contains a NUL character"),
        (r'models: "a\0b"', "models contains a NUL character"),
        (r'device_map: {"a\0b": cpu}', "device_map contains a NUL character"),
        (r'revision: "\ud800"', "revision contains a character that is not UTF-8"),
    ],
)
def test_a_value_of_the_wrong_kind_is_one_short_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text(f"policies: snapkv\ntasks: vt\n{line}\n")
    with pytest.raises(UserError, match=says) as caught:
        Grid.from_yaml(path)
    assert len(str(caught.value)) < len(str(path)) + 400


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match="cannot read /dev/zero: it is larger than 4 MB"):
        Grid.from_yaml("/dev/zero")


def test_aliases_that_repeat_little_are_read() -> None:
    assert yaml.load("a: &a [1, 2]\nb: *a\nc: [*a, *a]\n", Loader) == {
        "a": [1, 2],
        "b": [1, 2],
        "c": [[1, 2], [1, 2]],
    }


@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]", f"samples: {LONGER}", "[" * 100_000, "\0"])
def test_a_run_whose_grid_cannot_be_loaded_is_listed_as_broken(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "grid.yaml").write_text(text)
    [found] = find_runs(tmp_path)
    assert found.state == "broken"
    assert found.problem.startswith("grid.yaml: ")


def test_a_grid_of_thousands_of_policies_is_refused_at_once() -> None:
    names = ",".join(f"snapkv:window={i}" for i in range(1, 20_001))
    begin = time.process_time()
    with pytest.raises(UserError, match=r"20,000 policies are too many .* at most 1,000"):
        Grid.from_dict({"policy": names, "task": "vt"})
    numbers = [str(i) for i in range(1, 500)]
    with pytest.raises(UserError, match="has 249,001 combinations; use at most 100,000"):
        Grid.from_dict({"policy": "snapkv", "task": "vt", "length": numbers, "budget": numbers})
    assert time.process_time() - begin < 20
