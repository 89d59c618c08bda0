"""Retention-gated attention agrees with its equation, its gradients with autograd of that."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.view.softmax import LogitScale
from kvbench_policies.kernels.gated import exp_
from kvbench_policies.kernels.retention_attention import op, ref
from kvbench_policies.kernels.retention_attention.op import retention_attention
from tests.kernels import DEVICES, INTERPRETED, padding, rates, scaled, torch_path
from tests.sweeps import slow

GATINGS = ["additive", "multiplicative"]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def drawn(batch: int, heads: int, group: int, length: int, dim: int) -> Inputs:
    q = torch.randn(batch, heads * group, length, dim)
    k, v = torch.randn(batch, heads, length, dim), torch.randn(batch, heads, length, dim)
    return q, k, v, rates(batch, heads, length)


def check(
    inputs: Inputs,
    gating: str,
    valid: Tensor | None = None,
    device: str = "cpu",
    tolerance: float = 3e-6,
    scale: float | None = None,
) -> Tensor:
    """Compare outputs and all four gradients, ours (NaN on padding) and the oracle's in float64; return the output."""
    scale = scale or inputs[0].shape[-1] ** -0.5
    mine = [x.to(device, copy=True) for x in inputs]
    grad = torch.randn(*inputs[0].shape[:3], inputs[2].shape[-1]).to(inputs[0].dtype)
    if valid is not None:
        masks = [valid[:, None, :, None]] * 3 + [valid[:, None]]
        mine = [x.masked_fill(~m.to(device), torch.nan) for x, m in zip(mine, masks, strict=True)]
    for x in mine:
        x.requires_grad_()
    exact = [x.double().requires_grad_() for x in inputs]
    mask = None if valid is None else valid.to(device)
    got = retention_attention(*mine, scale=scale, gating=gating, valid=mask)
    true = ref.retention_attention(*exact, scale=scale, gating=gating, valid=valid)
    assert got.dtype == inputs[0].dtype
    assert scaled(got.detach(), true.detach()) < tolerance
    gots = torch.autograd.grad(got, mine, grad.to(device))
    trues = torch.autograd.grad(true, exact, grad.double())
    for name, g, t in zip("qkvl", gots, trues, strict=True):
        assert scaled(g, t) < tolerance, name
    if valid is not None:
        for x, m in zip((got, *gots), (masks[0], *masks), strict=True):
            assert (x.cpu().masked_fill(m, 0.0) == 0).all()
    return got.detach()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize(
    ("length", "batch", "group", "dim"),
    [(63, 1, 2, 16), (63, 3, 1, 32), (100, 1, 4, 16), slow(100, 3, 2, 16), (257, 1, 1, 32)],
)
def test_outputs_and_gradients_are_the_equations(
    length: int, batch: int, group: int, dim: int, gating: str, device: str
) -> None:
    torch.manual_seed(length + dim)
    heads = 2 if batch == 1 and length < 257 else 1
    check(drawn(batch, heads, group, length, dim), gating, padding(batch, length), device)


@torch_path
@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [63, 100, 257])
def test_every_group_batch_and_length(length: int, batch: int, group: int, gating: str) -> None:
    torch.manual_seed(length)
    check(drawn(batch, 2, group, length, 8), gating, padding(batch, length))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("dim", [24, 64, 96, 128])
def test_head_dims(dim: int, gating: str, device: str) -> None:
    torch.manual_seed(0)
    check(drawn(1, 1, 2, 70, dim), gating, device=device, scale=0.3 if dim == 24 else None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("adds", "gating", "length", "batch", "group"),
    [
        ("zeros", "additive", 63, 1, 1),
        slow("sinks", "additive", 63, 3, 2),
        slow("sinks", "multiplicative", 100, 1, 4),
        slow("cap", "additive", 100, 1, 2),
        ("cap", "multiplicative", 63, 3, 1),
        slow("cap and sinks", "multiplicative", 63, 1, 2),
        ("cap and sinks", "additive", 63, 1, 2),
    ],
)
def test_sinks_and_soft_caps(adds: str, gating: str, length: int, batch: int, group: int, device: str) -> None:
    torch.manual_seed(length)
    inputs = drawn(batch, 2, group, length, 16)
    sinks = torch.zeros(2 * group) if adds == "zeros" else torch.linspace(-40.0, 6.0, 2 * group)
    scale = LogitScale(0.4, 1.5 if "cap" in adds else None, None if adds == "cap" else sinks)
    valid = padding(batch, length)
    out = check(inputs, gating, valid, device, scale=scale)
    plain = ref.retention_attention(*(x.double() for x in inputs), scale=0.4, gating=gating, valid=valid)
    assert scaled(out, plain) > 1e-2, "the oracle does not notice"


@torch_path
@pytest.mark.parametrize("gating", GATINGS)
def test_values_of_another_size(gating: str) -> None:
    torch.manual_seed(0)
    q, k, _, log_beta = drawn(1, 2, 2, 70, 16)
    check((q, k, torch.randn(1, 2, 70, 12), log_beta), gating)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gating", GATINGS)
def test_bfloat16_inputs_are_summed_in_float32(gating: str, device: str) -> None:
    torch.manual_seed(0)
    q, k, v, log_beta = drawn(1, 1, 2, 70, 16)
    check((q.bfloat16(), k.bfloat16(), v.bfloat16(), log_beta), gating, device=device, tolerance=8e-3)


@pytest.mark.parametrize("gating", GATINGS)
def test_gates_that_never_forget_leave_plain_attention(gating: str) -> None:
    torch.manual_seed(0)
    q, k, v, _ = drawn(1, 2, 2, 90, 16)
    got = retention_attention(q, k, v, torch.zeros(1, 2, 90), scale=0.25, gating=gating)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.25)
    assert scaled(got, plain) < 1e-6


def test_what_is_forgotten_at_once_has_weight_zero_or_logit_zero() -> None:
    torch.manual_seed(0)
    q, k, v, _ = drawn(1, 1, 1, 80, 16)
    gone = torch.full((1, 1, 80), -1e4)
    additive = retention_attention(q, k, v, gone, scale=1.0)
    assert scaled(additive, v) < 1e-6
    multiplicative = retention_attention(q, k, v, gone, scale=1.0, gating="multiplicative")
    own = (q * k).sum(-1, keepdim=True).exp()
    before = v.cumsum(2) - v
    count = torch.arange(80)[:, None]
    assert scaled(multiplicative, (before + own * v) / (count + own)) < 1e-5


@torch_path
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_negligible_exponentials_are_zero_and_no_others(dtype: torch.dtype) -> None:
    least = math.log(torch.finfo(dtype).tiny) / 2
    x = torch.tensor([0.0, -1.0, least / 2, least + 1, least - 1, 3 * least, -torch.inf])
    got = exp_(x.to(dtype, copy=True))
    torch.testing.assert_close(got[:4], x[:4].to(dtype).exp(), rtol=1e-4, atol=0.0)
    assert got[4:].tolist() == [0.0, 0.0, 0.0]


@torch_path
@pytest.mark.parametrize("gating", GATINGS)
def test_gradcheck_in_float64(gating: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "BLOCK", 4)
    torch.manual_seed(0)
    inputs = [x.double().requires_grad_() for x in drawn(2, 1, 2, 9, 3)]
    valid = torch.arange(9) >= torch.tensor([0, 2])[:, None]
    for scale in (0.7, LogitScale(0.7, 1.5, torch.tensor([-1.0, 2.0]))):
        assert torch.autograd.gradcheck(
            lambda *x, scale=scale: retention_attention(*x, scale=scale, gating=gating, valid=valid),
            inputs,
            fast_mode=True,
        )


@torch_path
@pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning")
def test_opcheck() -> None:
    torch.use_deterministic_algorithms(False)
    inputs = [x.requires_grad_() for x in drawn(2, 1, 2, 9, 4)]
    start = torch.tensor([0, 2], dtype=torch.int32)
    sinks = torch.tensor([-1.0, 2.0])
    torch.library.opcheck(op.attend, (*inputs, start, 0.5, False, sinks, 1.5))
    q, k, v, log_beta = (x.detach() for x in inputs)
    out, lse = op.attend(q, k, v, log_beta, start, 0.5, True, sinks, 1.5)
    torch.library.opcheck(op.attend_backward, (out, q, k, v, log_beta, start, out, lse, 0.5, True, 1.5))


@torch_path
def test_strides_of_a_models_own_tensors_do_not_matter() -> None:
    torch.manual_seed(0)
    q, k, v, log_beta = drawn(1, 2, 2, 40, 8)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    want = retention_attention(q, k, v, log_beta, scale=0.3)
    assert torch.equal(retention_attention(*turned, log_beta, scale=0.3), want)


@torch_path
@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"gating": "both"}, "gating=both"),
        ({"k": torch.zeros(1, 3, 5, 4), "v": torch.zeros(1, 3, 5, 4)}, "multiple of 3"),
        ({"v": torch.zeros(1, 2, 6, 4)}, "both"),
        ({"v": torch.zeros(1, 2, 5, 4).half()}, "one type"),
        ({"log_beta": torch.zeros(1, 4, 5)}, r"\[1, 2, 5\]"),
        ({"log_beta": torch.zeros(1, 2, 5).bfloat16()}, "float32"),
        ({"valid": torch.ones(1, 5)}, "valid"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, object], wrong: str) -> None:
    q, k, v, log_beta = drawn(1, 2, 2, 5, 4)
    given = {"q": q, "k": k, "v": v, "log_beta": log_beta, "scale": 1.0, **change}
    with pytest.raises(UserError, match=wrong):
        retention_attention(**given)


@pytest.mark.skipif(not INTERPRETED, reason="about the interpreter")
def test_the_interpreter_really_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_attend", None)
    retention_attention(*drawn(1, 1, 1, 5, 16), scale=1.0)
