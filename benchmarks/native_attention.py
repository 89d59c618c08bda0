"""Is native attention faster than torch's on this CPU? One thread: `python -m benchmarks.native_attention`.

Prompts: causal attention of all tokens, by SDPA and by native code, which can sum what every key receives on the way
(`h2o` and others need it); what torch does without native code is timed as well. Questions and decode steps: eight or
64 cells that keep a part of a prefill of 1024 tokens, which native code reads in place, and torch after copying them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch

from kvbench import native
from kvbench.engine.attend import attend
from kvbench.engine.dense import causal_attention, dense_attention
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.observers import column_sums
from kvbench.engine.segments import NewTokens

PROMPTS = ((2, 2, 32, 1018), (3, 3, 64, 854), (3, 3, 64, 8192), (8, 4, 128, 1024))
"""KV heads, query heads of each, channels, tokens: of the reference model, SmolLM2 and Llama 3."""
CELLS = ((2, 2, 32, 8, 38), (3, 3, 64, 8, 38), (3, 3, 64, 64, 1), (8, 4, 128, 8, 38), (8, 4, 128, 64, 1))
"""The same with cells and new tokens in place of tokens."""
PREFILLED, SCALE, REPEATS = 1024, 0.1, 3


def seconds(run: Callable[[], object]) -> float:
    """Return the smallest processor time of a call."""
    run()
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times)


def prompts(dtype: torch.dtype) -> Iterator[tuple[str, list[float]]]:
    """Yield seconds of SDPA, native code, native code with sums, the sums alone, and attention and sums by torch."""
    for heads, group, dim, tokens in PROMPTS:
        query = torch.randn(1, tokens, heads * group, dim).to(dtype).transpose(1, 2)
        key, value = torch.randn(2, 1, heads, tokens, dim).to(dtype)
        positions = torch.arange(tokens)[None]
        attend_and_sum = partial(causal_attention, query, key, value, SCALE, (1,))
        sums_alone = partial(column_sums, query, key, positions, positions, SCALE)
        ways = (
            partial(dense_attention, query, key, value, None, SCALE, is_causal=True),
            partial(native.causal_attention, query, key, value, SCALE),
            partial(native.causal_attention, query, key, value, SCALE, (1,)),
            sums_alone,
            partial(by_torch, attend_and_sum, sums_alone),
        )
        yield f"{heads} × {group} heads of {dim}, {tokens} tokens", [seconds(way) for way in ways]


def by_torch(attend_and_sum: Callable[[], tuple[object, object]], sums_alone: Callable[[], object]) -> None:
    """Attend without native code, and sum what keys receive if that did not."""
    with mock.patch.object(native, "can_attend_causally", return_value=False):
        if not attend_and_sum()[1]:
            sums_alone()


def cells(dtype: torch.dtype) -> Iterator[tuple[str, list[float]]]:
    """Yield seconds of torch on copies, and of native code on the prefill."""
    for heads, group, dim, batch, count in CELLS:
        key, value = torch.randn(2, 1, heads, PREFILLED, dim).to(dtype)
        kept = torch.rand(batch, heads, PREFILLED) < 0.5 * torch.rand(batch, heads, 1)
        layer = RaggedLayer()
        layer.lazy_initialization(key, value)
        layer.share(key, value, kept, count)
        layer.update(*torch.randn(2, batch, heads, count, dim).to(dtype))
        layer.append(NewTokens.everywhere(batch, count, PREFILLED, key.device))
        query = torch.randn(batch, count, heads * group, dim).to(dtype).transpose(1, 2)
        run = partial(attend, query, layer, PREFILLED, SCALE)
        with mock.patch.object(native, "can_attend", return_value=False):
            by_torch = seconds(run)
        yield f"{heads} × {group} heads of {dim}, {batch} cells, {count} new tokens", [by_torch, seconds(run)]


def main() -> None:
    """Print tables of milliseconds."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.inference_mode():
        for dtype in native.DTYPES:
            columns = ("SDPA", "native", "with sums", "sums alone", "by torch")
            print(f"\n| {dtype} | {' | '.join(f'{column}: ms' for column in columns)} |\n| --- |{' --: |' * 5}")
            for name, times in prompts(dtype):
                print(f"| {name} | {' | '.join(f'{1e3 * spent:.2f}' for spent in times)} |")
            print(f"\n| {dtype} | copies and torch: ms | in place: ms |\n| --- |{' --: |' * 2}")
            for name, times in cells(dtype):
                print(f"| {name} | {' | '.join(f'{1e3 * spent:.2f}' for spent in times)} |")


if __name__ == "__main__":
    main()
