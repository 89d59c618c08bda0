"""LongProc's scores, compared with verdicts worked out by hand from their definitions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvbench_tasks.longproc.metric import score


def got(kind: str, response: str, reference: str = "", **metadata: Any) -> float:
    doc = {"kind": kind, "outputs": [reference], "metadata": json.dumps(metadata)}
    return score(doc, [response])["score"]


@pytest.mark.parametrize(
    ("lines", "right"),
    [
        ("6 + 3 = 9\n9 + 8 = 17\n17 + 2 = 19", 1),  # not the reference's, but a way
        ("8+3=11\n11 + 6 = 17\n 17 + 2 = 19 ", 1),
        ("6 * 3 = 18\n8 / 2 = 4\n18 + 4 = 22", 0),  # not the target
        ("6 + 3 = 10\n10 + 8 = 18\n18 + 1 = 19", 0),  # wrong sum, and 1 is not there
        ("6 + 3 = 9\n9 + 8 = 17\n17 + 3 = 20", 0),  # 3 is used up
        ("6 + 3 = 9\n9 + 8 = 17", 0),
        ("6 + 3 = 9\n9 + 8 = 17\n17 + 2 = 19\n", 1),  # white space around the equations
        ("First, 6 + 3 = 9\n9 + 8 = 17\n17 + 2 = 19", 0),
        ("6 + 3 + 8 + 2 = 19", 0),
        ("__import__('os') + 3 = 9\n9 + 8 = 17\n17 + 2 = 19", 0),
    ],
)
def test_countdown_checks_every_equation(lines: str, right: int) -> None:
    response = f"# Search Procedure\n...\n<Solution>\n{lines}\n</Solution>"
    assert got("countdown", response, nums=[6, 3, 8, 2], target=19) == right


def test_countdown_divides_without_rest() -> None:
    right = "<Solution>\n8 / 2 = 4\n4 * 6 = 24\n24 - 3 = 21\n</Solution>"
    wrong = "<Solution>\n8 / 3 = 2\n6 + 2 = 8\n8 + 2 = 10\n</Solution>"
    zero = "<Solution>\n3 - 3 = 0\n5 / 0 = 0\n0 + 4 = 4\n</Solution>"
    assert got("countdown", right, nums=[6, 3, 8, 2], target=21) == 1
    assert got("countdown", wrong, nums=[6, 3, 8, 2], target=10) == 0
    assert got("countdown", zero, nums=[3, 3, 5, 4], target=4) == 0


def test_endless_numbers_are_not_an_equation() -> None:
    line = "1" * 100_000
    assert got("countdown", f"<Solution>\n{line} + 1 = 2\n\n</Solution>", nums=[1], target=2) == 0
    three = "\n".join([f"{line} * {line} = 1"] * 3)
    assert got("countdown", f"<Solution>{three}</Solution>", nums=[6, 3, 8, 2], target=1) == 0


ROUTE = "From Bern, take a train to Oslo.\nFrom Oslo, take a ferry to Riga."


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (f"<Route>\n{ROUTE}\n</Route>", 1),
        (f"Sure: <Route>{ROUTE}</Route> Good trip!", 1),
        (f"<think>\n<Route>\nno\n</Route>\n</think>\n<Route>\n{ROUTE}\n</Route>", 1),
        (ROUTE, 0),
        (f"<Route>\n{ROUTE}", 0),
        ("<Route>\nFrom Bern, take a train to Oslo.\n</Route>", 0),
        (f"<Route>\n{ROUTE.replace('ferry', 'bus')}\n</Route>", 0),
    ],
)
def test_a_route_is_the_route(response: str, right: int) -> None:
    assert got("path_traversal", response, ROUTE + "\n") == right


TRACE = (
    "Ida's belief on the pen:\n"
    "- Step 0: (initial state) {Ida location: hall; Ida's belief on pen: None}\n"
    "- Step 1: (Ida location changed) {Ida location: den; Ida's belief on pen: den's table}\n"
    "Final Answer: the den's table"
)


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (TRACE, 1),
        (TRACE.replace("Final Answer: the den's table", ""), 1),  # the trace is what counts
        (TRACE.replace("(initial state)", "Initial state:").replace("; ", " "), 1),
        (TRACE.replace("Ida location:", "the location of Ida is"), 1),  # idle words
        (TRACE.replace("Ida location: den", "den: location of Ida"), 0),  # another order of words
        (TRACE.replace("den's table}", "hall's table}"), 0),
        ("\n".join(TRACE.split("\n")[:2]), 0),
        (TRACE + "\n- Step 2: (done)", 0),
        (TRACE.replace("- Step 1:", "- **Step 1:**"), 1),  # punctuation does not count
        (TRACE.replace("- Step 1:", "-Step 1:"), 1),
        (TRACE.replace("- Step 1:", "* Step 1:"), 0),  # not a hyphen
        (TRACE.replace("- Step 1:", "  - Step 1:"), 0),  # indented
        (TRACE.replace("- Step 0:", "  - Step 0:"), 1),  # but the first line's indent is stripped
        ("- Step 0: let me see\n- Step 1: hm\n" + TRACE, 0),  # all lines count
        ("the den's table", 0),
        ("", 0),
    ],
)
def test_a_trace_of_beliefs_is_the_trace(response: str, right: int) -> None:
    assert got("tom_tracking", response, TRACE) == right


PLAN = (
    "**Day 1-3:** Arriving in Bern and visit Bern for 3 days.\n"
    "**Day 3:** Fly from Bern to Oslo.\n"
    "**Day 3-6:** Visit Oslo for 4 days.\n"
    "**Day 6:** Fly from Oslo to Riga.\n"
    "**Day 6-7:** Visit Riga for 2 days."
)
TRIP = {"ground_truth_cities": "Bern**Oslo**Riga", "ground_truth_durations": "3**4**2"}


@pytest.mark.parametrize(
    ("plan", "right"),
    [
        (PLAN, 1),
        (f"You visit 3 European cities for 7 days:\n{PLAN}\nOr else:\n**Day 1-9:** stay", 1),
        (f"{PLAN}\nOr else:\n**Day 1-9:** stay", 0),  # then Riga would last until day 9
        (PLAN.replace("Riga", "Rome"), 0),
        (PLAN.replace("**Day 3:** Fly", "**Day 4:** Fly"), 0),  # Bern 4 days, Oslo 3
        ("\n".join(PLAN.split("\n")[:3]), 0),
        (PLAN.replace("Day 3:", f"Day {'3' * 5000}:"), 0),  # longer than Python reads numbers
        ("Bern, Oslo, Riga", 0),
        ("", 0),
    ],
)
def test_a_trip_has_the_cities_and_their_days(plan: str, right: int) -> None:
    assert got("travel_planning", f"<Plan>\n{plan}\n</Plan>", **TRIP) == right
    assert got("travel_planning", plan, **TRIP) == 0


TABLE = "name\tprice\nThe Oak\t4.50\nElm\t3\nFir\t7\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (TABLE, 1),
        ("Name\tPrice\nfir\t7\nelm\t3\noak\t$4.50", 1),  # order, case, articles, punctuation
        # 2 of 2 rows are right, 2 of 3 are found: P = 1, R = 2/3, F1 = 4/5.
        ("name\tprice\nElm\t3\nFir\t7", 4 / 5),
        # The row with three fields counts as wrong: P = 2/3, R = 2/3.
        ("name\tprice\nThe Oak\t4\t50\nElm\t3\nFir\t7", 2 / 3),
        # As the last one it is taken for a rest and left out.
        ("name\tprice\nElm\t3\nFir\t7\nThe Oa", 4 / 5),
        # Elm twice: P = 2/3 (Elm, Elm, not Ash), R = 1/3, F1 = 4/9.
        ("name\tprice\nElm\t3\nElm\t3\nAsh\t3", 4 / 9),
        ("name\nElm\nFir\nOak", 0),
        ("name\tprice", 0),
        ("name\tname\nElm\t3\nFir\t7", 0),  # two columns of the same name
        ("", 0),
        ('name\tprice\n"Elm\t3\nFir\t7', 0),  # a quote that never closes
    ],
)
def test_f1_of_a_tables_rows(answer: str, expected: float) -> None:
    assert got("html_to_tsv", f"Here:\n```tsv\n{answer}\n```", TABLE) == pytest.approx(expected)


def test_a_table_may_be_cut_off_or_have_no_fence() -> None:
    assert got("html_to_tsv", TABLE, TABLE) == 1
    cut = f"```tsv\n{TABLE[:-3]}"  # the fence and the last row's price are missing
    assert got("html_to_tsv", cut, TABLE) == pytest.approx(4 / 5)
