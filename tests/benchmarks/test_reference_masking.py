"""The reference model keeps a needle in the tokens behind it, in its last layer."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "reference_masking.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_masking", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_needle_is_in_the_tokens_behind_it(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    correct, ranks = script.study("niah_single_2", 256, 4)
    assert list(correct.values()) == [4, 4, 4, 0]
    assert "in layer 3" in list(correct)[-1]
    assert set(ranks) == set(script.SCORES)
    assert max(ranks["snapkv:kernel=1"], ranks["knorm"]) < 5 < ranks["random"]
