"""The generic parts: order, top-k, uniform shares, exact portions, functions as scores."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvbench.errors import UserError
from kvbench.parts import FunctionScore, best, portion, rank_entries, spread_evenly
from kvbench.plugin import Scores, View


@given(
    st.lists(
        st.tuples(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 3.0]), st.integers(0, 4), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_rank_is_by_class_then_value_then_position(entries: list[tuple[float, int, bool]]) -> None:
    value, protect, valid = (torch.tensor(x)[None, None] for x in zip(*entries, strict=True))
    ranks = rank_entries(Scores(value, protect.to(torch.int8)), valid)[0, 0].tolist()

    def worth(i: int) -> tuple[float, ...]:
        x, c, exists = entries[i]
        if not exists:
            return (False, 0, 0.0, i)
        return (True, c, 0.0 if c > Scores.CHOSEN else x, -i if c == Scores.SINK else i)

    best = [i for i in sorted(range(len(entries)), key=worth, reverse=True) if entries[i][2]]
    assert [ranks[i] for i in best] == list(range(len(best)))
    assert sorted(ranks) == list(range(len(entries)))


def test_boolean_protection_is_one_class() -> None:
    value = torch.tensor([[[5.0, 1.0, 4.0, 2.0]]])
    protect = torch.tensor([[[False, True, False, True]]])
    ranks = rank_entries(Scores(value, protect), torch.ones(1, 1, 4, dtype=torch.bool))
    assert ranks.tolist() == [[[2, 1, 3, 0]]]


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_even_spread_sums_to_the_total(total: int, heads: int) -> None:
    shares = spread_evenly(torch.tensor([total]), heads)[0].tolist()
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@given(st.integers(0, 1_000_000), st.integers(0, 1000), st.integers(1, 32))
def test_portion_is_exact(count: int, thousandths: int, heads: int) -> None:
    ratio = thousandths / 1000
    expected = Fraction(thousandths, 1000) * count / heads
    assert portion(torch.tensor(count), ratio, heads).item() == expected.__floor__()


def test_a_function_becomes_a_score_with_its_keywords() -> None:
    def norm(v: View, power: float = 1.0, centred: bool = False) -> Tensor:
        return v.value.norm(dim=-1) ** power

    score = FunctionScore.of(norm)
    assert score.parameters() == {"power": 1.0, "centred": False}
    assert score.parameter_types() == {"power": float, "centred": bool}
    assert score.replace(power=2.0) != score
    assert score.replace(power=2.0).replace(power=1.0) == score


def test_a_function_without_defaults_is_refused() -> None:
    def bare() -> Tensor:
        return torch.zeros(1)

    def missing(v: View, power: float) -> Tensor:
        return v.value.norm(dim=-1) ** power

    with pytest.raises(UserError, match="takes no argument"):
        FunctionScore.of(bare)
    with pytest.raises(UserError, match="power of missing needs a default"):
        FunctionScore.of(missing)


@given(
    st.lists(st.lists(st.integers(-1, 4), min_size=7, max_size=7), min_size=1, max_size=3),
    st.data(),
)
def test_the_best_are_the_largest_and_of_equals_the_first(rows: list[list[int]], data: st.DataObject) -> None:
    count = [data.draw(st.integers(0, sum(x >= 0 for x in row))) for row in rows]
    found = best(torch.tensor(rows), torch.tensor(count))
    for row, n, mask in zip(rows, count, found.tolist(), strict=True):
        want = sorted(range(7), key=lambda i: (-row[i], i))[:n]
        assert [i for i in range(7) if mask[i]] == sorted(want)
