"""Which sizes of matrix products give a row the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kvbench.engine.steady import LEAST, Steady

from .conftest import build


class Halved(nn.Linear):
    """Rounds differently from 100 rows on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < 100:
            return nn.functional.linear(x, self.weight)
        half = x.shape[1] // 2
        first = nn.functional.linear(x[:, :half], self.weight[:, :half])
        return first + nn.functional.linear(x[:, half:], self.weight[:, half:])


def test_it_finds_the_size_from_which_a_layer_rounds_differently(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")
    before = Steady(model)
    assert all(before.at(least, least, with_head=True) and not before.at(least - 1, least) for least in LEAST)
    monkeypatch.setattr(nn.Linear, "forward", Halved.forward)
    steady = Steady(model)
    assert steady.at(8, 8) and steady.at(96, 8) and steady.at(96, 32)
    assert not steady.at(104, 8) and not steady.at(104, 32)


def halved_at_300(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Rounds differently with 300 rows only."""
    half = x.shape[1] // 2 if len(x) == 300 else 0
    weights = layer.weight
    return nn.functional.linear(x[:, :half], weights[:, :half]) + nn.functional.linear(x[:, half:], weights[:, half:])


def test_the_parts_of_mlps_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", halved_at_300)
    steady = Steady(build("llama"))
    assert steady.at(598, 8) and steady.at(602, 8)
    assert not steady.at(599, 8) and not steady.at(600, 8) and not steady.at(300, 8)


def test_matrices_outside_of_linear_layers_are_not_steady() -> None:
    model = copy.deepcopy(build("llama"))
    assert Steady(model).at(8, 8)
    model.model.layers[0].experts = nn.ParameterList([torch.zeros(2, 3, 4)])
    assert not Steady(model).at(8, 8)


def test_other_kinds_of_linear_layers_are_not_steady() -> None:
    model = copy.deepcopy(build("llama"))
    layer = model.model.layers[0].mlp.down_proj
    model.model.layers[0].mlp.down_proj = Halved(layer.in_features, layer.out_features)
    assert not Steady(model).at(8, 8)
