from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbench.papers.published import claims
from kvbench.papers.published.claims import Claim, Rule, lines
from kvbench.papers.published.results import FIELDS, Figure


def figure(value: str, **fields: str) -> Figure:
    fields = {"metric": "score", "method": fields.get("policy", ""), **fields}
    return Figure(**dict.fromkeys(FIELDS, "") | fields | {"value": value})


def row(policy: str, *cells: tuple[str, str, str], **fields: str) -> list[Figure]:
    """A row of a table from (dataset, metric, value)."""
    return [figure(v, policy=policy, dataset=d, column=d, metric=m, row=policy, **fields) for d, m, v in cells]


def claimed(rule: Rule, figures: Sequence[Figure]) -> list[Claim]:
    return list(rule(lines(figures)))


def scores(*values: str) -> list[tuple[str, str, str]]:
    return [(name, "score", value) for name, value in zip("abc", values, strict=False)]


@pytest.mark.parametrize(
    ("printed", "holds"),
    [("2.0", True), ("1.9", True), ("2.1", True), ("1.8", False), ("2.2", False)],
)
def test_a_mean_may_differ_by_what_rounding_allows(printed: str, holds: bool) -> None:
    figures = row("snapkv", *scores("1.0", "2.0", "3.0"), ("mean", "score", printed))
    (claim,) = claimed(claims.mean("mean"), figures)
    assert claim.computed == pytest.approx(2.0)
    assert claim.bounds == (pytest.approx(1.95), pytest.approx(2.05))
    assert claim.holds is holds


def test_weights_count_a_dataset_more_than_once() -> None:
    figures = row("snapkv", *scores("10.00", "20.00"), ("mean", "score", "12.50"))
    (claim,) = claimed(claims.mean("mean", {"a": 3, "b": 1}), figures)
    assert claim.computed == pytest.approx(12.5)
    assert not claimed(claims.mean("mean"), figures)[0].holds


@pytest.mark.parametrize(
    ("rule", "printed"),
    [
        (claims.loss("x", dataset="a"), "25.0"),
        (claims.share("x", dataset="a"), "75.0"),
        (claims.change("x", dataset="a"), "-25.0"),
    ],
)
def test_what_is_relative_to_full_is_compared_with_the_same_model(rule: Rule, printed: str) -> None:
    figures = [
        *row("full", ("a", "score", "50.00"), model="other"),
        *row("full", ("a", "score", "80.00"), model="m"),
        *row("snapkv", ("a", "score", "60.00"), ("x", "loss %", printed), model="m", budget="5"),
    ]
    (claim,) = claimed(rule, figures)
    assert claim.computed == pytest.approx(float(printed))
    assert claim.holds


def test_bounds_follow_the_sign_of_each_figure() -> None:
    figures = [
        *row("full", ("a", "score", "2")),
        *row("snapkv", ("a", "score", "1"), ("x", "loss %", "50"), budget="5"),
    ]
    (claim,) = claimed(claims.loss("x", dataset="a"), figures)
    # 1 may be 0.5 to 1.5, 2 may be 1.5 to 2.5
    assert claim.bounds == (pytest.approx(0.0), pytest.approx(80.0))


def test_means_of_shares_and_changes_take_the_mean_of_ratios() -> None:
    figures = [
        *row("full", *scores("10.00", "40.00")),
        *row("snapkv", *scores("5.00", "40.00"), ("x", "share %", "75.00"), budget="5"),
    ]
    assert claimed(claims.mean_share("x"), figures)[0].computed == pytest.approx(75)
    assert claimed(claims.mean_change("x"), figures)[0].computed == pytest.approx(-25)
    assert claimed(claims.mean_share("x", lambda f: f.row == "full"), figures) == []


@pytest.mark.parametrize("faster", [True, False])
def test_a_speed_up_is_over_full_on_the_same_dataset(faster: bool) -> None:
    figures = [
        *row("full", ("a", "t", "8.0"), ("b", "t", "1.0")),
        *row("snapkv", ("a", "t", "2.0"), ("a", "speed-up", "4.0"), budget="5"),
    ]
    (claim,) = claimed(claims.speed_up("t", more_is_faster=faster), figures)
    assert claim.computed == (pytest.approx(0.25) if faster else pytest.approx(4.0))


def test_columns_of_a_row_are_divided_and_subtracted() -> None:
    cells = (
        ("whole", "s", "12.0"),
        ("before", "s", "2.0"),
        ("part", "%", "16.7"),
        ("t", "s", "5.0"),
    )
    figures = [figure(v, dataset=d, column=d, metric=m, row="8+2", method="snapkv") for d, m, v in cells]
    (quotient,) = claimed(claims.quotient("part", "before", "whole"), figures)
    (rest,) = claimed(claims.per_token("t", "whole", "before"), figures)
    assert quotient.holds
    assert quotient.computed == pytest.approx(100 / 6)
    assert rest.computed == pytest.approx(5.0)


def test_a_gain_is_over_the_best_of_the_named_methods() -> None:
    figures = [
        figure(v, dataset="a", method=method, row=method, metric=metric)
        for method, metric, v in (
            ("x", "score", "1.0"), ("y", "score", "3.0"), ("z", "score", "9.0"),
            ("ours", "score", "4.0"), ("ours", "gain", "1.0"),
        )
    ]  # fmt: skip
    (claim,) = claimed(claims.gain(["x", "y"]), figures)
    assert claim.computed == pytest.approx(1.0)
