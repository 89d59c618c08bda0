"""SDPA over segments agrees with a loop in float64, and a sequence does not depend on its neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvbench.engine.attend import _attend_segments, _even_runs
from kvbench.engine.kernels.ragged_attention import ref
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.segments import starts
from tests.kernels import scaled

HEADS, DIM, FIRST, SCALE = 2, 16, 100, 0.3


def packed(held: list[int], new: list[int], rooms: list[int]) -> RaggedLayer:
    """A layer of sequences with these entries in each segment and new tokens behind them; free rows are NaN."""
    torch.manual_seed(sum(held))
    layer = RaggedLayer()
    layer.batch, layer.heads, layer.dim, layer.packed = len(new), HEADS, DIM, True
    layer.length = [count + new[segment // HEADS] for segment, count in enumerate(held)]
    layer.room = [length + room for length, room in zip(layer.length, rooms, strict=True)]
    layer.start = starts(layer.room)
    layer.key, layer.value = torch.full((2, sum(layer.room), DIM), torch.nan)
    layer.col = torch.full((sum(layer.room),), -1, dtype=torch.int32)
    queries = max(new)
    for segment, (start, length, old) in enumerate(zip(layer.start, layer.length, held, strict=True)):
        own_columns = FIRST + queries - new[segment // HEADS] + torch.arange(new[segment // HEADS])
        layer.col[start : start + length] = torch.cat([torch.randperm(FIRST)[:old].sort().values, own_columns]).int()
        for numbers in (layer.key, layer.value):
            numbers[start : start + length] = torch.randn(length, DIM)
    return layer


def expected(query: Tensor, layer: RaggedLayer, is_token: Tensor) -> Tensor:
    assert layer.key is not None and layer.value is not None
    rows = layer.key.double(), layer.value.double(), layer.col, *layer.bounds()
    return ref.ragged_attention(query.double(), *rows, FIRST, SCALE, (), is_token)[0]


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("new", [[1, 1, 1, 1], [3, 3, 3, 3], [5, 2, 5, 1]], ids=["one", "question", "padded"])
@pytest.mark.parametrize(
    ("held", "rooms"),
    [
        ([9] * 8, [4] * 8),
        ([9, 9, 20, 20, 20, 20, 3, 5], [4] * 8),
        ([9] * 8, [4, 4, 7, 4, 4, 4, 30, 4]),
        ([0, 0, 0, 9, 9, 9, 0, 0], [4] * 8),
    ],
    ids=["even", "ragged", "uneven rooms", "empty"],
)
def test_segments_agree_with_the_definition(held: list[int], rooms: list[int], new: list[int], group: int) -> None:
    layer = packed(held, new, rooms)
    query = torch.randn(4, max(new), HEADS * group, DIM).transpose(1, 2)  # as models hand it over
    is_token = torch.arange(max(new)) >= max(new) - torch.tensor(new)[:, None]
    output = _attend_segments(query, layer, SCALE)
    assert output.isfinite().all(), "padding is computed but not read"
    for sequence, tokens in enumerate(is_token):
        wanted = expected(query, layer, is_token)[sequence][:, tokens]
        assert scaled(output[sequence][:, tokens], wanted) < 1e-5
        alone = _attend_segments(query[sequence : sequence + 1], layer.sequence(sequence), SCALE)
        assert torch.equal(alone[0], output[sequence])


def test_segments_share_a_call_if_they_lie_evenly() -> None:
    assert [*_even_runs([0, 10, 20, 30], [5, 5, 5, 5])] == [range(4)]
    assert [*_even_runs([0, 10, 20, 30], [5, 5, 6, 6])] == [range(2), range(2, 4)]
    assert [*_even_runs([0, 10, 20, 35, 50], [5] * 5)] == [range(3), range(3, 5)]
    assert [*_even_runs([30, 20, 20, 40], [5] * 4)] == [range(1), range(1, 2), range(2, 4)], "another order"
    assert [*_even_runs([7], [0])] == [range(1)]
