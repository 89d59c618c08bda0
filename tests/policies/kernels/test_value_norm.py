"""The norms of projected values agree with their equation, whatever is blocked how."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench_policies.kernels.value_norm import op, ref
from kvbench_policies.kernels.value_norm.op import value_norm
from tests.kernels import DEVICES, INTERPRETED, default_dtype, difference, padding, torch_path


def layer(
    batch: int, length: int, group: int, *, heads: int = 2, dim: int = 16, columns: int = 40
) -> tuple[Tensor, Tensor]:
    """Values `[B, H, T, d]` as a model has them, 100.0 on padding, and a weight `[H_q, d, D]`."""
    torch.manual_seed(length + group)
    value = torch.randn(batch, length, heads, dim).transpose(1, 2)
    valid = padding(batch, length)
    if valid is not None:
        value = value.masked_fill(~valid[:, None, :, None], 100.0)
    linear = torch.randn(columns, heads * group * dim)
    return value, linear.view(columns, heads * group, dim).permute(1, 2, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [63, 100, 257])
def test_norms_are_the_equations(length: int, batch: int, group: int, norm: str, device: str) -> None:
    value, weight = layer(batch, length, group)
    got = value_norm(value.to(device), weight.to(device), norm)
    assert got.dtype == torch.float32
    assert difference(got, ref.value_norm(value.double(), weight.double(), norm)) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dim", "columns"), [(8, 12), (24, 33), (48, 1), (64, 64), (80, 31)])
def test_odd_sizes_of_heads_and_of_the_output(dim: int, columns: int, device: str) -> None:
    value, weight = layer(2, 37, 2, dim=dim, columns=columns)
    for norm in ("l1", "l2"):
        got = value_norm(value.to(device), weight.to(device), norm)
        assert difference(got, ref.value_norm(value.double(), weight.double(), norm)) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_multiplied_exactly(dtype: torch.dtype, device: str) -> None:
    value, weight = (x.to(dtype) for x in layer(1, 63, 2))
    true = ref.value_norm(value.double(), weight.double())
    assert difference(value_norm(value.to(device), weight.to(device)), true) < 1e-5
    got = value_norm(value.to(device), weight.float().to(device))
    assert difference(got, true) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_memory_order_does_not_matter(device: str) -> None:
    value, weight = (x.to(device) for x in layer(3, 63, 2))
    wanted = value_norm(value, weight)
    wide = torch.full((3, 2, 63, 40), 100.0, device=device)  # a slice of something larger
    wide[..., 8:24] = value
    for one in (value.contiguous(), value.mT.contiguous().mT, wide[..., 8:24]):
        for other in (weight, weight.contiguous()):
            torch.testing.assert_close(value_norm(one, other), wanted)


def test_the_expanded_values_of_a_batch() -> None:
    value, weight = layer(1, 63, 2)
    got = value_norm(value.expand(3, -1, -1, -1), weight)
    torch.testing.assert_close(got, value_norm(value, weight).expand(3, -1, -1))


def test_norms_are_float32_whatever_the_default_is() -> None:
    value, weight = layer(1, 63, 2)
    wanted = value_norm(value, weight)
    with default_dtype(torch.bfloat16):
        assert torch.equal(value_norm(value, weight), wanted)


def test_nothing_held_has_no_norms() -> None:
    value, weight = layer(1, 63, 2)
    assert value_norm(value[:, :, :0], weight).shape == (1, 2, 0)


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_the_kernel_writes_its_output_and_nothing_beside() -> None:
    from kvbench_policies.kernels.value_norm.triton import launch

    value, weight = layer(3, 63, 2)
    room = torch.full((3 * 4 * 63 + 200,), torch.nan)
    out = room[100:-100].view(3, 4, 63)
    for norm in ("l1", "l2"):
        launch(value, weight.mT, norm, out)
        assert out.isfinite().all()
        assert room[:100].isnan().all()
        assert room[-100:].isnan().all()
        out.fill_(torch.nan)


@torch_path
@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_norms_do_not_depend_on_their_blocks(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, weight = layer(3, 100, 2)
    whole = value_norm(value, weight, norm)
    monkeypatch.setattr(op, "_BLOCK", 7 * 2 * 40)
    torch.testing.assert_close(value_norm(value, weight, norm), whole)


@torch_path
def test_no_gradient_comes_of_it() -> None:
    value, weight = layer(1, 20, 2)
    assert not value_norm(value.requires_grad_(), weight.requires_grad_()).requires_grad


@torch_path
@pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning")
def test_opcheck() -> None:
    torch.use_deterministic_algorithms(False)
    for norm in ("l1", "l2"):
        value, weight = layer(3, 63, 2)
        torch.library.opcheck(op.projected_norm, (value, weight, norm))
        torch.library.opcheck(op.projected_norm, (value.bfloat16(), weight.bfloat16(), norm))


@torch_path
@pytest.mark.parametrize(
    ("value", "weight", "norm", "wrong"),
    [
        ((1, 2, 5, 8), (4, 8, 3), "l3", "norm=l3"),
        ((1, 2, 5, 8), (4, 7, 3), "l1", r"weight \[4, 7, 3\]"),
        ((1, 2, 5, 8), (3, 8, 3), "l1", "multiple of H"),
        ((2, 5, 8), (4, 8, 3), "l1", r"value is \[2, 5, 8\]"),
    ],
)
def test_what_is_wrong_is_said(value: tuple[int, ...], weight: tuple[int, ...], norm: str, wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        value_norm(torch.zeros(value), torch.zeros(weight), norm)
