"""What `benchmarks/prefill_memory.py` measures, small: a layer is freed before the next begins."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvbench.engine.models import model_info
from kvbench_policies.gates.loaded import random_gates

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "prefill_memory.py"
LAYERS, LENGTH = 8, 256


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prefill_memory", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("policy", ["trimkv", "snapkv:window=8", "dbtrimkv"])
def test_a_policy_with_a_budget_a_head_holds_its_budget_and_one_layer(
    script: ModuleType, policy: str, tmp_path: Path
) -> None:
    model = script.llama(LAYERS, LENGTH, torch.device("cpu"))
    ids = torch.randint(256, (1, LENGTH))
    layer = 2 * script.HEADS * script.DIM * LENGTH * 4
    kind = policy.partition(":")[0]
    if kind != "snapkv":
        policy += f":gates={random_gates(kind, model_info(model), tmp_path)}"
    with torch.no_grad():
        bare = script.allocated(lambda: model(input_ids=ids, use_cache=False), ids.device)
        peak = script.measure(model, ids, policy, "0.1", bare)
    # A tenth of eight layers, with room for what is appended, and the layer that attends.
    if kind == "dbtrimkv":  # its budget is over all layers: it needs all of them
        assert peak.held == LAYERS * layer
        assert peak.working > 5 * layer
    else:
        assert peak.held < 2.3 * layer
        assert peak.working < 2.3 * layer
    assert peak.left < 1.3 * layer
