"""Which sizes of matrix products give a row the same bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from kvbench.engine.driver import engine
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


def halved_at(rows: int, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Rounds differently with one number of rows only."""
    half = x.shape[1] // 2 if len(x) == rows else 0
    weights = layer.weight
    return nn.functional.linear(x[:, :half], weights[:, :half]) + nn.functional.linear(x[:, half:], weights[:, half:])


def test_the_parts_of_mlps_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: halved_at(300, layer, x))
    steady = Steady(build("llama"))
    assert steady.at(598, 8) and steady.at(602, 8)
    assert not steady.at(599, 8) and not steady.at(600, 8) and not steady.at(300, 8)


def test_a_row_must_have_the_same_bits_at_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """Rounds rows 4 to 7 of every eight differently."""
        usual, other = nn.functional.linear(x, layer.weight), halved_at(len(x), layer, x)
        return torch.where((torch.arange(len(x)) % 8 < 4)[:, None], usual, other)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    assert not Steady(build("llama")).at(12, 8)


@pytest.mark.parametrize("in_engine", [False, True])
def test_other_layers_are_compared_at_the_whole_size(monkeypatch: pytest.MonkeyPatch, in_engine: bool) -> None:
    model = build("llama")
    with engine(model) if in_engine else nullcontext():
        steady = Steady(model)
    sizes: dict[str, set[int]] = {"mlp": set(), "attention": set()}

    def recording_forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        hidden = model.config.intermediate_size
        sizes["mlp" if hidden in layer.weight.shape else "attention"].add(len(x))
        return halved_at(600, layer, x)

    monkeypatch.setattr(nn.Linear, "forward", recording_forward)
    assert not steady.at(600, 8) and steady.at(602, 8)
    assert sizes == {"mlp": {8, 301}, "attention": {8, 600, 602}}


@pytest.fixture
def three_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_activations_must_not_round_differently_where_the_part_of_a_thread_ends(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A thread gets at least 32768 numbers, and computes up to 31 of them one by one."""
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: x.sum(-1, keepdim=True) * layer.weight.sum(1))
    model, channels = copy.deepcopy(build(name)), 4864
    for layer in model.model.layers:
        first = "gate_up_proj" if name == "phi3" else "gate_proj"
        width = 2 * channels if name == "phi3" else channels
        setattr(layer.mlp, first, nn.Linear(model.config.hidden_size, width, bias=False))
        layer.mlp.down_proj = nn.Linear(channels, model.config.hidden_size, bias=False)

    def has_equal_rows(rows: int) -> bool:
        gates = (torch.randn(1, width).repeat(rows, 1)[:, :channels] for _ in range(30))
        return all(torch.equal(out, out[:1].expand_as(out)) for out in map(nn.functional.silu, gates))

    sizes = (8, 16, 24, 32)
    assert [rows for rows in sizes if Steady(model).at(rows, 8)] == [rows for rows in sizes if has_equal_rows(rows)]


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
