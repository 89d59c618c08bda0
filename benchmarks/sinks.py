"""What do attention sinks cost on a CPU, next to the same attention without them?

    python -m benchmarks.sinks [--keys 2048] [--repeats 20] [--markdown]

Times kvbench's own attention, as one layer of gpt-oss calls it: a prefill, a prefill with padding, a question in
one chunk and a decode step on a compressed cache. Plain attention and attention with sinks take turns in one process,
and the ratio is the median over the pairs, in processor time, so a busy machine slows both alike. Exit status 1 if a
ratio is above `LIMIT`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a script, or as a module

from benchmarks.scale import table_lines
from kvbench.engine.attend import attend
from kvbench.engine.dense import dense_attention
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.segments import starts
from kvbench.view.softmax import LogitScale

LIMIT = 1.1
"""Largest ratio of the times with and without sinks."""
QUERY_HEADS, KV_HEADS, HEAD_DIM = 64, 8, 64
"""Attention of gpt-oss."""
QUESTION = 32
"""Tokens of a question."""

Attention = Callable[[float], Tensor]


def compressed_layer(entries: int, new_tokens: int) -> RaggedLayer:
    """Return a packed layer of one sequence whose heads hold about `entries` entries, the last ones new."""
    layer = RaggedLayer()
    layer.batch, layer.heads, layer.dim, layer.packed = 1, KV_HEADS, HEAD_DIM, True
    layer.length = [entries - 7 * head for head in range(KV_HEADS)]
    layer.room = [length + 64 for length in layer.length]
    layer.start = starts(layer.room)
    row_count = sum(layer.room)
    layer.key, layer.value = torch.randn(2, row_count, HEAD_DIM)
    layer.col = torch.zeros(row_count, dtype=torch.int32)
    for start, length in zip(layer.start, layer.length, strict=True):
        columns = torch.arange(length)
        columns[-new_tokens:] = entries + torch.arange(new_tokens)
        layer.col[start : start + length] = columns.int()
    return layer


def attentions(key_count: int) -> Iterator[tuple[str, Attention]]:
    """Yield what is timed: a name, and attention as a function of the scale."""
    query = torch.randn(1, key_count, QUERY_HEADS, HEAD_DIM).transpose(1, 2)
    key, value = torch.randn(2, 1, KV_HEADS, key_count, HEAD_DIM)
    yield "prefill", partial(_dense, query, key, value, None)
    columns = torch.arange(key_count)
    mask = (columns <= columns[:, None]) & (columns >= key_count // 8)
    mask = mask | (columns == columns[:, None])
    yield "prefill with padding", partial(_dense, query, key, value, mask[None, None])
    for name, token_count in (("question", QUESTION), ("decode step", 1)):
        layer = compressed_layer(key_count, token_count)
        yield name, partial(_ragged, query[:, :, -token_count:], layer, key_count)


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return dense_attention(query, key, value, mask, scale, is_causal=mask is None)


def _ragged(query: Tensor, layer: RaggedLayer, first_column: int, scale: float) -> Tensor:
    return attend(query, layer, first_column, scale)[0]


def time_call(run: Callable[[], Tensor]) -> float:
    """Return the processor time of a call in milliseconds; calls are repeated for at least 20 ms."""
    calls, start = 0, time.process_time()
    while (elapsed := time.process_time() - start) < 0.02:
        run()
        calls += 1
    return 1000 * elapsed / calls


@torch.no_grad()
def measure(attention: Attention, repeats: int) -> tuple[float, float, float]:
    """Return the median milliseconds without and with sinks, and the median of their ratio."""
    plain_scale = HEAD_DIM**-0.5
    scale = LogitScale(plain_scale, sinks=torch.randn(QUERY_HEADS))
    if torch.allclose(attention(plain_scale), attention(scale)):
        raise SystemExit("sinks change nothing: they are not computed")
    pairs = [(time_call(lambda: attention(plain_scale)), time_call(lambda: attention(scale))) for _ in range(repeats)]
    plain_ms, sinks_ms = (statistics.median(times) for times in zip(*pairs, strict=True))
    return plain_ms, sinks_ms, statistics.median(sinks / plain for plain, sinks in pairs)


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--keys", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows, ratios = [], []
    for name, attention in attentions(arguments.keys):
        plain_ms, sinks_ms, ratio = measure(attention, arguments.repeats)
        rows.append((name, f"{plain_ms:.2f}", f"{sinks_ms:.2f}", f"{ratio:.2f}"))
        ratios.append(ratio)
    head = ("attention", "plain: ms", "with sinks: ms", "ratio")
    print("\n".join(table_lines(head, rows, arguments.markdown)))
    return int(max(ratios) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
