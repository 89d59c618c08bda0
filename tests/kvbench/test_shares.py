"""Integer shares against a slow loop in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from kvbench.parts import apportion


def slow(weight: list[int], total: int, most: list[int], least: list[int]) -> list[Fraction]:
    """Clip the worse side, give the rest in proportion, until nothing is out of bounds."""
    share: dict[int, Fraction] = {}
    free = set(range(len(weight)))
    while free:
        left = Fraction(total) - sum(share.values())
        mass = sum(weight[i] for i in free)
        part = {i: left * weight[i] / mass if mass else left / len(free) for i in free}
        under = {i: least[i] - part[i] for i in free if part[i] < least[i]}
        over = {i: part[i] - most[i] for i in free if part[i] > most[i]}
        if not under and not over:
            return [share.get(i, part.get(i, Fraction(0))) for i in range(len(weight))]
        if sum(under.values()) >= sum(over.values()):
            share |= {i: Fraction(least[i]) for i in under}
            free -= set(under)
        if sum(over.values()) >= sum(under.values()):
            share |= {i: Fraction(most[i]) for i in over}
            free -= set(over)
    return [share[i] for i in range(len(weight))]


@pytest.mark.parametrize("seed", range(60))
def test_shares_are_those_of_the_loop(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    size = int(torch.randint(1, 9, (1,), generator=g))
    weight = torch.randint(0, 6, (3, size), generator=g) ** 2
    most = torch.randint(1, 12, (3, size), generator=g)
    least = torch.minimum(torch.randint(0, 3, (3, size), generator=g), most)
    spread = (most.sum(1) - least.sum(1)).double()
    total = least.sum(1) + (spread * torch.rand(3, generator=g, dtype=torch.float64)).long()
    found = apportion(weight.double(), total, most, least)
    assert found.sum(1).tolist() == total.tolist()
    assert bool(((found >= least) & (found <= most)).all())
    for row in range(3):
        want = slow(weight[row].tolist(), int(total[row]), most[row].tolist(), least[row].tolist())
        whole = [int(w) for w in want]  # floor
        extra = int(total[row]) - sum(whole)
        order = sorted(range(size), key=lambda i: (-(want[i] - whole[i]), i))
        for i in order[:extra]:
            whole[i] += 1
        assert found[row].tolist() == whole


def test_an_even_spread_where_no_weight_is_left() -> None:
    found = apportion(torch.tensor([[5.0, 0.0, 0.0]]).double(), torch.tensor([9]), torch.tensor([[4, 9, 9]]))
    assert found.tolist() == [[4, 3, 2]]
