"""Sweeps of which `make test` runs a few cases and `make test-slow` the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """The values of a sweep, marked slow but for the quick ones."""
    cases = list(values)
    missing = [case for case in quick if case not in cases]
    assert not missing, f"no cases of the sweep: {missing}"
    return [case if case in quick else slow(case) for case in cases]


def slow(*values: Any) -> Any:
    """One slow case."""
    return pytest.param(*values, marks=pytest.mark.slow)
