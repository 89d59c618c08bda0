"""Compile every kernel for sm_80, sm_86 and sm_90 with no GPU, and refuse what would be slow or not run.

    python benchmarks/compile_kernels.py [--arch 80 86 90] [--op capacity_loss] [--quick] [--markdown]

Triton brings its own assembler (`ptxas`) and the tools to read its output, so a CPU machine is
enough. Read from the cubin: registers and stack per thread, shared memory per program, and the
instructions themselves. The gate fails (exit status 1) on

- spills: a stack of more than 0 bytes, or loads and stores to local memory (but not on sm_86, which takes
  the sizes that are chosen for sm_80);
- more shared memory than a program may have (163 KiB on sm_80, 227 KiB on sm_90, and on sm_86, as on every
  consumer GPU, 99 KiB): such a launch ends the run;
- a missing instruction that the kernel is known by (tensor cores, asynchronous copies): Triton
  drops these silently when it cannot prove an alignment.

How fast a kernel is, and whether it races, cannot be known so: `benchmarks/kernels.py` on a GPU.
Exit status 2 where triton is not installed.

An op takes part by the name of its folder in `OPS` and a function `compiled(arch)` in its
`triton.py` that yields `kvbench.engine.kernels.launch.Compiled`, made from the very constants
that it launches with.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.engine.kernels.launch import Compiled, tuned_for

OPS = {
    "capacity_loss": "kvbench_policies.kernels",
    "retention_attention": "kvbench_policies.kernels",
    "value_norm": "kvbench_policies.kernels",
    "global_select": "kvbench_policies.kernels",
    "ragged_attention": "kvbench.engine.kernels",
}
"""Folders of the ops, and the packages that they are in."""
SHARED_LIMIT = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one program may have, by architecture."""


class Row(NamedTuple):
    """One kernel on one architecture."""

    kernel: str
    arch: int
    registers: int
    stack: int
    shared: int
    seconds: float
    complaint: str


def ready() -> None:
    """Prepare this process: real kernels, and settings that are alike in every version."""
    if find_spec("triton") is None:
        print("triton is not installed: pip install 'kvbench[gpu]'")
        raise SystemExit(2)
    os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is decorated
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # 3.10 turns the default round


def build(case: Compiled, arch: int) -> Any:
    """Compile one kernel; the answer has its cubin in `.asm["cubin"]`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    types = {n: "constexpr" if n in case.constants else case.types[n] for n in names}
    aligned = {n for n, t in types.items() if t.startswith("*")} | set(case.aligned)
    source = ASTSource(
        case.kernel,
        types,
        constexprs=dict(case.constants),
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in aligned},
    )
    return triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": case.warps, "num_stages": case.stages},
    )


def tool(name: str, *arguments: str) -> str:
    """Run one of the tools that triton brings and return what it prints."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


def examine(case: Compiled, arch: int) -> Row:
    """Compile one kernel and read its cubin (a driver would be needed to ask Triton itself)."""
    begin = time.perf_counter()
    built = build(case, arch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "--dump-resource-usage", file.name)
        code = tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {usage!r}")
    registers, stack = int(found[1]), int(found[2])
    shared = int(built.metadata.shared)
    complaints = []
    spills = stack or int(found[4]) or re.search(r"\b(STL|LDL)\b", code)
    if spills and tuned_for(arch // 10) == arch:
        complaints.append(f"spills ({stack} bytes of stack)")
    if shared > SHARED_LIMIT[arch]:
        complaints.append(f"{shared} bytes of shared memory, {SHARED_LIMIT[arch]} may be had")
    complaints += [f"no {opcodes}" for opcodes in case.expect if not re.search(rf"\b({opcodes})", code)]
    seconds = time.perf_counter() - begin
    return Row(case.name, arch, registers, stack, shared, seconds, "; ".join(complaints))


def cases(op: str, arch: int) -> Iterator[Compiled]:
    """The kernels of one op, as launched on an architecture."""
    yield from importlib.import_module(f"{OPS[op]}.{op}.triton").compiled(tuned_for(arch // 10))


def markdown(rows: list[Row]) -> str:
    """The table of docs/performance.md."""
    lines = [
        "| kernel | arch | registers | stack | shared, KiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| `{r.kernel}` | sm_{r.arch} | {r.registers} | {r.stack} | {r.shared / 1024:.1f} |" for r in rows]
    return "\n".join(lines)


def main() -> int:
    """Compile, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=list(SHARED_LIMIT), default=list(SHARED_LIMIT))
    parser.add_argument("--op", nargs="+", choices=list(OPS), default=list(OPS))
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs")
    parser.add_argument("--quick", action="store_true", help="one size of every kernel")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    ready()
    import triton

    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(asked.jobs) as pool,
    ):
        os.environ["TRITON_CACHE_DIR"] = folder
        jobs = [
            pool.submit(examine, case, arch)
            for op in asked.op
            for arch in asked.arch
            for case in cases(op, arch)
            if not (asked.quick and case.variant)
        ]
        rows = [job.result() for job in jobs]
    if asked.markdown:
        print(markdown(rows))
    else:
        print(f"triton {triton.__version__}")
        for r in rows:
            print(
                f"{r.kernel:44s} sm_{r.arch}  {r.registers:3d} registers  {r.stack} stack  "
                f"{r.shared:6d} shared  {r.seconds:5.1f} s  {r.complaint or 'ok'}"
            )
    bad = [r for r in rows if r.complaint]
    for r in bad:
        print(f"{r.kernel} on sm_{r.arch}: {r.complaint}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
