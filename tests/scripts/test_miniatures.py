"""`make recipes` sees a table that is not filled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvbench import cli
from kvbench.papers.recipes import Recipe, recipe
from scripts.recipes import gaps


def with_policies(one: Recipe, *names: str) -> Recipe:
    return replace(one, full={**one.full, "policy": [*names]})


def test_a_table_without_a_policy_or_a_number_is_seen(tmp_path: Path) -> None:
    """Two policies and one task of a miniature, beside what its recipe would have with others."""
    small = {"task": ["vt"], "length": 128, "samples": 2}
    flags = ["--policy", "snapkv,adakv", "--task", "vt", "--length", "128", "--samples", "2", "--quiet"]
    command = ["run", "--recipe", "criticalkv-table1", "--model", "reference", "--out", str(tmp_path), *flags]
    assert cli.call(command) == 0
    one = with_policies(replace(recipe("criticalkv-table1"), miniatures={"reference": small}), "snapkv", "adakv")
    free = replace(one, small_layout="--rows policy --columns task")
    assert not [*gaps(one, "reference", tmp_path), *gaps(free, "reference", tmp_path)]
    more = ("snapkv", "adakv", "keydiff")
    assert list(gaps(with_policies(one, *more), "reference", tmp_path)) == ["its table lacks 1 row"]
    assert list(gaps(with_policies(free, *more), "reference", tmp_path)) == ["its table lacks keydiff"]
    (gap,) = gaps(replace(one, small_layout="--layout criticalkv-1"), "reference", tmp_path)
    assert "empty places" in gap
    assert list(gaps(replace(one, small_layout="--layout d2o-1"), "reference", tmp_path)) == ["its layout does not fit"]
