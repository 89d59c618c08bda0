"""What does a grid cost beside the full cache alone? `python -m benchmarks.grid --help`.

One prefill serves all cells of a context. This script measures what the cells then cost: a grid of
six policies at five budgets (and the full cache), beside the full cache alone, in the same process
and in turn. Times are those of one core: CPU seconds of a process with one thread, without loading
the model and without making the prompts.

First the responses of the grid are compared with those of every cell run alone, which must be the
same to the byte; if one differs, nothing is measured and the exit status is 1.

With `--kvpress-python` the same cells also run through the text generation pipeline of NVIDIA's
kvpress, cell by cell, on the same weights, tokens and numbers of new tokens. It runs in an
environment of its own:

    python3 -m venv .venv-kvpress && .venv-kvpress/bin/pip install 'torch==2.13.0' 'kvpress==0.5.5'
    python -m benchmarks.grid --kvpress-python .venv-kvpress/bin/python
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SNAP = "window=64:kernel=5:pool=avg"
POLICIES = ("streaming_llm", "snapkv", "h2o", "keydiff", "adakv", "criticalkv")
SHARED = {
    "streaming_llm": "streaming_llm",
    "knorm": "knorm",
    "keydiff": "keydiff",
    "snapkv": f"snapkv:{SNAP}",
    "adakv": f"adakv:{SNAP}",
    "criticalkv": f"criticalkv:variant=release:{SNAP}",
}
"""Policies that kvpress has as well, in our spelling."""
BUDGETS = ("0.1", "0.2", "0.3", "0.4", "0.5")
TASKS = "niah_single_1,niah_single_2,niah_single_3,niah_multikey_1"


# --- kvpress' side: runs in its environment, knows nothing of kvbench -----------------------------


def press_of(name: str, kept: float) -> Any:
    """The press of a policy that keeps a fraction of the context."""
    import kvpress

    removed = 1 - kept
    if name in ("streaming_llm", "knorm", "keydiff"):
        kinds = {
            "streaming_llm": kvpress.StreamingLLMPress,
            "knorm": kvpress.KnormPress,
            "keydiff": kvpress.KeyDiffPress,
        }
        return kinds[name](compression_ratio=removed)
    snap = kvpress.SnapKVPress(compression_ratio=removed, window_size=64, kernel_size=5)
    if name == "snapkv":
        return snap
    return kvpress.AdaKVPress(snap) if name == "adakv" else kvpress.CriticalAdaKVPress(snap)


def serve(folder: str) -> None:
    """Answer one request a line, in JSON: the cells of contexts; give seconds and answers."""
    import torch
    from kvpress import KVPressTextGenerationPipeline
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pipe = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer, device="cpu")
    print("ready", flush=True)
    for line in sys.stdin:
        began, answers = time.process_time(), []
        with torch.no_grad():
            for job in json.loads(line):
                tensors = {
                    "context_ids": torch.tensor([job["context"]]),
                    "questions_ids": [torch.tensor([job["question"]])],
                }
                press = press_of(job["policy"], job["kept"])
                try:
                    made = pipe._forward(tensors, max_new_tokens=job["tokens"], press=press)
                    answers.append(made[0])
                except Exception as error:  # some presses refuse a question of several tokens
                    answers.append({"error": str(error).splitlines()[0]})
        print(json.dumps({"seconds": time.process_time() - began, "answers": answers}), flush=True)


# --- our side -------------------------------------------------------------------------------------


class Ours:
    """Runs grids.

    Args:
        args: What to run.
        samples: Samples of every task.

    Attributes:
        rows: Rows of the last grid's batches.
        peak: Bytes that torch's allocator gave out at once for the last grid, without weights; 0
            if no limit was given.
    """

    def __init__(self, args: argparse.Namespace, samples: int) -> None:
        self.args, self.samples = args, samples

    def run(
        self, policies: list[str], budgets: list[str], full: bool, memory: str | None = None
    ) -> tuple[float, list[Any]]:
        """CPU seconds to generate all responses of a grid, and the responses.

        Args:
            policies: Policies, in one spelling each.
            budgets: Budgets of every policy.
            full: Whether the full cache is run as well.
            memory: As `--cache-memory`.
        """
        import torch

        from benchmarks.memory import allocated
        from kvbench.progress import Silent
        from kvbench.runs.executors.base import answer
        from kvbench.runs.grid import Grid
        from kvbench.runs.planning import plan
        from kvbench.runs.store import RunStore
        from kvbench.runs.worker import Worker, loaded_model

        with tempfile.TemporaryDirectory() as out:
            grid = Grid.from_dict(
                {
                    "policy": policies,
                    "budget": budgets,
                    "model": self.args.model,
                    "task": self.args.task,
                    "length": self.args.length,
                    "samples": self.samples,
                    "dtype": "float32",
                    "device": "cpu",
                    "full": full,
                    "cache_memory": memory,
                    "out": out,
                }
            )
            (stage,) = plan(grid, lambda line: None).stages
            self.jobs = stage.jobs
            with (
                loaded_model(stage, grid, lambda line: None) as model,
                RunStore(Path(out) / "run") as store,
            ):
                worker = Worker(model, Silent(), tokenizer=stage.tokenizer, store=store, cache_memory=grid.cache_memory)
                self.peak = 0

                def generate() -> None:
                    for job in stage.jobs:
                        answer(worker, job.prompts, job.cells)

                began = time.process_time()
                if memory is None:
                    generate()
                else:
                    self.peak = allocated(generate, torch.device("cpu"))
                self.rows = worker.batching.rows
                seconds = time.process_time() - began
                if worker.failed:
                    raise SystemExit(f"a cell failed: {next(iter(worker.failed.values()))}")
                return seconds, list(store.responses())

    def contexts(self) -> int:
        """Contexts of the last grid."""
        return len({(job.task.name, p.context_ids) for job in self.jobs for p in job.prompts})


def check(args: argparse.Namespace, policies: list[str]) -> bool:
    """Whether every response of the grid is that of its cell alone; print what was compared.

    One context of every task.
    """
    ours = Ours(args, samples=1)
    _, together = ours.run(policies, list(BUDGETS), True)
    texts = {r.key: r.response for r in together}
    compared = wrong = 0
    for policy in policies:
        for budget in BUDGETS:
            for alone in ours.run([policy], [budget], False)[1]:
                compared += 1
                wrong += alone.response != texts[alone.key]
    print(f"{compared} responses of the grid compared with cells run alone: {wrong} differ")
    return not wrong


def jobs_for_kvpress(ours: Ours, responses: list[Any], contexts: int) -> tuple[list[Any], int]:
    """The first contexts of every task with all their cells, as kvpress is told them."""
    import kvbench

    made, count = [], 0
    names = {str(kvbench.policy(spelling)): name for name, spelling in SHARED.items()}
    said = {r.key: r for r in responses}
    for job in ours.jobs:
        for prompt in job.prompts[:contexts]:
            count += 1
            for cell in job.cells:
                if cell.policy.is_full:
                    continue
                name = names[str(cell.policy)]
                request = prompt.request
                key = (cell.cell, request.sample_id, request.question_id, prompt.repeat)
                made.append(
                    {
                        "policy": name,
                        "kept": float(str(cell.budget)),
                        "context": list(prompt.context_ids),
                        "question": list(prompt.question_ids),
                        "tokens": max(1, said[key].generated_tokens),
                        "ours": said[key].response,
                    }
                )
    return made, count


def ratio(of: list[float], to: list[float]) -> str:
    """Median of paired ratios with the smallest and the largest."""
    found = sorted(a / b for a, b in zip(of, to, strict=True))
    return f"{found[len(found) // 2]:.2f}x [{found[0]:.2f}, {found[-1]:.2f}]"


def measure(args: argparse.Namespace, policies: list[str]) -> None:
    """Measure the full cache alone and the grid in turn, and print what they cost."""
    ours = Ours(args, args.samples)
    full: list[float] = []
    grid: list[float] = []
    for _ in range(args.repeats):
        seconds, alone = ours.run(["full"], ["0.5"], True)
        full.append(seconds / ours.contexts())
        seconds, responses = ours.run(policies, list(BUDGETS), True)
        grid.append(seconds / ours.contexts())
    contexts, cells = ours.contexts(), len(policies) * len(BUDGETS) + 1
    decode = sum(r.decode_s for r in responses) / contexts
    compress = sum(r.compress_s for r in responses) / contexts
    prefill = sum(r.prefill_s for r in alone) / contexts
    observed = sum(r.prefill_s for r in responses) / len(responses)
    context = sum(r.context_tokens for r in responses) / len(responses)
    fed = sum(r.question_tokens + r.generated_tokens for r in responses) / contexts
    print(f"\n{contexts} contexts of {args.length} tokens, {cells} cells, model {args.model}\n")
    print("| a context costs | CPU ms | to full |")
    print("| --- | --: | --: |")
    print(f"| the full cache alone | {1000 * sorted(full)[len(full) // 2]:.1f} | 1.00x |")
    print(f"| {cells} cells | {1000 * sorted(grid)[len(grid) // 2]:.1f} | {ratio(grid, full)} |")
    print(
        f"\nIn the last repeat, by the clock: prefill {1000 * prefill:.1f} ms without "
        f"observations, {1000 * observed:.1f} ms with them; compressions {1000 * compress:.1f} ms "
        f"(each counted as if it were alone); questions and decoding {1000 * decode:.1f} ms. "
        f"Prefill once and decode: {1000 * (prefill + decode):.1f} ms. Questions and answers have "
        f"{fed:.0f} tokens a context, which itself has {context:.0f}: at the speed of the prefill "
        f"without observations they would take {1000 * prefill * fed / context:.1f} ms."
    )


def compare(args: argparse.Namespace) -> None:
    """Measure the cells that kvpress has too, here and there in turn."""
    import torch

    from kvbench.engine.gguf import converted
    from kvbench.named import is_gguf, resolve_model

    policies = list(SHARED.values())
    ours = Ours(args, args.samples)
    folder = resolve_model(args.model)
    if is_gguf(folder):
        folder = str(converted(args.model, Path(folder), torch.float32))
    command = [args.kvpress_python, __file__, "--serve", folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin is not None and peer.stdout is not None
        assert peer.stdout.readline().strip() == "ready"
        here: list[float] = []
        there: list[float] = []
        for _ in range(args.repeats):
            seconds, responses = ours.run(policies, list(BUDGETS), False)
            here.append(seconds / ours.contexts())
            jobs, count = jobs_for_kvpress(ours, responses, args.kvpress_contexts)
            peer.stdin.write(json.dumps(jobs) + "\n")
            peer.stdin.flush()
            found = json.loads(peer.stdout.readline())
            there.append(found["seconds"] / count)
        peer.stdin.close()
    answers = found["answers"]
    errors = [a["error"] for a in answers if isinstance(a, dict)]
    # kvpress also decodes the token that ends an answer.
    pairs = zip(answers, jobs, strict=True)
    same = sum(str(a).startswith(job["ours"].rstrip()) for a, job in pairs)
    print(f"\n{len(policies)} x {len(BUDGETS)} cells that both have, CPU ms of a context:\n")
    print("| | a context | to kvbench |")
    print("| --- | --: | --: |")
    mine, theirs = (1000 * sorted(found)[len(found) // 2] for found in (here, there))
    print(f"| kvbench, {ours.contexts()} contexts in one run | {mine:.1f} | 1.00x |")
    print(f"| kvpress' pipeline, {count} of them, cell by cell | {theirs:.1f} | {ratio(there, here)} |")
    print(f"\n{same} of {len(answers)} responses begin with ours; {len(errors)} calls raised.")
    for error in sorted(set(errors)):
        print(f"  {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="reference")
    parser.add_argument("--task", default=TASKS)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=16, help="contexts of every task")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--kvpress-python", help="of the environment that has kvpress")
    parser.add_argument(
        "--kvpress-contexts",
        type=int,
        default=2,
        help="contexts of every task that kvpress answers too",
    )
    parser.add_argument(
        "--unchecked", action="store_true", help="do not compare responses with those of cells run alone"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.repeats, args.kvpress_contexts) < 1:
        parser.error("--repeats and --kvpress-contexts must be at least 1")
    if args.serve:
        serve(args.serve)
        return
    import torch

    from benchmarks.two_sides import KVPRESS, environment
    from benchmarks.wrong_input import refused

    if args.kvpress_python and environment("benchmarks.grid", KVPRESS, args.kvpress_python) is None:
        raise SystemExit(2)
    torch.set_num_threads(1)
    policies = args.policies.split(",")
    with refused():
        if not args.unchecked and not check(args, policies):
            raise SystemExit(1)
        measure(args, policies)
        if args.kvpress_python:
            compare(args)


if __name__ == "__main__":
    main()
