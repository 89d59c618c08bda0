from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.budget import Budget
from kvbench.errors import UserError

LENGTHS = st.integers(1, 2_000_000)
RATIOS = st.decimals("0.0001", "1", allow_nan=False, places=4).map(str)


@given(ratio=RATIOS, length=LENGTHS)
def test_a_ratio_rounds_half_up_in_exact_arithmetic(ratio: str, length: int) -> None:
    exact = Fraction(ratio) * length
    kept = Budget.parse(ratio).per_head(length)
    if exact >= Fraction(1, 2):
        assert kept - Fraction(1, 2) <= exact < kept + Fraction(1, 2)
    else:
        assert kept == 1
    assert 1 <= kept <= length


@given(tokens=st.integers(1, 10**9), length=LENGTHS)
def test_tokens_are_kept_as_far_as_there_are_any(tokens: int, length: int) -> None:
    assert Budget.parse(tokens).per_head(length) == min(tokens, length)
    assert Budget.parse(str(tokens)) == Budget.parse(tokens)


@given(ratio=RATIOS, length=LENGTHS)
def test_text_and_float_mean_the_same(ratio: str, length: int) -> None:
    text, number = Budget.parse(ratio), Budget.parse(float(ratio))
    assert text == number
    assert text.per_head(length) == number.per_head(length)


@given(st.one_of(RATIOS, st.integers(1, 10**9).map(str), st.just("full")))
def test_the_canonical_spelling_reads_back(spelling: str) -> None:
    budget = Budget.parse(spelling)
    assert Budget.parse(str(budget)) == budget
    assert str(Budget.parse(str(budget))) == str(budget)


@pytest.mark.parametrize("whole", [1.0, "1.0", "full"])
def test_the_whole_cache_has_one_name(whole: float | str) -> None:
    budget = Budget.parse(whole)
    assert budget.is_full
    assert str(budget) == "full"
    assert budget.per_head(777) == 777


def test_the_integer_one_is_one_token() -> None:
    assert Budget.parse(1).per_head(100) == 1
    assert not Budget.parse("1").is_full


def test_half_an_entry_is_kept() -> None:
    assert Budget.parse("0.5").per_head(5) == 3
    assert Budget.parse("0.15").per_head(10) == 2  # 0.15 * 10 is 1.4999... in floating point


@pytest.mark.parametrize("wrong", ["0", 0, -1, "-0.2", "nan", float("nan"), "inf", 1.5, "1.5", "abc", "", True, "1/0"])
def test_what_is_no_budget_is_refused_in_one_line(wrong: object) -> None:
    with pytest.raises(UserError, match="budget") as caught:
        Budget.parse(wrong)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@given(text=st.integers(1, 10**5), seen=st.integers(1, 10**5), tokens=st.integers(1, 10**5))
def test_a_visual_budget_is_all_text_and_some_visual_tokens(text: int, seen: int, tokens: int) -> None:
    budget = Budget.parse(f"visual:{tokens}")
    assert budget.per_head(text + seen, seen) == text + min(tokens, seen)
    assert budget.per_head(text) == text
    assert budget.absolute is None and str(budget) == f"visual:{tokens}"


def test_a_visual_share_is_a_share_of_the_visual_tokens() -> None:
    assert Budget.parse("visual:0.25").per_head(30 + 16, 16) == 30 + 4
    assert str(Budget.parse("visual:0.25")) == "visual:0.25"
    assert Budget.parse("visual:full").is_full


@pytest.mark.parametrize("spelling", ["visual:", "visual:0", "visual:visual:3", "text:3"])
def test_a_wrong_visual_budget_is_refused(spelling: str) -> None:
    with pytest.raises(UserError, match="use the fraction KEPT"):
        Budget.parse(spelling)
