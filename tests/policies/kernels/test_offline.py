"""Kernels compile for GPUs that are not here, without spills; nothing needs triton on a CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kernels import INTERPRETED

ROOT = Path(__file__).parents[3]
GATE = ROOT / "benchmarks" / "compile_kernels.py"
has_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="about kernels that are compiled")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@has_triton
@pytest.mark.slow
def test_kernels_compile_without_spills() -> None:
    done = run(str(GATE), "--quick", "--jobs", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "capacity_loss forward" in done.stdout
    assert "retention_attention backward_keys" in done.stdout
    assert "value_norm l1 bf16 d128" in done.stdout
    assert "global_select histogram" in done.stdout
    assert "ragged_attention attend bf16 d128" in done.stdout
    assert re.search(r"attend bf16 d256 64x32 w8 causal +sm_86", done.stdout)


BLOATED = """
import sys
sys.path.insert(0, {folder!r})
import compile_kernels as gate
gate.ready()
from kvbench_policies.kernels.capacity_loss import triton as op
from dataclasses import replace
case = next(op.compiled(80))
case = replace(case, constants={{"BT": 128, "BI": 128}}, warps=1, expect=("HMMA",))
print(gate.examine(case, 80).complaint)
from kvbench.engine.kernels.ragged_attention import triton as op
(case,) = (case for case in op.compiled(80) if case.name.endswith("attend bf16 d256 64x32 w8 causal"))
print(gate.examine(replace(case, stages=3), 86).complaint)
"""


@has_triton
@pytest.mark.slow
def test_the_gate_sees_spills_missing_instructions_and_too_much_memory() -> None:
    done = run("-c", BLOATED.format(folder=str(GATE.parent)))
    assert "spills" in done.stdout, done.stderr
    assert "no HMMA" in done.stdout
    assert "101376 may be had" in done.stdout


HIDDEN = """
import sys
sys.modules["triton"] = None
import torch
import kvbench.engine.attend
from kvbench_policies.kernels.capacity_loss.op import capacity_loss
from kvbench_policies.kernels.global_select.op import select_largest
from kvbench_policies.kernels.retention_attention.op import retention_attention
from kvbench_policies.kernels.value_norm.op import value_norm
x = torch.zeros(1, 1, 9)
capacity_loss(x, 2)
y = torch.randn(1, 1, 9, 4)
retention_attention(y, y, y, x, scale=0.5)
value_norm(y, torch.randn(1, 4, 3))
select_largest(y.long().abs()[0], torch.tensor([5]))
"""


def test_a_cpu_needs_no_triton() -> None:
    done = run("-c", HIDDEN)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="there is a GPU")
@pytest.mark.slow
def test_the_benchmark_says_that_it_needs_a_gpu() -> None:
    done = run(str(GATE.parent / "kernels.py"))
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 1
    assert "GPU" in done.stdout
