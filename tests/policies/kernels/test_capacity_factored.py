"""The linear forward of the capacity loss against its definition, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench_policies.kernels.capacity_loss import factored, op, ref

RATES = {
    "mixed": lambda *shape: -torch.empty(*shape).uniform_(-14, 3).exp(),
    "nothing is forgotten": lambda *shape: torch.zeros(*shape),
    "everything is forgotten": lambda *shape: -torch.empty(*shape).uniform_(10, 90),
    "alike": lambda *shape: torch.full(shape, -0.01),
}


@pytest.mark.parametrize("kind", list(RATES))
@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 300, 512])
def test_sums_are_those_of_all_pairs(kind: str, length: int) -> None:
    torch.manual_seed(length)
    log_beta = RATES[kind](2, 3, length)
    start = torch.tensor([0, min(length - 1, 37)], dtype=torch.int32)
    log_beta[1, :, : start[1]] = torch.nan  # what stands on padding is not read
    apart = factored.sums(log_beta, start, False)
    together = factored.sums(log_beta, start, True)
    assert (apart.dtype, together.dtype) == (torch.float32, torch.float64)
    for b in range(2):
        first = int(start[b])
        want = ref.sums(log_beta[b, :, first:].double())
        torch.testing.assert_close(apart[b, :, first:].double(), want, rtol=2e-6, atol=0)
        torch.testing.assert_close(together[b, 0, first:], want.sum(0), rtol=2e-6, atol=0)
        assert not apart[b, :, :first].any()
        assert not together[b, :, :first].any()


@pytest.mark.parametrize("length", [1 << 16, 1 << 17, 1 << 20])
def test_decays_of_long_sequences_are_made_of_the_nodes(length: int) -> None:
    """Every rate at every age, without a sequence of that length."""
    ends, nodes = factored.panels(length, torch.device("cpu"))
    rate = torch.logspace(math.log10(1e-3 / length), math.log10(factored.TOP), 300)
    rate = torch.cat([torch.zeros(1), rate])
    panel, weight = factored.weights(rate, ends)
    torch.testing.assert_close(weight.sum(-1), torch.ones(301), rtol=0, atol=1e-5)
    age = torch.logspace(0, math.log10(length), 2000, dtype=torch.float64).round().unique()
    want = (-age[:, None] * rate.double()).exp()
    made = ((-age[:, None, None] * nodes.double()[panel]).exp() * weight.double()).sum(-1)
    assert (made - want).abs().max() < 4e-7
    assert nodes.numel() <= 230


def test_many_rows_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    log_beta, start = RATES["mixed"](2, 7, 100), torch.zeros(2, dtype=torch.int32)
    whole = [factored.sums(log_beta, start, t) for t in (False, True)]
    monkeypatch.setattr(factored, "_AT_ONCE", 600)  # three rows
    for together, want in zip((False, True), whole, strict=True):
        found = factored.sums(log_beta, start, together)
        torch.testing.assert_close(found, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scope", ["head", "global"])
def test_long_sequences_take_it_and_keep_their_loss_and_gradient(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    log_beta = RATES["mixed"](2, 2, 2, 200)
    valid = torch.arange(200).expand(2, -1) >= torch.tensor([[0], [50]])
    calls = []
    monkeypatch.setattr(factored, "sums", lambda *a, own=factored.sums: calls.append(1) or own(*a))
    found = []
    for exact in (201, 200):
        monkeypatch.setattr(op, "EXACT", exact)
        leaf = log_beta.clone().requires_grad_(True)
        loss = op.capacity_loss(leaf, 20, scope=scope, valid=valid)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    assert len(calls) == 1
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-9)
    op.capacity_loss(log_beta.double(), 20, scope=scope)
    assert len(calls) == 1
