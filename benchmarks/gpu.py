"""Measure kvbench on a GPU in one command of under ten minutes, without hub or data: `python -m benchmarks.gpu`.

The parts run one after the other, each in a process of its own with a budget of seconds, so that neither a crash nor
a slow part costs another part's results:

- oracles: the tests of the Triton kernels, on the GPU;
- kernel-NAME: a kernel against its oracle, then timed beside what torch offers (`benchmarks/kernels.py`);
- responses: the responses of the models that ship with kvbench, beside those of this machine's CPU;
- grid-1B, grid-8B: policies and budgets at several contexts on Llamas of random weights, as `kvbench bench` times them.

After each part, `DEVICE.md` with figures and `results.json` in the folder `DEVICE` are written again. Whatever was left
out, because it does not fit into the memory or the time, is named there.

`--dry-run` takes tiny sizes, and a CPU with Triton's interpreter if there is no GPU. Exit status 2 without a GPU that
runs Triton kernels, 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import logging

from benchmarks.gpu_page import Results, write_page
from benchmarks.kernels import AGREE_AT, DEVICE, OPS, RATES, disagreement, no_kernels, timed, without_triton
from benchmarks.long_context import SHAPES, context_memory, llama, llama_config, without_weights
from benchmarks.wrong_input import refused
from kvbench.engine.hardware import describe_hardware
from kvbench.engine.kernels import launch
from kvbench.engine.threads import available_cores
from kvbench.errors import UserError
from kvbench.files import check_writable, create_folder
from kvbench.progress import Silent, duration
from kvbench.tables.numbers import size
from kvbench.tables.text import slug

ROOT = Path(__file__).parents[1]
KERNEL_SECONDS = {"capacity_loss": 30, "retention_attention": 50, "ragged_attention": 45}
PARTS = {
    "oracles": 70,
    **{f"kernel-{op}": KERNEL_SECONDS.get(op, 25) for op in OPS},
    "responses": 90,
    "grid-1B": 75,
    "grid-8B": 145,
}
"""Seconds that every part may take, its start included; what one leaves is shared by those after it."""
DRY_PARTS = ("oracles", *(f"kernel-{op}" for op in OPS), "responses", "grid-tiny")
GRACE = 5
"""Seconds after which a part that does not end by itself is stopped."""
MOST_WORKERS = 8
"""Tests of the kernels that run at once, with two cores or more for each."""
KERNEL_TESTS = ("tests/policies/kernels", "tests/kvbench/engine/kernels")
DRY_TESTS = "test_sixteen_bits_are_multiplied_exactly"
POLICIES = ("snapkv", "criticalkv", "keydiff")
DRY_POLICIES = ("snapkv",)
COSTLY = "h2o"
"""Policy that needs the attention of all queries, and is timed at the shortest context alone."""
BUDGETS = ("0.1", "0.4")
SIZES = ((4096, 1), (16384, 1), (32768, 1), (4096, 8), (16384, 8), (32768, 8))
"""Contexts and batches, in the order in which they are measured."""
ANSWER = 32
SHIPPED = {
    "reference": {
        "task": "niah_single_2,niah_multikey_1,vt",
        "policy": "random,criticalkv,snapkv,keydiff,h2o,snapkv:allocate=global",
        "budget": "0.2,0.4",
        "moment": "context,question",
        "length": 512,
        "samples": 4,
    },
    "reference-vl": {
        "task": "shapes_vqa",
        "policy": "snapkv,keydiff,divprune",
        "budget": "visual:0.2",
        "moment": "context,question",
        "length": 256,
        "samples": 2,
    },
}
"""Runs whose responses are compared."""
DRY_SHIPPED = {"reference": {"task": "niah_single_2", "policy": "snapkv", "budget": "0.2", "length": 128, "samples": 1}}
SAMPLE = ["task", "policy", "budget", "moment", "sample_id", "question_id", "repeat"]

Write = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Part:
    """How a part runs.

    Attributes:
        write: Stores a row at once.
        deadline: When it should have ended, by `time.monotonic`.
        is_dry: Whether sizes are tiny.
    """

    write: Write
    deadline: float
    is_dry: bool

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def leave_out(self, what: str, why: str) -> None:
        """Store that something was not measured."""
        self.write({"left_out": f"{what}: {why}"})


# --- parts ----------------------------------------------------------------------------------------


def run_oracles(part: Part) -> None:
    """Run the tests of the kernels on the device, several at a time, as each has Triton compile variants."""
    import pytest

    cores = available_cores()
    workers = min(MOST_WORKERS, cores // 2) if find_spec("xdist") else 1
    margin = GRACE if workers > 1 else 0  # the tests that a worker has begun are run to the end

    class Recorder:
        def pytest_sessionstart(self, session: pytest.Session) -> None:
            self.session = session

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            part.write({"planned": len(session.items)})

        @pytest.hookimpl(optionalhook=True)
        def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
            if node.gateway.id == "gw0":  # all collect the same
                part.write({"planned": len(ids)})

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                message = "" if report.outcome == "passed" else str(report.longrepr).strip().splitlines()[-1]
                part.write({"test": report.nodeid, "outcome": report.outcome, "message": message})
            if part.left < margin:
                plugins = self.session.config.pluginmanager
                (plugins.getplugin("dsession") or self.session).shouldstop = "out of time"

    names = DRY_TESTS if part.is_dry else ""
    selected = " and ".join(filter(None, [names, DEVICE.type]))
    paths = [str(ROOT / folder) for folder in KERNEL_TESTS[: 1 if part.is_dry else None]]
    side_by_side = []
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(cores // workers))
        side_by_side = [f"-n{workers}", "--maxschedchunk=1"]
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *side_by_side]
    pytest.main([*options, "-k", selected, *paths], plugins=[Recorder()])


def run_kernel(part: Part, op: str) -> None:
    """Compare every way to compute an op with its oracle, then time those that agree."""
    torch.manual_seed(0)
    wrong: set[str] = set()
    for case in OPS[op](63 if part.is_dry else AGREE_AT):
        for way in case.ways():
            complaint = disagreement(case, way)
            part.write({"op": op, "case": case.name, "way": way.name, "complaint": complaint})
            if complaint:
                wrong.add(way.name)
                part.leave_out(f"{case.name}, {way.name}", complaint)
    if "kernel" in wrong:
        return
    for length in (63,) if part.is_dry else (4096, 16384):
        for case in OPS[op](length):
            if part.left < 0:
                part.leave_out(case.name, "out of time")
                continue
            for row in timed(case, RATES, 1 if part.is_dry else 20, wrong):
                part.write({"op": op, **row})


def run_grid(part: Part, shape: str) -> None:
    """Time policies and budgets on a Llama of random weights, from short contexts to long ones."""
    from kvbench.analysis.speed.settings import SpeedSettings
    from kvbench.analysis.speed.timing import measure_model

    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    torch.manual_seed(0)
    sizes = [
        (context, batch)
        for context, batch in (((64, 1), (64, 2)) if part.is_dry else SIZES)
        if _fits(part, shape, context, batch)
    ]
    model = llama(shape, DEVICE, dtype)
    seconds_per_token = 0.0
    for place, (context, batch) in enumerate(sizes):
        name = f"{shape}, context {context}, batch {batch}"
        expected = seconds_per_token * context * batch
        if part.left < expected:
            part.leave_out(
                name, f"it would take about {duration(expected)}, and the part has {duration(max(0.0, part.left))}"
            )
            continue
        policies = DRY_POLICIES if part.is_dry else POLICIES
        bench = SpeedSettings(
            f"Llama {shape}",
            policies if place else (*policies, COSTLY),
            BUDGETS,
            contexts=(context,),
            batches=(batch,),
            generates=(2 if part.is_dry else ANSWER,),
            repeats=1,
        )
        started = time.monotonic()
        frame = measure_model(model, bench, Silent())
        for row in frame.astype(object).where(frame.notna(), None).to_dict("records"):
            part.write(row)
        if place:  # the first one compiles kernels, and times a policy more
            seconds_per_token = (time.monotonic() - started) / (context * batch)
    if len(sizes) > 0:
        part.leave_out(f"{COSTLY} beyond context {sizes[0][0]}", "it needs the attention of all queries")


def _fits(part: Part, shape: str, context: int, batch: int) -> bool:
    """Return whether a size fits into the GPU's memory; if not, store that it was left out."""
    if DEVICE.type != "cuda":
        return True
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    config = llama_config(shape)
    plan = context_memory(without_weights(shape), context, total)
    # The full cache is copied when it is compressed; a layer's activations are in 16 bits.
    activations = 2 * batch * context * (3 * config.intermediate_size + 8 * config.hidden_size)
    needed = plan.weights + 2 * batch * plan.full_cache + activations
    if needed > 0.95 * total:
        part.leave_out(f"{shape}, context {context}, batch {batch}", f"it needs about {size(needed)} of {size(total)}")
    return needed <= 0.95 * total


def run_responses(part: Part) -> None:
    """Compare responses of the models that ship with kvbench with those of torch's code on the CPU."""
    import kvbench

    for model, options in (DRY_SHIPPED if part.is_dry else SHIPPED).items():
        if part.left < 0:
            part.leave_out(f"responses of {model}", "out of time")
            continue
        samples = {}
        with tempfile.TemporaryDirectory() as folder:
            for side, device in (("here", DEVICE.type), ("cpu", "cpu")):
                grid = {**options, "model": model, "dtype": "float32", "device": device, "out": f"{folder}/{side}"}
                with without_triton() if side == "cpu" else nullcontext():
                    samples[side] = kvbench.run(grid, progress=False).samples.set_index(SAMPLE)
        here, cpu = samples["here"], samples["cpu"].reindex(samples["here"].index)
        for key, response in here["response"].items():
            part.write(
                {
                    "model": model,
                    **{
                        column: value if isinstance(value, str) else int(value)
                        for column, value in zip(SAMPLE, key, strict=True)
                    },
                    "equal": bool(response == cpu["response"][key]),
                    "held_equal": bool(here["held_entries"][key] == cpu["held_entries"][key]),
                }
            )


RUN: Mapping[str, Callable[[Part], None]] = {
    "oracles": run_oracles,
    **{f"kernel-{op}": partial(run_kernel, op=op) for op in OPS},
    **{f"grid-{shape}": partial(run_grid, shape=shape) for shape in SHAPES},
    "responses": run_responses,
}


# --- the command ----------------------------------------------------------------------------------


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a part; a line that was cut when it was stopped is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def start_part(name: str, seconds: float, path: Path, is_dry: bool) -> str:
    """Run a part in a process of its own; return why it ended early, or ""."""
    deadline = time.monotonic() + seconds  # the clock of all processes of a machine
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--deadline", str(deadline), "--rows", str(path)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if DEVICE.type != "cuda":
        environment |= {"TRITON_INTERPRET": "1", launch.SWITCH: "1"}
    log = path.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*command, *["--dry-run"] * is_dry],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds + GRACE)
        except subprocess.TimeoutExpired:
            return f"stopped after {duration(seconds + GRACE)}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status == 0:
        return ""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"exit status {status}: {lines[-1] if lines else 'no output'}"


def about_device() -> dict[str, Any]:
    """Return the names and versions of device and software."""
    import triton

    facts: dict[str, Any] = {
        "device": describe_hardware(DEVICE.type),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if DEVICE.type == "cuda":
        properties = torch.cuda.get_device_properties(DEVICE)
        facts |= {
            "memory": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": str(torch.version.cuda),
        }
    return facts


def measure(out: Path, minutes: float, is_dry: bool) -> Results:
    """Run all parts and write the page after each.

    Raises:
        UserError: The time is too short for the parts, or the folder cannot be written.
    """
    seconds = dict.fromkeys(DRY_PARTS, 1.0) if is_dry else dict(PARTS)
    least = math.ceil(20 * GRACE * len(seconds) / 60) / 10
    if not least <= minutes < math.inf:  # NaN is not
        raise UserError(f"--minutes {minutes:g} is out of range; {len(seconds)} parts need {least:g} or more")
    deadline = time.monotonic() + 60 * minutes
    results = Results(about_device(), is_dry)
    folder = out / slug(results.facts["device"].lower())
    check_writable(folder)
    create_folder(folder)
    with tempfile.TemporaryDirectory() as scratch:
        for place, (name, share) in enumerate(seconds.items()):
            path = Path(scratch) / f"{name}.jsonl"
            started = time.monotonic()
            left = deadline - started - GRACE * (len(seconds) - place)
            budget = max(0.0, left) * share / sum(list(seconds.values())[place:])
            print(f"{name}: at most {duration(math.ceil(budget))}", flush=True)
            problem = start_part(name, budget, path, is_dry)
            results.add(name, rows_of(path), time.monotonic() - started, problem)
            page = write_page(results, folder)
            print(f"{name}: {results.parts[name].summary}", flush=True)
    print(page)
    return results


@refused()
def main() -> int:
    """Measure, or run one part; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the pages (default: docs/gpu, or build/gpu of a dry run)")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all parts together (default: 9.5)")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes; on a CPU with Triton's interpreter")
    parser.add_argument("--part", choices=list(RUN), help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        logging.disable_progress_bar()
        with options.rows.open("w", encoding="utf-8", buffering=1) as rows:
            part = Part(
                lambda row: print(json.dumps(row), file=rows),
                options.deadline,
                options.dry_run,
            )
            RUN[options.part](part)
        return 0
    if (reason := no_kernels()) and not (options.dry_run and DEVICE.type == "cpu"):
        hint = "; --dry-run tries it on a CPU" if DEVICE.type == "cpu" else ""
        print(f"benchmarks.gpu measures Triton kernels on a GPU, and {reason}{hint}")
        return 2
    out = options.out or ROOT / ("build/gpu" if options.dry_run else "docs/gpu")
    return 1 if measure(out, options.minutes, options.dry_run).problems else 0


if __name__ == "__main__":
    sys.exit(main())
