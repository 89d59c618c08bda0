"""A row fills its length exactly, whatever the cost of its units."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench_tasks.synthetic.fitting import (
    Doc,
    HaystackPlan,
    Streams,
    apart,
    fewer,
    fit,
    scatter,
    shuffle,
)


def plan(cost: list[int], least: int = 0, answer: int = 3) -> HaystackPlan:
    """Units of given costs, written as so many letters."""

    def build(n: int) -> Doc:
        letters = "x" * sum(cost[:n])
        return {"context": letters, "question": "??", "max_new_tokens": answer, "n": n}

    return HaystackPlan(build, min_units=least, max_units=len(cost))


def letters(context: str, question: str, gen_prefix: str = "") -> int:
    return len(context + question + gen_prefix)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=300), st.integers(5, 2000))
def test_the_largest_row_that_fits(costs: list[int], length: int) -> None:
    row = fit("t", [plan(costs)], length, letters)
    n, room = row["n"], length - 5
    assert sum(costs[:n]) <= room
    if n < min(len(costs), length) and sum(costs[:n]) < room:
        assert sum(costs[: n + 1]) > room


def test_few_probes_suffice() -> None:
    probes = 0

    def count(context: str, question: str, gen_prefix: str = "") -> int:
        nonlocal probes
        probes += 1
        return len(context + question)

    costs = [1 + i * i % 3 for i in range(100_000)]
    row = fit("t", [plan(costs)], 100_000, count)
    assert sum(costs[: row["n"]]) in range(100_000 - 5 - 3, 100_000 - 5 + 1)
    assert probes <= 12


def test_fitting_ends_even_where_units_cost_nothing() -> None:
    assert fit("t", [plan([1] * 9000)], 64, lambda *_: 5)["n"] <= 64


def test_the_first_plan_that_fits_is_taken_and_none_is_an_error() -> None:
    plans = [plan([1] * 50, least=40), plan([1] * 50, least=20)]
    assert fit("t", plans, 60, letters)["n"] == 50
    assert fit("t", plans, 30, letters)["n"] == 25
    with pytest.raises(UserError, match=r"t does not fit into --length 20 .* at least 25"):
        fit("t", plans, 20, letters)


def test_statements_stand_at_their_depth() -> None:
    units = list("0123456789")
    for depth in (0, 0.1, 0.5, 0.99, 1):
        assert scatter(units, [(depth, "N")]).index("N") == math.floor(10 * depth)
    assert scatter(units[:2], [(1, "b"), (0, "a"), (0.5, "c")]) == ["a", "0", "c", "1", "b"]
    assert scatter([], [(0.3, "a"), (0.2, "b")]) == ["b", "a"]


def test_streams_depend_on_their_parts_and_purpose_alone() -> None:
    one = Streams("vt", 512, 0, 1)
    first = one["a"].random()
    assert Streams("vt", 512, 0, 1)["a"].random() == first == one.fresh("a").random()
    assert one["a"].random() != first
    others = [Streams("vt", 512, 0, 2)["a"], Streams("vt", 512, 1, 1)["a"], one["b"]]
    assert len({first, *(o.random() for o in others)}) == 4


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(0, 500))
def test_parts_are_uneven_and_add_up_to_the_whole(seed: int, parts: int, whole: int) -> None:
    sizes = apart(random.Random(seed), parts)
    found = sizes(whole)
    assert len(found) == parts
    assert sum(found) == whole
    assert min(found) >= 0
    assert all(abs(a - b) <= 1 for a, b in zip(found, sizes(whole + 1), strict=True))


def test_fewer_counts_down_to_four() -> None:
    assert list(fewer(25)) == [25, 18, 13, 9, 6, 4]
    assert list(fewer(5)) == [5, 4]
    assert list(fewer(4)) == [4]


@given(st.integers(0, 2**32), st.integers(0, 700))
def test_the_shuffle_is_pythons(seed: int, count: int) -> None:
    mine, pythons = list(range(count)), list(range(count))
    a, b = random.Random(seed), random.Random(seed)
    shuffle(a, mine)
    b.shuffle(pythons)
    assert mine == pythons
    assert a.random() == b.random()
