"""The Triton kernels pass the same tests as the torch path, in Triton's interpreter.

The interpreter is chosen when a kernel is decorated, so they run in a process of its own. Cases marked `slow` run there
only by `make kernels`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kernels import INTERPRETED

HERE = Path(__file__).parent
ENGINE = HERE.parents[1] / "kvbench" / "engine"
IN_A_MODEL = (
    "test_attachment.py::test_both_ways_to_attend_agree",
    "test_attachment.py::test_ragged_eviction_equals_masking[llama-gap]",
    "test_shared.py::test_logits_are_those_of_copies_to_the_bit[3]",
    "test_shared.py::test_a_wrong_base_is_noticed",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(INTERPRETED, reason="this is the process of its own"),
]


def test_kernels_in_the_interpreter() -> None:
    files = [
        str(HERE / f"test_{op}.py") for op in ("capacity_loss", "retention_attention", "value_norm", "global_select")
    ]
    files.append(str(ENGINE / "kernels" / "test_ragged_attention.py"))
    files += [str(ENGINE / test) for test in IN_A_MODEL]
    every_case = ["-m", "not faults"] if os.environ.get("KVBENCH_EVERY_KERNEL_CASE") else []  # slow ones as well
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *every_case, *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "KVBENCH_TRITON": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
