"""A run says before it begins where its settings leave a policy nothing to decide."""

from __future__ import annotations

import pytest

from kvbench.budget import Budget
from kvbench.runs.grid import Grid
from kvbench.runs.planning import plan


def said(policies: str, budgets: str, moment: str = "context") -> list[str]:
    """What planning says of windows on the reference model."""
    lines: list[str] = []
    given = {"policy": policies, "budget": budgets, "moment": moment}
    plan(Grid.from_dict({**given, "task": "vt", "length": 512, "samples": 2}), lines.append)
    return [line for line in lines if "window" in line]


@pytest.mark.parametrize("moment", ["context", "question"])
def test_windows_that_fill_a_budget_are_named(moment: str) -> None:
    # About 50 entries a head at 0.1, and 128, 100, 144 and 32 that stay for their place alone.
    (line,) = said("kvzap,locret,lagkv,snapkv,local,snapkv:window=64", "0.1,0.5", moment)
    assert line.startswith("vt: a fixed-size window fills the budget of kvzap (0.1), ")
    assert "locret (0.1), lagkv (0.1), snapkv:window=64 (0.1), so that no score" in line


def test_windows_that_fit_are_not_mentioned() -> None:
    assert said("kvzap:window=16,locret:local=16,lagkv:lag=8,snapkv,local", "0.1,0.5") == []
    assert said("kvzap", "0.5,full") == []
    assert said("kvzap", "64", "decode") == []


def test_a_budget_is_filled_if_most_contexts_are() -> None:
    half = Budget.parse("0.5")
    assert half.is_filled(lambda n: 50, [100, 100, 200])
    assert not half.is_filled(lambda n: 50, [100, 200])
    assert not half.is_filled(lambda n: 49, [100])
    assert not Budget.parse("full").is_filled(lambda n: n, [100])
    assert not Budget.parse("visual:64").is_filled(lambda n: n, [100])
    assert not Budget.parse(200).is_filled(lambda n: n, [100])
