"""Compare every kernel with its oracle on a GPU, then time it beside what torch offers and the best possible time.

    python benchmarks/kernels.py [--op capacity_loss] [--length 4096 16384] [--json FILE]

A case is timed only after every way to compute it has agreed with its oracle in float64 at length 257 on that GPU,
gradients included: no speed is reported for wrong results. Times are medians of CUDA events, with the second-level
cache flushed before each. `roofline` is the largest of flops, bytes and exponentials over the rates of an H100 SXM
(800 TFLOP/s bfloat16 and 3.35 TB/s; 3.7e12 exp/s): on another GPU give your own with `--flops`, `--bytes` and `--exps`.

Exit status 2 without a GPU, 1 where a kernel disagrees or fails. `benchmarks/gpu.py` runs the same on a CPU, in
Triton's interpreter, where times mean nothing.

An op takes part with a function `(length) -> Iterator[Case]` in `OPS`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # started as a script, or as a module

from benchmarks.memory import allocated
from kvbench.engine.attend import attend
from kvbench.engine.kernels import launch
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.segments import NewTokens
from kvbench.errors import first_lines, out_of_memory
from kvbench.parts import entry_key

AGREE_AT = 257
"""Length at which ways are compared with oracles. Up to it, cases have few heads."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RATES = (800e12, 3.35e12, 3.7e12)
"""bfloat16 flops, bytes and exponentials a second of an H100 SXM."""
LONGEST = 2000.0
"""Milliseconds after which a measurement is not repeated more often."""
MOST_BIAS = 4 << 30
"""Largest bias of `scaled_dot_product_attention` that is tried, in bytes."""
Run = Callable[..., Tensor]


def no_kernels() -> str:
    """Return why no Triton kernel runs on a GPU here; "" if they do."""
    if DEVICE.type != "cuda":
        return "no GPU is seen here"
    is_torch = launch.implementation(DEVICE) == "torch"
    return "none runs on this one; see docs/install.md#triton-kernels-on-a-gpu" if is_torch else ""


@contextmanager
def without_triton() -> Iterator[None]:
    """Let all ops run their torch code within the block."""
    with mock.patch.object(launch, "_uses_triton", return_value=False):
        yield


@dataclass(frozen=True)
class Way:
    """One way to compute a case.

    Attributes:
        name: `kernel`, or what of torch computes it.
        run: Computes it.
        by_kernel: Whether Triton may run it.
    """

    name: str
    run: Run
    by_kernel: bool = False

    def running(self) -> AbstractContextManager[None]:
        """Return the context in which forward and backward are called."""
        return nullcontext() if self.by_kernel else without_triton()


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
        on_torch: What the op computes it with where Triton is missing.
        has_kernel: Whether the op runs a kernel of Triton at this size.
        others: Further ways of torch, by their names.
    """

    name: str
    inputs: tuple[Tensor, ...]
    run: Run
    oracle: Run
    forward: tuple[float, float, float]
    backward: tuple[float, float, float] | None = None
    tolerance: float = 1e-4
    on_torch: str = "blocks in torch"
    has_kernel: bool = True
    others: Mapping[str, Run] = field(default_factory=dict)

    def ways(self) -> list[Way]:
        """Return the ways to compute it, the kernel first."""
        kernel = [Way("kernel", self.run, by_kernel=True)] if self.has_kernel else []
        return [*kernel, Way(self.on_torch, self.run), *(Way(name, run) for name, run in self.others.items())]


def capacity_loss(length: int) -> Iterator[Case]:
    """A model of 36 layers and 8 KV heads."""
    from kvbench_policies.kernels.capacity_loss import factored, op, ref

    layers, heads = (36, 8) if length > AGREE_AT else (2, 2)
    rows, budget = layers * heads, max(1, length // 16)
    log_beta = -torch.empty(1, layers, heads, length).uniform_(-12, 0).exp()
    is_factored = length >= op.EXACT
    pairs, bits = rows * length**2 / 2, length.bit_length()
    forward = (3 * pairs, 8.0 * rows * length, pairs)
    if is_factored:  # exponentials within blocks; decays brought to the steps
        decays = factored.panels(length, torch.device("cpu"))[1].numel()
        exponentials = (factored.BLOCK / 2 + factored.NODES) * rows * length
        forward = (2.0 * decays * rows * length, 8.0 * rows * length, exponentials)
    for scope in ("head", "global"):
        yield Case(
            f"capacity_loss {scope} T={length}",
            (log_beta.to(DEVICE),),
            lambda x, scope=scope: op.capacity_loss(x, budget, scope=scope),
            lambda x, scope=scope: ref.capacity_loss(x, budget, scope=scope),
            forward,
            # one run of active steps: an exponential and six flops a doubling
            (6.0 * bits * rows * length, 12.0 * rows * length, (bits + 1.0) * rows * length),
        )
    if length <= AGREE_AT:  # what long sequences take
        start = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        yield Case(
            "capacity_loss factored sums",
            (log_beta.flatten(1, 2).to(DEVICE),),
            lambda x: factored.sums(x, start, False),
            ref.sums,
            forward,
            tolerance=1e-5,
            has_kernel=False,
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
    bias_bytes = heads * group * length**2 * q.element_size()
    for gating, exps in (("additive", 1), ("multiplicative", 2)):
        others: dict[str, Run] = {}
        if gating == "additive" and bias_bytes <= MOST_BIAS:
            others["SDPA with a bias"] = _attend_with_bias
        yield Case(
            f"retention_attention {gating} T={length}",
            (q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), log_beta.to(DEVICE)),
            lambda *x, gating=gating: op.retention_attention(*x, scale=dim**-0.5, gating=gating),
            lambda *x, gating=gating: ref.retention_attention(*x, scale=dim**-0.5, gating=gating),
            (4 * pairs * dim, moved, exps * pairs),
            (10 * pairs * dim, 2 * moved, 2 * exps * pairs),
            tolerance=2e-2,
            others=others,
        )


def _attend_with_bias(q: Tensor, k: Tensor, v: Tensor, log_beta: Tensor) -> Tensor:
    """Compute additive retention attention by SDPA, with the decays in a `[B, H_q, T, T]` bias."""
    steps = torch.arange(q.shape[2], device=q.device)
    ages = (steps[:, None] - steps).clamp(min=0)
    bias = (ages * log_beta[:, :, None]).masked_fill(steps > steps[:, None], -torch.inf).to(q.dtype)
    bias = bias.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=q.shape[-1] ** -0.5, enable_gqa=True)


def value_norm(length: int) -> Iterator[Case]:
    """A layer of 32 query heads on 8 KV heads of 128 and a hidden size of 4096, in bfloat16."""
    from kvbench_policies.kernels.value_norm import op, ref

    heads, group, dim, hidden = (8, 4, 128, 4096) if length > AGREE_AT else (2, 4, 128, 300)
    every = heads * group
    value = torch.randn(1, length, heads, dim).bfloat16().to(DEVICE).transpose(1, 2)
    linear = torch.randn(hidden, every * dim).bfloat16().to(DEVICE)
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
    key = entry_key(score, torch.zeros_like(valid), position, valid).to(DEVICE)

    def oracle(*_: Tensor) -> Tensor:
        return ref.global_select(score, position, valid, count).to(DEVICE)

    def by_topk(key: Tensor, _: Tensor) -> Tensor:
        flat_key = key.flatten(1)
        kept = flat_key.topk(entries // 5, sorted=False).indices  # the number is known on the CPU
        return torch.zeros_like(flat_key, dtype=torch.bool).scatter_(1, kept, True).view(key.shape)

    yield Case(
        f"global_select T={length}",
        (key, count.to(DEVICE)),
        op.select_largest,
        oracle,
        # 64-bit keys read once would do; the radix select reads them eight times
        (0, 9.0 * entries, 0),
        on_torch="torch.sort",
        others={"torch.topk": by_topk},
    )


def ragged_attention(length: int) -> Iterator[Case]:
    """A layer of 16 sequences, 8 KV heads of 128 and 32 query heads in bfloat16, packed.

    Segments have half to one and a half times the mean length. A decode step, with and without accumulated attention
    and on entries of a prefill that the sequences share, and a question of 32 tokens.
    """
    from kvbench.engine.kernels.ragged_attention import ref

    works: list[tuple[str, int, tuple[int, ...]]] = [
        ("decode", 1, ()),
        ("decode and mass", 1, (1,)),
        ("decode, shared", 1, ()),
        ("question", 32, ()),
    ]
    for what, query_count, powers in works:
        layer, query = _segments(length, query_count, shares="shared" in what)
        own = layer.with_own_rows()
        first, entries = 2 * length, sum(own.length)
        assert own.key is not None and own.value is not None
        bounds, columns = [x.cpu() for x in own.bounds()], own.col.cpu()

        def run(
            query: Tensor,
            *_: Tensor,
            layer: RaggedLayer = layer,
            first: int = first,
            powers: tuple[int, ...] = powers,
        ) -> Tensor:
            output, attention_sums = attend(query, layer, first, 128**-0.5, powers)
            return attention_sums[powers[0]] if powers else output

        def oracle(
            *exact: Tensor,
            columns: Tensor = columns,
            bounds: list[Tensor] = bounds,
            first: int = first,
            powers: tuple[int, ...] = powers,
        ) -> Tensor:
            on_cpu = (*(x.cpu() for x in exact), columns, *bounds)
            output, sums = ref.ragged_attention(*on_cpu, first, 128**-0.5, powers)
            return (sums[0] if powers else output).to(DEVICE)

        has_varlen = DEVICE.type == "cuda" and find_spec("torch.nn.attention.varlen") is not None
        others = {"varlen_attn": by_varlen(own, query_count)} if has_varlen and not powers else {}
        yield Case(
            f"ragged_attention {what} T={length}",
            (query, own.key, own.value),
            run,
            oracle,
            (
                4.0 * 4 * entries * query_count * 128,
                4.0 * entries * (128 + 4 * len(powers)),
                4.0 * entries * query_count,
            ),
            tolerance=2e-2,
            on_torch="SDPA on padded copies",
            others=others,
        )


def _segments(length: int, query_count: int, *, shares: bool) -> tuple[RaggedLayer, Tensor]:
    """Return a packed layer whose segments end with the new tokens, and their queries.

    Args:
        shares: Whether the other entries stay in a prefill of twice the length.
    """
    batch, heads = (16, 8) if length > AGREE_AT else (2, 2)
    order = torch.randperm(batch * heads)
    counts = (length * torch.linspace(0.5, 1.5, batch * heads)[order]).int().view(batch, heads, 1)
    columns = torch.rand(batch, heads, 2 * length).argsort(-1).argsort(-1)
    key, value = (torch.randn(1 if shares else batch, heads, 2 * length, 128).bfloat16().to(DEVICE) for _ in range(2))
    kept = (columns < counts).to(DEVICE)
    layer = RaggedLayer()
    layer.lazy_initialization(key, value)
    if shares:
        layer.share(key, value, kept, reserve=64)
    else:
        layer.pack(key, value, kept, torch.arange(2 * length, device=DEVICE).expand(batch, heads, -1), {}, reserve=64)
    layer.update(*(torch.randn(batch, heads, query_count, 128).bfloat16().to(DEVICE) for _ in range(2)))
    layer.append(NewTokens.everywhere(batch, query_count, 2 * length, layer.device))
    query = torch.randn(batch, query_count, heads * 4, 128).bfloat16().to(DEVICE).transpose(1, 2)
    return layer, query


def by_varlen(layer: RaggedLayer, query_count: int) -> Run:
    """Return the same attention by torch's `varlen_attn`, a segment a sequence."""
    from torch.nn.attention.varlen import varlen_attn

    start, length = (x.flatten().int() for x in layer.bounds())
    rows = torch.cat([start, start.new_tensor([sum(layer.room)])])
    new_rows = torch.arange(len(layer.length) + 1, dtype=torch.int32, device=DEVICE) * query_count
    longest, shape = max(layer.length), (layer.batch, layer.heads, query_count, 4, 128)

    is_causal = query_count > 1  # the new tokens end a segment
    takes_lengths = "seqused_k" in inspect.signature(varlen_attn).parameters

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        by_segment = query.unflatten(1, (layer.heads, 4)).transpose(2, 3).reshape(-1, 4, 128)
        inputs = (by_segment, key[:, None], value[:, None], new_rows, rows, query_count, longest)
        right = 0 if is_causal else -1
        if takes_lengths:
            window = (-1, right)
            output = varlen_attn(*inputs, scale=128**-0.5, window_size=window, enable_gqa=True, seqused_k=length)
        else:  # in torch 2.11, only the function that it calls does
            options = {"scale": 128**-0.5, "window_size_left": -1, "window_size_right": right, "seqused_k": length}
            output = torch.ops.aten._flash_attention_forward(*inputs, 0.0, is_causal, False, **options)[0]
        assert isinstance(output, Tensor)
        return output.view(shape).transpose(2, 3).flatten(1, 2)

    return run


OPS: dict[str, Callable[[int], Iterator[Case]]] = {
    "capacity_loss": capacity_loss,
    "retention_attention": retention_attention,
    "value_norm": value_norm,
    "global_select": global_select,
    "ragged_attention": ragged_attention,
}


def disagreement(case: Case, way: Way) -> str:
    """Return what is wrong with a way to compute a case, or "": outputs and gradients against float64, or its error."""
    try:
        return _difference(case, way)
    except Exception as error:  # such as a kernel that does not compile for this GPU
        return _in_short(error)


def _in_short(error: Exception) -> str:
    return shorten(first_lines(error), 200, placeholder=" ...")


def _difference(case: Case, way: Way) -> str:
    has_gradients = case.backward is not None
    inputs = [x.detach().clone().requires_grad_(has_gradients and x.is_floating_point()) for x in case.inputs]
    exact = [x.double().requires_grad_(has_gradients) if x.is_floating_point() else x for x in case.inputs]
    with way.running():
        output = way.run(*inputs)
    true_output = case.oracle(*exact)
    compared = [("output", output.detach(), true_output.detach())]
    if has_gradients:
        slope = torch.randn_like(true_output)
        places = [place for place, x in enumerate(inputs) if x.requires_grad]
        with way.running():
            gradients = torch.autograd.grad(output, [inputs[place] for place in places], slope.to(output.dtype))
        rounded_slope = slope.to(output.dtype).double()
        true_gradients = torch.autograd.grad(true_output, [exact[place] for place in places], rounded_slope)
        compared += [
            (f"gradient {place}", gradient, true_gradient)
            for place, gradient, true_gradient in zip(places, gradients, true_gradients, strict=True)
        ]
    for what, computed, true in compared:
        largest = true.double().abs().max().clamp_min(1e-30)
        error = float((computed.double() - true.double()).abs().max() / largest)
        if not error <= case.tolerance:  # NaN is not
            return f"{what} is off by {error:.1e}"
    return ""


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call in milliseconds, cold in the second-level cache of a GPU."""
    times: list[float] = []
    if DEVICE.type == "cpu":
        for _ in range(repeats):
            started = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times)
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device=DEVICE)
    for _ in range(3):
        run()
    while len(times) < 3 or (len(times) < repeats and sum(times) < LONGEST):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def timed(
    case: Case, rates: tuple[float, float, float], repeats: int, wrong: Collection[str] = ()
) -> Iterator[dict[str, object]]:
    """Yield rows for forward and backward of every way: time, peak memory, the best possible time and its share.

    A row of a way that fails, such as for want of memory, has the reason in `error`. Ways in `wrong` are left out.
    """
    for way in case.ways():
        if way.name in wrong:
            continue
        works = {"forward": case.forward} | ({} if case.backward is None else {"backward": case.backward})
        try:
            with way.running():
                measured = _measure(case, way, repeats)
        except Exception as error:
            torch.cuda.empty_cache()
            reason = "out of memory" if out_of_memory(error) else _in_short(error)
            yield from ({"case": case.name, "part": part, "way": way.name, "error": reason} for part in works)
            continue
        for part, (ms, peak_bytes) in measured.items():
            best = max(work / rate for work, rate in zip(works[part], rates, strict=True)) * 1e3
            yield {
                "case": case.name,
                "part": part,
                "way": way.name,
                "ms": round(ms, 4),
                "peak_bytes": peak_bytes,
                "roofline_ms": float(f"{best:.4g}"),
                "share": round(best / ms, 3),
                "error": "",
            }


def _measure(case: Case, way: Way, repeats: int) -> dict[str, tuple[float, int | None]]:
    """Return time and peak memory (of a GPU only) of forward and backward."""
    inputs = [x.detach().requires_grad_(case.backward is not None and x.is_floating_point()) for x in case.inputs]

    def forward() -> None:
        way.run(*inputs)

    with torch.no_grad():
        measured = {"forward": (median_ms(forward, repeats), _peak(forward))}
    if case.backward is not None:
        output = way.run(*inputs)
        slope = torch.randn_like(output)
        wanted = [x for x in inputs if x.requires_grad]

        def backward() -> None:
            torch.autograd.grad(output, wanted, slope, retain_graph=True)

        measured["backward"] = median_ms(backward, repeats), _peak(backward)
    return measured


def _peak(run: Callable[[], None]) -> int | None:
    return allocated(run, DEVICE) if DEVICE.type == "cuda" else None


def main() -> int:
    """Check, time, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--op", nargs="+", choices=sorted(OPS), default=sorted(OPS))
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--flops", type=float, default=RATES[0], help="bfloat16 flops a second")
    parser.add_argument("--bytes", type=float, default=RATES[1], help="bytes a second")
    parser.add_argument("--exps", type=float, default=RATES[2], help="exponentials a second")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args()
    if reason := no_kernels():
        print(f"benchmarks/kernels.py measures Triton kernels on a GPU, and {reason}")
        return 2
    torch.manual_seed(0)
    rates, rows, has_failed = (options.flops, options.bytes, options.exps), list[dict[str, object]](), False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for op in options.op:
        wrong: set[str] = set()
        for case in OPS[op](AGREE_AT):
            for way in case.ways():
                complaint = disagreement(case, way)
                print(f"{case.name:44s} {way.name:22s} {complaint or 'agrees with its oracle'}")
                wrong |= {way.name} if complaint else set()
        if "kernel" in wrong:
            has_failed = True
            continue
        for length in options.length:
            for case in OPS[op](length):
                for row in timed(case, rates, options.repeats, wrong):
                    print(printed(row))
                    rows.append(row)
                    has_failed |= row["way"] == "kernel" and bool(row["error"])
    if options.json:
        device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.json.write_text(json.dumps([{**device, **row} for row in rows], indent=1))
    return 1 if has_failed else 0


def printed(row: Mapping[str, object]) -> str:
    """Return a row of `timed` as a line."""
    line = "{case:44s} {part:9s} {way:22s} ".format(**row)
    if row["error"]:
        return f"{line} {row['error']}"
    return line + "{ms:10.3f} ms  at best {roofline_ms:10.3f} ms  {share:6.1%}".format(**row)


if __name__ == "__main__":
    sys.exit(main())
