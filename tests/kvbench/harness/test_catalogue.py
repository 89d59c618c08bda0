"""One benchmark by its name."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench import registry
from kvbench.errors import UserError
from kvbench.harness import catalogue


def test_a_benchmark_is_found_by_its_name_alone() -> None:
    assert catalogue.benchmark("ruler") is catalogue.benchmarks()[0]["ruler"]
    assert catalogue.benchmark("vt") is None, "a task of ruler"


def test_a_benchmark_that_does_not_load_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(group: str, name: str) -> Any:
        raise UserError(f"task {name!r} cannot be loaded")

    monkeypatch.setattr(registry, "get", fail)
    assert catalogue.benchmark("ruler") is None
