"""Blocks through hqq and optimum-quanto hold what these libraries give back, in their bytes."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench
from kvbench import cli
from kvbench.engine import block_quantizers
from kvbench.engine.block_quantizers import QUANTIZERS, check_quantizer
from kvbench.engine.codes import Coded, Coding
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.segments import NewTokens
from kvbench.errors import UserError
from kvbench.runs.cell import versions

from .conftest import batch, build, step

HEADS, DIM = 3, 16
LIBRARIES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not block_quantizers._is_installed(QUANTIZERS[name].module),
            reason=f"{QUANTIZERS[name].package} is not installed: pip install 'kvbench[quantizers]'",
        ),
    )
    for name in ("hqq", "quanto")
]
CASES = [
    pytest.param(*library.values, bits, marks=library.marks)
    for library in LIBRARIES
    for bits in (2, 4, 8)
    if (*library.values, bits) != ("quanto", 8)  # which it does not have
]


def by_hqq(blocks: Tensor, bits: int) -> tuple[Tensor, int]:
    from hqq.core.quantize import Quantizer

    code, meta = Quantizer.quantize(blocks, nbits=bits, group_size=blocks.shape[1], axis=1, device="cpu")
    meta["compute_dtype"] = blocks.dtype
    code, meta = Quantizer.cpu(code, meta)
    return Quantizer.dequantize(code, meta), sum(
        x.numel() * x.element_size() for x in (code, meta["scale"], meta["zero"])
    )


def unpacked(packed: Any) -> Tensor:
    """The codes of a packed tensor of quanto: its first rows are the lowest bits."""
    shifts = range(0, 8, packed._bits)
    return torch.cat([packed._data >> n & (1 << packed._bits) - 1 for n in shifts])[: len(packed)]


def by_quanto(blocks: Tensor, bits: int) -> tuple[Tensor, int]:
    from optimum.quanto import MaxOptimizer, qint2, qint4, quantize_weight
    from optimum.quanto.tensor.packed import PackedTensor

    kind, size = {2: qint2, 4: qint4}[bits], blocks.shape[1]
    scale, shift = MaxOptimizer()(blocks, kind, 0, size)
    packed = quantize_weight(blocks, kind, 0, scale, shift, size)
    held = (packed._data._data, packed._scale, packed._shift)
    with pytest.MonkeyPatch.context() as patch:  # its own would compile an extension
        patch.setattr(PackedTensor, "unpack", unpacked)
        return packed.dequantize(), sum(x.numel() * x.element_size() for x in held)


def expected(name: str, x: Tensor, coding: Coding, keys: bool) -> tuple[Tensor, int]:
    """A head's keys or values `[n, d]` as the library gives them back, and their bytes."""
    out, taken, g = x.clone(), 0, coding.group_size
    coded = coding.coded(len(x))
    for first in range(0, coded, g):
        part = x[first : first + g]
        blocks = part.T if keys else part.reshape(-1, coding.channels(x.shape[1]))
        numbers, size = {"hqq": by_hqq, "quanto": by_quanto}[name](blocks.contiguous(), coding.bits)
        out[first : first + g] = numbers.T if keys else numbers.reshape(part.shape)
        taken += size
    return out, taken + (len(x) - coded) * x.shape[1] * x.element_size()


def drawn(tokens: int, dtype: torch.dtype, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shape = (rows, HEADS, tokens, DIM)
    keep = torch.rand(shape[:3], generator=g) < torch.linspace(0.3, 1, HEADS)[:, None]
    key, value = (torch.randn(shape, generator=g).mul(3).to(dtype) for _ in "kv")
    value[:, :, :, :8] = value[:, :, :1, :8]  # some blocks of equal numbers
    value[:, :, 5:9] = 2.5
    return key, value, keep


def packed(coding: Coding, key: Tensor, value: Tensor, keep: Tensor) -> RaggedLayer:
    layer = RaggedLayer()
    layer.coding, layer.dim, layer.dtype = coding, DIM, key.dtype
    layer.device = torch.device("cpu")
    columns = torch.arange(key.shape[2]).expand(keep.shape)
    layer.pack(key, value, keep, columns, {})
    return layer


def held(layer: RaggedLayer, s: int) -> list[Tensor]:
    rows = slice(layer.start[s], layer.start[s] + layer.length[s])
    assert isinstance(layer.key, Coded)
    assert isinstance(layer.value, Coded)
    return [layer.key.decode()[rows], layer.value.decode()[rows]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "bits"), CASES)
def test_a_head_holds_what_the_library_gives_back(name: str, bits: int, dtype: torch.dtype) -> None:
    coding = Coding(bits, 8, 3, quantizer=name)
    key, value, keep = drawn(45, dtype)
    layer = packed(coding, key, value, keep)
    taken = 0
    for s in range(2 * HEADS):
        row, head = divmod(s, HEADS)
        own = keep[row, head]
        for x, kind, found in zip((key, value), (True, False), held(layer, s), strict=True):
            right, size = expected(name, x[row, head, own], coding, kind)
            assert torch.equal(found, right)
            taken += size
    assert layer.live_bytes() == taken


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_head_does_not_depend_on_what_else_is_cached(name: str) -> None:
    coding = Coding(2, 8, 3, quantizer=name)
    key, value, keep = drawn(61, torch.float32)
    both = packed(coding, key, value, keep)
    alone = packed(coding, key[1:], value[1:], keep[1:])
    grown = packed(coding, key[:, :, :20], value[:, :, :20], keep[:, :, :20])
    for first in range(20, 61):
        now = slice(first, first + 1)
        # All heads of a sequence get the same tokens, so what is kept of one is drawn once.
        grown.pending = (key[:, :, now], value[:, :, now])
        grown.append(NewTokens.everywhere(2, 1, first, key.device))
        coding.age(grown)
    keep[:, :, 20:] = True
    whole = packed(coding, key, value, keep)
    for s in range(HEADS):
        for a, b in zip(held(both, HEADS + s), held(alone, s), strict=True):
            assert torch.equal(a, b)
    for s in range(2 * HEADS):
        for a, b in zip(held(grown, s), held(whole, s), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", LIBRARIES)
@torch.no_grad()
def test_a_model_runs_on_its_caches(name: str) -> None:
    model, (ids, mask) = build("llama"), batch(2, 60, [0, 17])
    spec = f"h2o:buffer=2:bits=4:group_size=4:residual=4:quantizer={name}"
    with kvbench.attach(model, spec, 13, moment="decode") as cache:
        for first in range(0, 60, 20):
            logits = step(model, cache, ids[:, first : first + 20], mask, first)
            assert bool(logits[:, -1].isfinite().all())
            for row, pad in enumerate((0, 17)):
                assert cache.live_entries(row) == 6 * min(first + 20 - pad, 13)


@pytest.mark.parametrize("name", LIBRARIES)
def test_quanto_has_the_steps_of_kivi_and_hqq_moves_zeros(name: str) -> None:
    key, value, keep = drawn(128, torch.float32)
    errors = []
    for quantizer in ("kivi", name):
        layer = packed(Coding(2, 32, 0, quantizer=quantizer), key, value, torch.ones_like(keep))
        errors.append(float((held(layer, 0)[0] - key[0, 0]).abs().mean()))
    ratio = errors[1] / errors[0]
    assert ratio < 0.99 if name == "hqq" else ratio == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["hqq", "quanto"])
def test_a_missing_package_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find(module: str, package: str | None = None) -> Any:
        if module.partition(".")[0] == "optimum":
            raise ModuleNotFoundError(module)
        return None if module == "hqq" else found(module, package)

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", find)
    spec, line = f"full:bits=2:quantizer={name}", r"pip install 'kvbench\[quantizers\]'"
    with pytest.raises(UserError, match=line), kvbench.attach(build("llama"), spec, "full"):
        pass
    assert cli.call(["run", "--policy", spec, "--task", "vt", "--device", "cpu"]) == 2
    assert re.search(line, capsys.readouterr().err)
    check_quantizer(kvbench.policy("full:bits=4"))  # ours needs nothing


def test_a_cell_records_the_library_only_where_it_is_used() -> None:
    plain, other = (versions(kvbench.policy(f"full:bits=4{how}")) for how in ("", ":quantizer=quanto"))
    assert other.keys() - plain.keys() == {"optimum-quanto"}
