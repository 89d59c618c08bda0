"""The capacity loss agrees with its equation, its gradient with autograd of the equation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench.errors import UserError
from kvbench_policies.kernels.capacity_loss import op, ref
from kvbench_policies.kernels.capacity_loss.op import capacity_loss
from tests.kernels import DEVICES, difference, padding, rates, torch_path


def both(log_beta: Tensor, budget: int, device: str = "cpu", **how: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss and gradient, ours in float32 and the oracle's in float64."""
    mine = log_beta.to(device, copy=True).requires_grad_()
    valid = how.pop("valid", None)
    mask = valid.to(device) if isinstance(valid, Tensor) else None
    loss = capacity_loss(mine, budget, valid=mask, **how)
    loss.backward()
    exact = log_beta.double().requires_grad_()
    true = ref.capacity_loss(exact, budget, valid=valid, **how)
    true.backward()
    assert mine.grad is not None
    assert exact.grad is not None
    return loss.detach(), true.detach(), mine.grad, exact.grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scope", ["head", "global"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [63, 100, 257])
def test_loss_and_gradient_are_the_equations(length: int, batch: int, scope: str, device: str) -> None:
    torch.manual_seed(length)
    valid = padding(batch, length)
    log_beta = rates(batch, 2, 1, length)
    if valid is not None:  # what stands on padding is not read
        log_beta = log_beta.masked_fill(~valid[:, None, None], torch.nan)
    loss, true, grad, exact = both(log_beta, 15, device, scope=scope, valid=valid)
    assert true > 0
    assert difference(loss, true) < 1e-6
    if valid is not None:
        assert (grad.cpu()[~valid[:, None, None].expand(grad.shape)] == 0).all()
    assert difference(grad, exact.nan_to_num()) < 3e-6


@pytest.mark.parametrize(
    ("slowest", "fastest"),
    [(-18.0, -17.0), (-9.0, -8.0), (-3.0, -1.0), (0.5, 1.5)],
    ids=["never", "slowly", "in tens", "at once"],
)
def test_every_speed_of_forgetting(slowest: float, fastest: float) -> None:
    torch.manual_seed(0)
    loss, true, grad, exact = both(rates(1, 2, 100, slowest=slowest, fastest=fastest), 1)
    assert difference(loss, true) < (1e-5 if fastest < 0 else 1e-4)  # then S is 1 and a little
    assert difference(grad, exact) < 3e-6


def test_never_forgetting_at_all_has_a_gradient() -> None:
    loss, true, grad, exact = both(torch.zeros(1, 1, 100), 10)
    assert difference(loss, true) < 1e-6
    assert difference(grad, exact) < 1e-6


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_gradient_of_many_runs_goes_pair_by_pair(lanes: int) -> None:
    torch.manual_seed(0)
    log_beta = rates(2, 2, 130)
    grad = torch.randn(2, lanes, 130) * (torch.rand(2, lanes, 130) > 0.4)
    few = torch.zeros(130)
    few[40:90], few[90:100], few[120:] = 1.0, -2.0, 0.5
    grad[0, 0] = few  # this row (or, shared, this sequence) by runs
    start = torch.tensor([0, 9], dtype=torch.int32)
    assert op.find_runs(grad, 8)[2][0, 0] == 3
    assert op.find_runs(grad, 8)[2].max() > 8
    got = op.capacity_sums_backward(grad, log_beta, start)
    for b, first in enumerate(start.tolist()):
        exact = log_beta[b, :, first:].double().requires_grad_()
        (ref.sums(exact) * grad[b, :, first:]).sum().backward()
        assert exact.grad is not None
        assert difference(got[b, :, first:], exact.grad) < 1e-4  # terms of both signs
        assert (got[b, :, :first] == 0).all()


def test_sums_of_one_rate_are_a_geometric_series() -> None:
    beta = torch.tensor([0.5, 0.9, 0.999])
    t = torch.arange(150)
    log_beta = beta.log()[None, :, None].expand(1, 3, 150).contiguous()
    kept = op.capacity_sums(log_beta, torch.zeros(1, dtype=torch.int32), False)
    true = (1 - beta[:, None] ** (t + 1)) / (1 - beta[:, None])
    assert difference(kept[0], true) < 1e-4  # float32 of 1 - beta, not of ours
    together = op.capacity_sums(log_beta, torch.zeros(1, dtype=torch.int32), True)
    assert together.dtype == torch.float64
    assert difference(together[0, 0], true.sum(0)) < 1e-4


@torch_path
def test_heads_may_lie_in_one_axis_or_two_and_be_summed() -> None:
    torch.manual_seed(0)
    log_beta = rates(2, 3, 2, 80)
    mean = capacity_loss(log_beta, 4)
    assert mean == capacity_loss(log_beta.flatten(1, 2), 4)
    assert torch.isclose(mean * 6, capacity_loss(log_beta, 4, reduce="sum"))
    total = ref.capacity_loss(log_beta.double(), 4, reduce="sum")
    assert difference(capacity_loss(log_beta, 4, reduce="sum"), total) < 1e-6


@torch_path
@pytest.mark.parametrize("scope", ["head", "global"])
def test_a_sequence_within_the_budget_costs_nothing(scope: str) -> None:
    for budget in (50, 64):
        loss, _, grad, _ = both(rates(1, 2, 50), budget, scope=scope)
        assert loss == 0
        assert (grad == 0).all()
    valid = torch.arange(50) >= torch.tensor([40, 0])[:, None]  # 10 tokens, and 50
    log_beta = rates(2, 2, 50, fastest=-10)
    loss, true, _, _ = both(log_beta, 10, scope=scope, valid=valid)
    assert difference(loss, true) < 1e-6
    assert torch.isclose(loss * 2, capacity_loss(log_beta[1:], 10, scope=scope))


@torch_path
@pytest.mark.parametrize("scope", ["head", "global"])
def test_gradcheck_in_float64(scope: str) -> None:
    torch.manual_seed(0)
    log_beta = rates(2, 1, 2, 70, slowest=-6, fastest=0.5).double().requires_grad_()
    valid = torch.arange(70) >= torch.tensor([0, 5])[:, None]
    assert torch.autograd.gradcheck(
        lambda x: capacity_loss(x, 3, scope=scope, valid=valid) * 100, log_beta, fast_mode=True
    )


@torch_path
@pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning")
def test_opcheck() -> None:
    torch.use_deterministic_algorithms(False)
    start = torch.tensor([0, 4], dtype=torch.int32)
    for together in (False, True):
        log_beta = rates(2, 3, 70).requires_grad_()
        torch.library.opcheck(op.capacity_sums, (log_beta, start, together))
    torch.library.opcheck(op.capacity_sums_backward, (torch.rand(2, 1, 70), rates(2, 3, 70), start))


class Largest(TorchDispatchMode):
    """Notes the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.itemsize)
        return out


@torch_path
def test_no_matrix_of_all_pairs_is_ever_made() -> None:
    length = 2048
    log_beta = rates(1, 1, length)
    start = torch.zeros(1, dtype=torch.int32)
    with Largest() as largest:
        kept = op._sums(log_beta, start)
        op._backward_direct(torch.rand(1, 1, length), log_beta, start)
        op._backward_runs((kept > 9).float(), log_beta, start, op.find_runs((kept > 9).float(), length))
    assert 0 < largest.elements <= 4 * 64 * length


@torch_path
def test_runs_are_found_where_a_gradient_keeps_its_value() -> None:
    first, end, count = op.find_runs(torch.tensor([[[2.0, 2, 0, 3, 5, 5], [0, 0, 0, 0, 0, 0]]]), 4)
    assert first.tolist() == [[[0, 3, 4, 6], [6, 6, 6, 6]]]
    assert end.tolist() == [[[2, 4, 6, 6], [6, 6, 6, 6]]]
    assert count.tolist() == [[3, 0]]
    assert op.find_runs(torch.tensor([[[1.0, 2, 3]]]), 2)[2].item() == 3


@torch_path
@pytest.mark.parametrize(
    ("log_beta", "how", "wrong"),
    [
        (torch.zeros(2, 5), {}, "axes"),
        (torch.zeros(1, 1, 5, dtype=torch.bfloat16), {}, "float32"),
        (torch.zeros(1, 1, 5), {"budget": 0}, "budget=0"),
        (torch.zeros(1, 1, 5), {"scope": "layer"}, "scope=layer"),
        (torch.zeros(1, 1, 5), {"reduce": "max"}, "reduce=max"),
        (torch.zeros(1, 1, 5), {"valid": torch.ones(1, 4, dtype=torch.bool)}, "valid"),
        (torch.zeros(1, 1, 2), {"valid": torch.tensor([[True, False]])}, "left"),
    ],
)
def test_what_is_wrong_is_said(log_beta: Tensor, how: dict[str, object], wrong: str) -> None:
    with pytest.raises(UserError, match=wrong):
        capacity_loss(log_beta, **{"budget": 2, **how})
