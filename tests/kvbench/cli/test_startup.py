"""What a command imports: modules are counted, never seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RUN = ROOT / "results" / "baseline" / "reference"
PROCESS = """
import sys
from kvbench import cli
from kvbench.plugin_facts import PluginFacts

PluginFacts.uses_cache = True
statuses = [cli.call(command.split()) for command in sys.argv[1:]]
# What a report prints below its tables; the rest of it draws figures.
from kvbench.report.frames import prepare
from kvbench.report.remarks import remarks
from kvbench.runs.load import load_frames

print("REMARKS", *remarks(prepare(*load_frames([sys.argv[1].split()[-1]]))), sep="\\n")
print({"torch", "transformers", "lm_eval", "matplotlib", "scipy"} & set(sys.modules), {*statuses})
"""

RUNS = """
import atexit, sys
from kvbench.cli.app import main

names = {"matplotlib", "requests", "scipy", "sympy", "torch._dynamo", "torch.distributed.tensor"}
names |= {"requests.api", "sympy.core", "torch._dynamo.config"}  # imported when what they belong to is executed
atexit.register(lambda: print("IMPORTED", *sorted(names & set(sys.modules))))
sys.argv = ["kvbench", *sys.argv[1:]]
main()
"""


def test_lists_comparisons_tables_and_reports_import_no_torch_and_draw_nothing(tmp_path: Path) -> None:
    def printed(*commands: str) -> tuple[str, list[str]]:
        environment = os.environ | {"KVBENCH_CACHE": str(tmp_path), "COLUMNS": "100"}
        process = [sys.executable, "-c", PROCESS, *commands]
        done = subprocess.run(process, capture_output=True, text=True, check=True, env=environment)
        tables, _, end = done.stdout.partition("REMARKS\n")
        return tables, end.splitlines()

    first, (*first_remarks, first_imports) = printed(f"table {RUN}", "list policies")
    assert first_imports == "{'torch'} {0}", "the cache is empty"
    second, (*second_remarks, second_imports) = printed(
        f"table {RUN}", "list policies", "list policies snapkv", "list tasks", "list layouts",
        f"compare {RUN} {RUN}", f"compare-policies {RUN} random snapkv",
    )  # fmt: skip
    assert second_imports == "set() {0}"
    assert second.startswith(first)
    assert second_remarks == first_remarks
    assert "docs/faq.md" in first_remarks[1], "a remark on policies that read the last queries"


@pytest.mark.parametrize("process_count", [None, 1])
def test_a_run_imports_no_compiler_and_without_torchrun_neither_sympy_nor_what_spreads_models(
    tmp_path: Path, process_count: int | None
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    if process_count is not None:
        environment["WORLD_SIZE"] = str(process_count)
    flags = f"run --policy streaming_llm --budget 0.5 --task niah_single_1 --samples 1 --length 128 --out {tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", RUNS, *flags.split()], capture_output=True, text=True, check=True, env=environment
    )
    imported = done.stdout.partition("IMPORTED ")[2].split()
    lazy = ["requests", "sympy", "torch._dynamo"]
    assert imported == (sorted([*lazy, "sympy.core", "torch.distributed.tensor"]) if process_count else lazy)
