"""What does a context's prefill cost alone, and in a batch? `python -m benchmarks.prefill_batch`.

Contexts of one length are prefilled one by one and in batches (`--prefill-batch` of `kvbench run`),
with nothing observed and with what h2o observes, in turn. Before anything is timed, the contexts of
a padded batch must keep what they keep alone. Times are processor times on a CPU and times by the
clock on a GPU: the median over the repeats, per context.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import kvbench
from benchmarks.wrong_input import refused
from kvbench.budget import Budget
from kvbench.engine.driver import engine
from kvbench.engine.loading import load_model, pick_device, pick_dtype
from kvbench.engine.prefix import Compression, Prefix
from kvbench.engine.threads import now
from kvbench.view import AttentionMass, Need

OBSERVED: dict[str, tuple[Need, ...]] = {"nothing": (), "attention mass": (AttentionMass(),)}


def check(model: nn.Module, device: torch.device) -> None:
    """Raise SystemExit if a context in a padded batch keeps other entries than alone."""
    lengths = (128, 101, 57)
    ids, mask = contexts(len(lengths), 128, device), torch.ones(3, 128, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, : 128 - length] = False
    policies = [kvbench.policy(name) for name in ("h2o", "snapkv", "keydiff")]
    cells = [Compression(policy, Budget.parse(0.2), "context", 0) for policy in policies]
    needs = {need for policy in policies for need in policy.needs}
    together = Prefix(model, needs)
    together.extend(ids, mask.to(device))
    for row, length in enumerate(lengths):
        alone = Prefix(model, needs)
        alone.extend(ids[row : row + 1, -length:])
        both = zip(together.sequence(row).compress(cells), alone.compress(cells), strict=True)
        for cell, (mine, theirs) in zip(cells, both, strict=True):
            for a, b in zip(mine.kept(), theirs.kept(), strict=True):
                if a is not None and b is not None and not torch.equal(a, b):
                    raise SystemExit(f"{cell.policy} keeps other entries in a batch; not timed")


def contexts(count: int, length: int, device: torch.device) -> Tensor:
    """Made-up contexts, `[count, length]`."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(5, 900, (count, length), generator=generator).to(device)


def seconds(model: nn.Module, ids: Tensor, needs: tuple[Need, ...]) -> float:
    """The time of one prefill."""
    on_cpu = ids.device.type == "cpu"
    began = time.process_time() if on_cpu else now(ids.device)
    prefix = Prefix(model, needs)
    prefix.extend(ids)
    for row in range(len(ids) if len(ids) > 1 else 0):
        prefix.sequence(row)
    return (time.process_time() if on_cpu else now(ids.device)) - began


@refused()
def main() -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="reference")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    device = pick_device(given.device)
    model = load_model(given.model, None, device, pick_dtype(given.dtype, device))
    sizes = [1, *given.batches]
    head = (f"{n} together" for n in given.batches)
    table = Table("tokens", "observed", "alone: ms", *head, title=f"{given.model}, {device}")
    with torch.inference_mode(), engine(model):
        check(model, device)
        for length in given.lengths:
            for name, needs in OBSERVED.items():
                taken: list[list[float]] = [[] for _ in sizes]
                for _ in range(given.repeats + 1):  # the first is not counted
                    for size, times in zip(sizes, taken, strict=True):
                        ids = contexts(size, length, device)
                        times.append(seconds(model, ids, needs) / size)
                alone, *rest = (statistics.median(times[1:]) for times in taken)
                ratios = (f"{one / alone:.2f}x" for one in rest)
                table.add_row(str(length), name, f"{1000 * alone:.1f}", *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
