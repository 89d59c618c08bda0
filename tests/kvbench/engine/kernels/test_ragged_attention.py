"""Attention over ragged segments agrees with a loop in float64, on every way to compute it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.engine import attend as module
from kvbench.engine.attend import attend
from kvbench.engine.kernels.ragged_attention import ref
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.segments import NewTokens, starts
from kvbench.engine.shared import can_share
from kvbench.view.softmax import LogitScale
from tests.kernels import DEVICES, INTERPRETED, default_dtype, scaled
from tests.kvbench.engine.conftest import batch, build
from tests.sweeps import slow

HEADS, SCALE, FIRST = 2, 0.4, 300
kernel_path = pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
KERNEL_DEVICES = [pytest.param(device, marks=kernel_path) if device == "cpu" else device for device in DEVICES]


@dataclass(frozen=True)
class Case:
    """New queries on a packed layer that holds their entries.

    `valid` marks the tokens among them, bool `[B, n]`, padded on the left.
    """

    query: Tensor
    layer: RaggedLayer
    valid: Tensor
    scale: float = SCALE

    def attend(self, *powers: int, device: str = "cpu") -> tuple[Tensor, dict[int, Tensor]]:
        """The engine's attention."""
        layer = replace_tensors(self.layer, device=device)
        valid = None if bool(self.valid.all()) else self.valid.to(device)
        return attend(self.query.to(device), layer, FIRST, self.scale, powers, valid)

    def oracle(self, *powers: int) -> tuple[Tensor, Tensor]:
        """The definition in float64."""
        key, value = (x.double() for x in (self.layer.key, self.layer.value) if x is not None)
        own = (key, value, self.layer.col, *self.layer.bounds())
        return ref.ragged_attention(self.query.double(), *own, FIRST, self.scale, powers, self.valid)


def replace_tensors(layer: RaggedLayer, **to: Any) -> RaggedLayer:
    """The same layer elsewhere, or in another dtype."""
    assert layer.key is not None and layer.value is not None
    out = layer.sequence(0)
    out.batch, out.start, out.length, out.room = layer.batch, layer.start, layer.length, layer.room
    out.key, out.value = layer.key.to(**to), layer.value.to(**to)
    out.col = layer.col.to(to.get("device", "cpu"))
    out.forget_bounds()
    return out


def case(
    held: list[int],
    group: int = 2,
    n: int = 1,
    dim: int = 16,
    waiting: tuple[int, ...] = (),
    free: list[int] | None = None,
) -> Case:
    """A random case; what no segment owns is NaN.

    Args:
        held: Entries of every segment before the new ones, `B * HEADS` of them.
        group: Query heads of a KV head.
        n: New queries; sequence `b` begins with `b % n` of padding.
        dim: Head dimension.
        waiting: Sequences that get no token.
        free: Free rows behind every segment; None: from 5, one more for each.
    """
    torch.manual_seed(sum(held) + 7 * n + group + dim)
    size = len(held) // HEADS
    padding = torch.tensor([n if b in waiting else b % n for b in range(size)])
    valid = torch.arange(n) >= padding[:, None]
    layer = RaggedLayer()
    layer.batch, layer.heads, layer.dim, layer.packed = size, HEADS, dim, True
    layer.length = [a + int(valid[s // HEADS].sum()) for s, a in enumerate(held)]
    free = [*range(5, 5 + len(held))] if free is None else free
    layer.room = [length + rows for length, rows in zip(layer.length, free, strict=True)]
    layer.start = starts(layer.room)
    rows = sum(layer.room)
    layer.key, layer.value = torch.full((2, rows, dim), torch.nan)
    layer.col = torch.full((rows,), -1, dtype=torch.int32)
    for s, (start, old) in enumerate(zip(layer.start, held, strict=True)):
        own = slice(start, start + layer.length[s])
        new = FIRST + valid[s // HEADS].nonzero()[:, 0]
        layer.col[own] = torch.cat([torch.randperm(FIRST)[:old].sort().values, new]).int()
        for x in (layer.key, layer.value):
            x[own] = torch.randn(layer.length[s], dim)
    query = torch.randn(size, n, HEADS * group, dim).transpose(1, 2)  # as models hand it over
    return Case(query, layer, valid)


def check(one: Case, *powers: int, device: str = "cpu", tolerance: float = 1e-5) -> None:
    """Compare what is read afterwards: outputs of tokens, and mass of all entries."""
    out, mass = one.attend(*powers, device=device)
    true, received = one.oracle(*powers)
    assert out.dtype == one.query.dtype
    tokens = one.valid[:, :, None, None].expand(*true.transpose(1, 2).shape)
    assert out.isfinite().all()
    got, want = out.transpose(1, 2).cpu()[tokens], true.transpose(1, 2)[tokens]
    assert scaled(got, want) < tolerance
    assert list(mass) == list(powers)
    for power, want in zip(powers, received, strict=True):
        assert mass[power].dtype == torch.float32
        assert scaled(mass[power], want) < tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("group", "n"), [(1, 1), (2, 1), (4, 1), (7, 1), (1, 2), (4, 5), slow(7, 3)])
@pytest.mark.parametrize("held", [[0, 129], [37, 1, 0, 63, 70, 2]], ids=["B1", "B3"])
def test_output_and_mass_are_those_of_the_loop(held: list[int], group: int, n: int, device: str) -> None:
    check(case(held, group, n), 1, 2, device=device)


def logit_scale(adds: str, group: int) -> LogitScale:
    """Return a scale with the named additions; one head's sink outweighs all entries, another's weighs nothing."""
    sinks = torch.linspace(-40.0, 12.0, HEADS * group) if "sinks" in adds else None
    return LogitScale(SCALE, 1.5 if "cap" in adds else None, torch.zeros(HEADS * group) if adds == "zeros" else sinks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("adds", "held", "group", "n"),
    [
        ("zeros", [0, 129], 1, 1),
        slow("sinks", [37, 1, 0, 65, 131, 2], 2, 3),
        ("sinks", [70, 33], 4, 1),
        slow("cap", [37, 1, 0, 65, 131, 2], 1, 1),
        ("cap", [0, 129], 2, 3),
        slow("cap and sinks", [37, 1, 0, 65, 131, 2], 4, 1),
    ],
)
def test_sinks_and_soft_caps_change_outputs_and_mass(
    adds: str, held: list[int], group: int, n: int, device: str
) -> None:
    one = replace(case(held, group, n, waiting=(1,) if n > 1 else ()), scale=logit_scale(adds, group))
    check(one, 1, 2, device=device)
    out, mass = one.attend(1, device=device)
    plain, received = replace(one, scale=SCALE).oracle(1)
    assert scaled(out, plain) > 1e-2, "the oracle does not notice"
    assert scaled(mass[1], received[0]) > 1e-2, "the oracle does not notice"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adds", ["sinks", "cap and sinks"])
def test_sinks_and_soft_caps_in_sixteen_bits(adds: str, device: str) -> None:
    """A large sink makes all weights small; they are rounded only after the division by their largest."""
    one = replace(case([70, 129], n=3), scale=logit_scale(adds, 2))
    layer = replace_tensors(one.layer, dtype=torch.bfloat16)
    check(replace(one, query=one.query.bfloat16(), layer=layer), 1, device=device, tolerance=8e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [6, 64, 80, 96, 128, 256])
def test_head_dimensions(dim: int, device: str) -> None:
    check(case([70, 33], 2, 3, dim), 1, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_head_dimensions_in_sixteen_bits_with_more_rows_than_a_small_tile(dim: int, device: str) -> None:
    one = case([70, 33], 2, 9, dim)
    layer = replace_tensors(one.layer, dtype=torch.bfloat16)
    check(replace(one, query=one.query.bfloat16(), layer=layer), 1, device=device, tolerance=8e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("held", [0, 62, 63, 64, 127, 128, 191])
def test_lengths_around_the_ends_of_splits(held: int, device: str) -> None:
    check(case([held, 1]), 1, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_question_has_several_tiles_of_queries(device: str) -> None:
    check(case([130, 31, 0, 64], group=3, n=30), 1, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_waiting_rows_add_no_mass_and_empty_segments_put_out_zero(device: str) -> None:
    one = case([9, 70, 0, 0, 3, 130], n=3, waiting=(1, 2))
    assert 0 in one.layer.length
    check(one, 1, 2, device=device)
    out, mass = one.attend(1, device=device)
    assert not out[1].any()
    taken = mass[1].split(one.layer.length)
    for s, part in enumerate(taken):
        expected = float(one.valid[s // HEADS].sum()) if len(part) else 0.0
        assert torch.allclose(part.sum(0), torch.tensor(expected, device=device), atol=1e-5)
    nothing = case([0, 0], waiting=(0,))
    out, mass = nothing.attend(1, device=device)
    assert not out.any()
    assert mass[1].shape == (0, 2)


def sharing(group: int, n: int, dim: int, device: str, dtype: torch.dtype) -> Case:
    """New queries of three sequences that read entries of one prefill; each begins with `b % n` of padding."""
    torch.manual_seed(7 * n + group + dim)
    key, value = torch.randn(2, 1, HEADS, 200, dim).to(device, dtype)
    kept = (
        torch.rand(3, HEADS, 200, device=device)
        < torch.tensor([[0.9, 0.1], [0.0, 1.0], [0.4, 0.5]], device=device)[..., None]
    )
    valid = torch.arange(n) >= torch.arange(3)[:, None] % n
    layer = RaggedLayer()
    layer.lazy_initialization(key, value)
    layer.share(key, value, kept, reserve=n)
    layer.update(*torch.randn(2, 3, HEADS, n, dim).to(device, dtype))
    everywhere = NewTokens.everywhere(3, n, FIRST, layer.device)
    layer.append(everywhere if bool(valid.all()) else NewTokens.where(valid.to(device), FIRST))
    query = torch.randn(3, n, HEADS * group, dim).transpose(1, 2).to(dtype)
    return Case(query, layer, valid)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("group", "n", "dim", "adds"),
    [
        (1, 1, 16, ""),
        (2, 3, 64, ""),
        slow(4, 1, 128, ""),
        slow(7, 5, 6, ""),
        slow(8, 4, 128, ""),
        slow(2, 3, 32, "cap and sinks"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.float16), slow(torch.bfloat16)])
def test_entries_of_a_prefill_are_read_in_place(
    group: int, n: int, dim: int, adds: str, dtype: torch.dtype, device: str
) -> None:
    one = replace(sharing(group, n, dim, device, dtype), scale=logit_scale(adds, group) if adds else SCALE)
    entries = one.layer.shared[0]
    assert entries is not None
    if not can_share(entries.key, entries.value, one.scale):
        pytest.skip("native code computes neither float16 nor caps and sinks; the interpreter copies bfloat16")
    query, valid = one.query.to(device), one.valid.to(device)
    in_place, _ = attend(query, one.layer, FIRST, one.scale, (), valid)
    assert one.layer.is_shared and len(one.layer.col) < 3 * HEADS * 60, "nothing was copied"
    copied = one.layer.with_own_rows()
    own, _ = attend(query, copied, FIRST, one.scale, (), valid)
    tokens = one.valid[:, None, :, None].expand(own.shape)
    assert torch.equal(in_place.cpu()[tokens], own.cpu()[tokens]), "wherever the entries are"
    expected, _ = replace(one, layer=replace_tensors(copied, device="cpu")).oracle()
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert scaled(in_place.cpu()[tokens], expected[tokens]) < tolerance
    entries.addresses[:, 1] = entries.addresses[:, 1].flip(0)
    one.layer.forget_bounds()
    wrong, _ = attend(query, one.layer, FIRST, one.scale, (), valid)
    assert scaled(wrong.cpu()[tokens], expected[tokens]) > 10 * tolerance, "a wrong address is not noticed"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "unit"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_sixteen_bits_are_rounded_once_or_twice(dtype: torch.dtype, unit: float, device: str) -> None:
    one = case([70, 129], n=3)
    layer = replace_tensors(one.layer, dtype=dtype)
    check(replace(one, query=one.query.to(dtype), layer=layer), 1, device=device, tolerance=unit)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "powers"), [(1, (1,)), (3, ())])
def test_a_sequence_does_not_depend_on_the_rest_of_the_batch(n: int, powers: tuple[int, ...], device: str) -> None:
    one = case([20, 64, 150, 7, 127, 3], n=n)
    out, mass = one.attend(*powers, device=device)
    for b in range(3):
        alone = Case(one.query[b : b + 1], one.layer.sequence(b), one.valid[b : b + 1])
        same, received = alone.attend(*powers, device=device)
        assert torch.equal(same[0], out[b])
        for power in powers:
            parts = mass[power].split(one.layer.length)[b * HEADS : (b + 1) * HEADS]
            assert torch.equal(received[power], torch.cat(parts))


@pytest.fixture
def small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut segments in splits of eight entries, and add up four at once."""
    from kvbench.engine.kernels.ragged_attention import triton

    for split in ("SPLIT", "SMALL_SPLIT"):
        monkeypatch.setattr(triton, split, 8)
    monkeypatch.setattr(triton, "PARTS", 4)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_many_splits_are_added_up_in_parts(device: str) -> None:
    one = case([100, 1, 31, 20], group=2)
    check(one, 1, device=device)
    check(replace(one, scale=logit_scale("cap and sinks", 2)), 1, device=device)


@pytest.mark.usefixtures("small_splits")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
def test_partial_outputs_and_mass_are_float32_whatever_the_default_is(device: str) -> None:
    one = case([100, 1, 31, 20], group=2)
    wanted, received = one.attend(1, device=device)
    with default_dtype(torch.bfloat16):
        got, mass = one.attend(1, device=device)
    assert torch.equal(got, wanted)
    assert torch.equal(mass[1], received[1])


@kernel_path
def test_the_kernels_write_their_outputs_and_nothing_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rooms = []

    def guarded(*shape: int, dtype: torch.dtype = torch.float32, **_: Any) -> Tensor:
        count = torch.Size(shape).numel()
        rooms.append(torch.full((count + 200,), torch.nan, dtype=dtype))
        return rooms[-1][100:-100].view(shape)

    one = case([70, 129, 0, 5], group=3, n=5, waiting=(1,))
    monkeypatch.setattr(torch, "empty", guarded)
    one.attend(1)
    assert len(rooms) >= 4  # outputs and sums of splits and of segments, and mass
    for room in rooms:
        assert room[:100].isnan().all()
        assert room[-100:].isnan().all()


@kernel_path
def test_the_kernel_runs_unless_a_gradient_or_another_precision_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []
    own = module._attend_kernel
    monkeypatch.setattr(module, "_attend_kernel", lambda *a: ran.append(1) or own(*a))
    one = case([9, 5])
    one.attend()
    assert ran == [1]
    exact = replace_tensors(one.layer, dtype=torch.float64)
    replace(one, query=one.query.double(), layer=exact).attend(1)
    learning = replace(one, query=one.query.clone().requires_grad_())
    assert learning.attend()[0].requires_grad
    with torch.no_grad():
        assert ran == [1]
        learning.attend()
    assert ran == [1, 1]


@kernel_path
@pytest.mark.parametrize(
    ("policy", "moment"),
    [("snapkv:window=4:allocate=global", "context"), ("h2o:buffer=2", "decode")],
)
@torch.no_grad()
def test_a_whole_response_is_that_of_the_default_path(
    policy: str, moment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    ids, mask = batch(2, 48, [0, 9])

    def answer() -> tuple[list[list[int]], Tensor]:
        with kvbench.attach(model, policy, 16, moment=moment) as cache:
            model(ids[:, :41], attention_mask=mask[:, :41], past_key_values=cache)
            question = torch.nn.functional.pad(mask, (0, 4), value=1)
            logits = model(ids[:, 41:], attention_mask=mask, past_key_values=cache).logits[:, -1:]
            tokens, seen = [], [logits]
            for step in range(4):
                tokens.append(logits.argmax(-1))
                logits = model(tokens[-1], attention_mask=question[:, : 49 + step], past_key_values=cache).logits
                seen.append(logits)
        return torch.cat(tokens, 1).tolist(), torch.cat(seen, 1)

    tokens, logits = answer()
    monkeypatch.setattr(module, "kernel_fits", lambda key, value: False)
    expected, near = answer()
    assert tokens == expected
    assert torch.allclose(logits, near, atol=1e-4)
    assert not torch.equal(logits, near), "both went the same way"
