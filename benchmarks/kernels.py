"""Time every kernel on a GPU, next to its oracle and to the best that the GPU could do.

    python benchmarks/kernels.py [--op capacity_loss] [--length 4096 16384] [--json FILE]

A case is timed only after it has agreed with its oracle in float64 at length 257 on that GPU,
gradients included: no speed is reported for wrong results. Times are medians of CUDA events,
with the second-level cache flushed before each. `roofline` is the largest of flops, bytes and
exponentials over the rates of an H100 SXM (800 TFLOP/s bfloat16 and 3.35 TB/s; 3.7e12 exp/s): on
another GPU give your own with `--flops`, `--bytes` and `--exps`.

Exit status 2 without a GPU, 1 where a kernel disagrees.

An op takes part with a function `(length) -> Iterator[Case]` in `OPS`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.parts import entry_key

if TYPE_CHECKING:
    from kvbench.engine.layer import RaggedLayer

AGREE_AT = 257
Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """One op at one size.

    Attributes:
        name: What the table calls it.
        inputs: Tensors; those of a float type take gradients where `backward` is given.
        run: The op as a user calls it.
        oracle: Its definition, for float64 inputs.
        forward: Flops, bytes moved and exponentials of the forward.
        backward: The same of the backward, or None for an op that has none.
        tolerance: Largest error allowed, relative to the largest element.
    """

    name: str
    inputs: tuple[Tensor, ...]
    run: Run
    oracle: Run
    forward: tuple[float, float, float]
    backward: tuple[float, float, float] | None = None
    tolerance: float = 1e-4


def capacity_loss(length: int) -> Iterator[Case]:
    """A model of 36 layers and 8 KV heads."""
    from kvbench_policies.kernels.capacity_loss import factored, op, ref

    layers, heads = (36, 8) if length > AGREE_AT else (2, 2)
    rows, budget = layers * heads, max(1, length // 16)
    log_beta = -torch.empty(1, layers, heads, length).uniform_(-12, 0).exp()
    pairs, bits = rows * length**2 / 2, length.bit_length()
    forward = (3 * pairs, 8.0 * rows * length, pairs)
    if length >= op.EXACT:  # exponentials within blocks; decays brought to the steps
        decays = factored.panels(length, torch.device("cpu"))[1].numel()
        made = (factored.BLOCK / 2 + factored.NODES) * rows * length
        forward = (2.0 * decays * rows * length, 8.0 * rows * length, made)
    for scope in ("head", "global"):
        yield Case(
            f"capacity_loss {scope} T={length}",
            (log_beta.cuda(),),
            lambda x, scope=scope: op.capacity_loss(x, budget, scope=scope),
            lambda x, scope=scope: ref.capacity_loss(x, budget, scope=scope),
            forward,
            # one run of active steps: an exponential and six flops a doubling
            (6.0 * bits * rows * length, 12.0 * rows * length, (bits + 1.0) * rows * length),
        )
    if length == AGREE_AT:  # what long sequences take
        start = torch.zeros(1, dtype=torch.int32, device="cuda")
        yield Case(
            "capacity_loss factored sums",
            (log_beta.flatten(1, 2).cuda(),),
            lambda x: factored.sums(x, start, False),
            ref.sums,
            forward,
            tolerance=1e-5,
        )


def retention_attention(length: int) -> Iterator[Case]:
    """A layer of 32 query heads on 8 KV heads of 128, in bfloat16."""
    from kvbench_policies.kernels.retention_attention import op, ref

    heads, group, dim = (8, 4, 128) if length > AGREE_AT else (2, 4, 128)
    q = torch.randn(1, heads * group, length, dim).bfloat16()
    k, v = (torch.randn(1, heads, length, dim).bfloat16() for _ in range(2))
    log_beta = -torch.empty(1, heads, length).uniform_(-12, 0).exp()
    pairs = heads * group * length**2 / 2
    moved = 2.0 * length * dim * (2 * heads * group + 2 * heads)
    for gating, exps in (("additive", 1), ("multiplicative", 2)):
        yield Case(
            f"retention_attention {gating} T={length}",
            (q.cuda(), k.cuda(), v.cuda(), log_beta.cuda()),
            lambda *x, gating=gating: op.retention_attention(*x, scale=dim**-0.5, gating=gating),
            lambda *x, gating=gating: ref.retention_attention(*x, scale=dim**-0.5, gating=gating),
            (4 * pairs * dim, moved, exps * pairs),
            (10 * pairs * dim, 2 * moved, 2 * exps * pairs),
            tolerance=2e-2,
        )


def value_norm(length: int) -> Iterator[Case]:
    """A layer of 32 query heads on 8 KV heads of 128 and a hidden size of 4096, in bfloat16."""
    from kvbench_policies.kernels.value_norm import op, ref

    heads, group, dim, hidden = (8, 4, 128, 4096) if length > AGREE_AT else (2, 4, 128, 300)
    every = heads * group
    value = torch.randn(1, length, heads, dim).bfloat16().cuda().transpose(1, 2)
    linear = torch.randn(hidden, every * dim).bfloat16().cuda()
    weight = linear.view(hidden, every, dim).permute(1, 2, 0)
    moved = 2.0 * (value.numel() + weight.numel()) + 4.0 * heads * length
    for norm in ("l1", "l2"):
        yield Case(
            f"value_norm {norm} T={length}",
            (value, weight),
            lambda v, w, norm=norm: op.value_norm(v, w, norm),
            lambda v, w, norm=norm: ref.value_norm(v, w, norm),
            (2.0 * every * length * dim * hidden, moved, 0),
        )


def global_select(length: int) -> Iterator[Case]:
    """A fifth of the entries of 36 layers of 8 KV heads, a tenth of them tied; and their rows."""
    from kvbench_policies.kernels.global_select import op, ref

    heads = 36 * 8 if length > AGREE_AT else 4
    score = torch.randn(1, heads, length)
    score[..., ::10] = 0.5
    position = torch.arange(length).expand(score.shape)
    valid = torch.ones_like(score, dtype=torch.bool)
    entries = heads * length
    count = torch.tensor([entries // 5])
    key = entry_key(score, torch.zeros_like(valid), position, valid).cuda()

    def oracle(*_: Tensor) -> Tensor:
        return ref.global_select(score, position, valid, count).cuda()

    yield Case(
        f"global_select T={length}",
        (key, count.cuda()),
        op.select_largest,
        oracle,
        # 64-bit keys read once would do; the radix select reads them eight times
        (0, 9.0 * entries, 0),
    )


@dataclass(frozen=True)
class Segments:
    """A layer of 8 KV heads of 128, packed, with half to one and a half times the mean length."""

    layer: RaggedLayer
    query: Tensor
    first: int

    @classmethod
    def of(cls, length: int, n: int) -> Segments:
        """16 sequences with `n` new tokens each, in bfloat16."""
        from kvbench.engine.layer import RaggedLayer
        from kvbench.engine.segments import starts

        batch, heads = (16, 8) if length > AGREE_AT else (2, 2)
        layer = RaggedLayer()
        layer.batch, layer.heads, layer.dim, layer.packed = batch, heads, 128, True
        order = torch.randperm(batch * heads)
        spread = torch.linspace(0.5, 1.5, batch * heads)[order]
        layer.length = (length * spread).int().add(n).tolist()
        layer.room = [x + 64 for x in layer.length]
        layer.start = starts(layer.room)
        rows = sum(layer.room)
        layer.key, layer.value = (torch.randn(rows, 128).bfloat16().cuda() for _ in range(2))
        first = 2 * length
        col = torch.zeros(rows, dtype=torch.int32)
        for start, x in zip(layer.start, layer.length, strict=True):
            col[start + x - n : start + x] = torch.arange(first, first + n)
        layer.col = col.cuda()
        query = torch.randn(batch, n, heads * 4, 128).bfloat16().cuda().transpose(1, 2)
        return cls(layer, query, first)

    def case(self, name: str, run: Run, powers: tuple[int, ...] = ()) -> Case:
        """A case whose result is the output, or the mass if there are powers."""
        from kvbench.engine.kernels.ragged_attention import ref

        layer, entries = self.layer, sum(self.layer.length)
        assert layer.key is not None and layer.value is not None
        pairs = 4 * entries * self.query.shape[2]
        bounds = [x.cpu() for x in layer.bounds()]

        def oracle(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            on_cpu = (query.cpu(), key.cpu(), value.cpu(), layer.col.cpu(), *bounds)
            found = ref.ragged_attention(*on_cpu, self.first, 128**-0.5, powers)
            return found[1 if powers else 0].cuda()

        return Case(
            name,
            (self.query, layer.key, layer.value),
            run,
            oracle,
            (4.0 * pairs * 128, 4.0 * entries * (128 + 4 * len(powers)), pairs),
            tolerance=2e-2,
        )

    def bounds(self) -> tuple[Tensor, Tensor]:
        """First row and length of every segment, int32, as `varlen_attn` wants them."""
        start, length = (x.flatten().int() for x in self.layer.bounds())
        return torch.cat([start, start.new_tensor([sum(self.layer.room)])]), length


def ragged_attention(length: int) -> Iterator[Case]:
    """A decode step, with and without the mass of entries, and a question of 32 tokens."""
    from kvbench.engine.kernels.ragged_attention import triton as kernels

    for what, n, powers in (("decode", 1, ()), ("decode and mass", 1, (1,)), ("question", 32, ())):
        held = Segments.of(length, n)

        def run(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            held: Segments = held,
            powers: tuple[int, ...] = powers,
        ) -> Tensor:
            own = (held.layer.col, *held.layer.bounds(), held.layer.length, held.first)
            found = kernels.ragged_attention(query, key, value, *own, 128**-0.5, powers)
            return found[1 if powers else 0]

        yield held.case(f"ragged_attention {what} T={length}", run, powers)


def ragged_baselines(length: int) -> Iterator[Case]:
    """A decode step without the kernel: in a padded rectangle, and by torch's `varlen_attn`."""
    from kvbench.engine.attend import _attend_padded

    held = Segments.of(length, 1)

    def rectangle(query: Tensor, *_: Tensor) -> Tensor:
        return _attend_padded(query, held.layer, held.first, 128**-0.5, (), None)[0]

    yield held.case(f"padded rectangle T={length}", rectangle)
    if find_spec("torch.nn.attention.varlen") is None:
        return
    from torch.nn.attention.varlen import varlen_attn

    (rows, lengths), batch = held.bounds(), held.layer.batch
    each = torch.arange(len(held.layer.length) + 1, dtype=torch.int32).cuda()
    longest = max(held.layer.length)

    def varlen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        apart = query.reshape(-1, 4, 128)  # a segment is a sequence of one query and one KV head
        found = varlen_attn(
            apart,
            key[:, None],
            value[:, None],
            each,
            rows,
            1,
            longest,
            scale=128**-0.5,
            enable_gqa=True,
            seqused_k=lengths,
        )
        assert isinstance(found, Tensor)
        return found.view(batch, -1, 1, 128)

    yield held.case(f"varlen_attn T={length}", varlen)


OPS: dict[str, Callable[[int], Iterator[Case]]] = {
    "capacity_loss": capacity_loss,
    "retention_attention": retention_attention,
    "value_norm": value_norm,
    "global_select": global_select,
    "ragged_attention": ragged_attention,
    "ragged_baselines": ragged_baselines,
}


def disagreement(case: Case) -> str:
    """What is wrong with a case, or nothing: outputs and gradients against float64."""
    grads = case.backward is not None
    mine = [x.detach().clone().requires_grad_(grads and x.is_floating_point()) for x in case.inputs]
    exact = [x.double().requires_grad_(grads) if x.is_floating_point() else x for x in case.inputs]
    got, true = case.run(*mine), case.oracle(*exact)
    pairs = [("output", got.detach(), true.detach())]
    if grads:
        slope = torch.randn_like(true)
        places = [i for i, x in enumerate(mine) if x.requires_grad]
        gots = torch.autograd.grad(got, [mine[i] for i in places], slope.to(got.dtype))
        trues = torch.autograd.grad(true, [exact[i] for i in places], slope.to(got.dtype).double())
        pairs += [(f"gradient {i}", g, t) for i, g, t in zip(places, gots, trues, strict=True)]
    for what, g, t in pairs:
        g, t = g.double(), t.double()
        error = float((g - t).abs().max() / t.abs().max().clamp_min(1e-30))
        if not error <= case.tolerance:  # NaN is not
            return f"{what} is off by {error:.1e}"
    return ""


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median time of a call in milliseconds, cold in the second-level cache."""
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def timed(case: Case, rates: tuple[float, float, float], repeats: int) -> Iterator[dict[str, object]]:
    """Rows for forward and backward: time, the best possible, and their ratio."""
    inputs = [x.detach().requires_grad_(case.backward is not None and x.is_floating_point()) for x in case.inputs]
    with torch.no_grad():
        parts = [("forward", median_ms(lambda: case.run(*inputs), repeats), case.forward)]
    if case.backward is not None:
        out = case.run(*inputs)
        slope = torch.randn_like(out)
        wanted = [x for x in inputs if x.requires_grad]
        ms = median_ms(lambda: torch.autograd.grad(out, wanted, slope, retain_graph=True), repeats)
        parts.append(("backward", ms, case.backward))
    for part, ms, work in parts:
        best = max(w / rate for w, rate in zip(work, rates, strict=True)) * 1e3
        yield {
            "case": case.name,
            "part": part,
            "ms": round(ms, 4),
            "roofline_ms": round(best, 4),
            "share": round(best / ms, 3),
        }


def main() -> int:
    """Check, time, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--op", nargs="+", choices=sorted(OPS), default=sorted(OPS))
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--flops", type=float, default=800e12, help="bfloat16 flops a second")
    parser.add_argument("--bytes", type=float, default=3.35e12, help="bytes a second")
    parser.add_argument("--exps", type=float, default=3.7e12, help="exponentials a second")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/kernels.py measures speed and needs a GPU: none is seen here")
        return 2
    torch.manual_seed(0)
    rates, rows, wrong = (asked.flops, asked.bytes, asked.exps), [], False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for op in asked.op:
        complaints = {c.name: disagreement(c) for c in OPS[op](AGREE_AT)}
        for name, complaint in complaints.items():
            print(f"{name:44s} {complaint or 'agrees with its oracle'}")
        if any(complaints.values()):
            wrong = True
            continue
        for length in asked.length:
            for case in OPS[op](length):
                for row in timed(case, rates, asked.repeats):
                    print(
                        "{case:44s} {part:9s} {ms:10.3f} ms  at best {roofline_ms:10.3f} ms  {share:6.1%}".format(**row)
                    )
                    rows.append(row)
    if asked.json:
        device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        asked.json.write_text(json.dumps([{**device, **r} for r in rows], indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
