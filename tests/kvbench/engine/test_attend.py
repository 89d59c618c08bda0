"""SDPA over segments agrees with a loop in float64, and a sequence does not depend on its neighbours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench import native
from kvbench.engine.attend import _attend_segments, _even_runs, ignores_width
from kvbench.view.softmax import LogitScale
from tests.kernels import scaled

from .kernels.test_ragged_attention import case


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(("n", "waiting"), [(1, ()), (3, ()), (5, ()), (5, (1, 3))])
@pytest.mark.parametrize(
    ("held", "free"),
    [
        ([9] * 8, [4] * 8),
        ([9, 9, 20, 20, 20, 20, 3, 5], [4] * 8),
        ([9] * 8, [4, 4, 7, 4, 4, 4, 30, 4]),
        ([0, 0, 0, 9, 9, 9, 0, 0], [4] * 8),
    ],
    ids=["even", "ragged", "uneven rooms", "empty"],
)
def test_segments_agree_with_the_definition(
    held: list[int], free: list[int], n: int, waiting: tuple[int, ...], group: int
) -> None:
    one = case(held, group, n, waiting=waiting, free=free)
    output = _attend_segments(one.query, one.layer, one.scale)
    assert output.isfinite().all(), "padding is computed but not read"
    expected, _ = one.oracle()
    for sequence, tokens in enumerate(one.valid):
        if tokens.any():
            assert scaled(output[sequence][:, tokens], expected[sequence][:, tokens]) < 1e-5
        alone = _attend_segments(one.query[sequence : sequence + 1], one.layer.sequence(sequence), one.scale)
        assert torch.equal(alone[0], output[sequence])


def test_segments_share_a_call_if_they_lie_evenly() -> None:
    assert [*_even_runs([0, 10, 20, 30], [5, 5, 5, 5])] == [range(4)]
    assert [*_even_runs([0, 10, 20, 30], [5, 5, 6, 6])] == [range(2), range(2, 4)]
    assert [*_even_runs([0, 10, 20, 35, 50], [5] * 5)] == [range(3), range(3, 5)]
    assert [*_even_runs([30, 20, 20, 40], [5] * 4)] == [range(1), range(1, 2), range(2, 4)], "another order"
    assert [*_even_runs([7], [0])] == [range(1)]


def test_only_native_attention_of_small_groups_ignores_the_number_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(dtype: torch.dtype = torch.float32, scale: float = 0.1, is_latent: bool = False) -> Any:
        entries = torch.zeros(3, 4, dtype=dtype)
        return SimpleNamespace(key=entries, value=entries, scale=scale, is_latent=is_latent)

    is_native = native.implementation() == "native"
    assert ignores_width(layer(), 8) == ignores_width(layer(torch.bfloat16), 1) == is_native
    sinks = LogitScale(0.1, sinks=torch.zeros(4))
    others = [layer(torch.float16), layer(scale=LogitScale(0.1, cap=30.0)), layer(scale=sinks), layer(is_latent=True)]
    assert not any(ignores_width(other, 1) for other in others)
    assert not ignores_width(layer(), 9)
    monkeypatch.setattr(native, "has_matrix_code", lambda dtype: True)
    assert not ignores_width(layer(), 1)
