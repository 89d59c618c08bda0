"""A change of a tensor is noticed, whichever way it was written to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvbench.engine.integrity import Ledger, Weights, checksum
from kvbench.errors import UserError

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool)


def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return (3 * torch.randn(shape, generator=draw)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 2, 37, 33), (1, 2, 1024, 64)], ids=str)
def test_every_element_counts_and_so_does_its_place(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = tensor(shape, dtype)
    was = checksum(x)
    assert torch.equal(checksum(x.clone()), was)
    flat = x.view(-1)
    for i in {0, len(flat) // 2, len(flat) - 1}:
        old = flat[i].clone()
        flat[i] = old + 1 if dtype != torch.bool else ~old
        assert not torch.equal(checksum(x), was), i
        flat[i] = old
    assert torch.equal(checksum(x), was)
    for moved in (x.flip(-1), x.roll(1, -1), x.roll(2, 0)) if x.dim() else ():
        assert torch.equal(moved, x) == torch.equal(checksum(moved), was)


def test_views_that_start_anywhere_and_repeat_are_read() -> None:
    x = tensor((300,), torch.float16)
    assert torch.equal(checksum(x[3:200]), checksum(x[3:200].clone()))
    assert torch.equal(checksum(x.view(10, 30).T), checksum(x.view(10, 30).T.contiguous()))
    wide = torch.arange(8).expand(2, 3, 8)
    was = checksum(wide)
    wide[0, 0].data[5] = 0
    assert not torch.equal(checksum(wide), was)
    assert checksum(torch.empty(2, 0)).sum() == 0


def test_nan_does_not_change_by_itself() -> None:
    x = torch.full((40,), torch.nan)
    ledger = Ledger()
    ledger.add("x", x)
    assert ledger.changed() == ""
    x.numpy()[7] = 1
    assert ledger.changed() == "x"


def net() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    model.register_buffer("table", torch.arange(5.0))
    return model


@pytest.mark.parametrize("where", ["0.weight", "1.bias", "table"])
def test_changed_weights_are_named_and_loaded_again(where: str) -> None:
    model = net()
    was = copy.deepcopy(model.state_dict())
    weights = Weights(model, net)
    assert weights.changed() == ""
    model.state_dict()[where].detach().numpy()[:1] += 1
    assert weights.changed() == where
    weights.restore(where)
    assert weights.changed() == ""
    assert all(torch.equal(x, was[name]) for name, x in model.state_dict().items())


def test_a_replaced_parameter_counts_as_changed() -> None:
    model = net()
    weights = Weights(model, net)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    assert weights.changed() == "0.weight"


def test_weights_that_cannot_be_loaded_again_end_the_work() -> None:
    weights = Weights(net())
    with pytest.raises(UserError, match=r"changed the model's parameter 0\.weight; run without"):
        weights.restore("0.weight")
