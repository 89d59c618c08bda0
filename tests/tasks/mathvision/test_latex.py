"""What LaTeX means, and which answers are equal: results of the authors' code, which was run."""

from __future__ import annotations

import pytest

from kvbench_tasks.mathvision.equal import is_equal
from kvbench_tasks.mathvision.latex import value

VALUES = {
    "1,234.5": 1234.5,
    ".5": 0.5,
    "3.": 3,
    "50\\%": 0.5,
    "$2\\pi$": 6.283185,
    "\\frac{\\sqrt{3}}{2}": 0.866025,
    "\\dfrac{4}{2}": 2.0,
    "1\\frac{1}{2}": 0.5,
    "\\sqrt[3]{8}": 2.0,
    "6/2\\pi": 0.954930,
    "6/2*3": 9.0,
    "2 3": 6,
    "2^3^2": 64,
    "-3^2": -9,
    "2 - -3": 5,
    "2\\times10^{-3}": 0.002,
    "1:4": 0.25,
    "9\\over 3": 3.0,
    "{4\\choose 2}": 6,
    "4\\choose 2": 4,
    "\\binom{4}{2}": 6,
    "3!!": 720,
    "\\left(2+1\\right)^2": 9,
    "\\lfloor 2.5\\rfloor": 2,
    "\\log 1000": 3.0,
    "\\log_2 8": 3.0,
    "\\sin^2(1)": 0.708073,
    "\\sin^{-1}(1)": 1.570796,
    "\\sin 2\\pi\\cos 3": 0.0,
    "e^{2}": 7.389056,
    "x_1=4": 4,
    "x=y=3": 3,
    "3<4": 1,
    "\\displaystyle \\frac{3}{4}": 0.75,
    # Reading ends where nothing can go on.
    "\\frac{4}{9}}.\\end{align*": 0.444444,
    "5triangles": 5,
    "3)": 3,
    "5_2": 5,
    "5\\end{pmatrix}": 5,
}
NO_VALUE = (
    "120^{\\circ}", "-\\!2", "18\\$", "2π", "50%", "3;", "3?", "\\frac12", "\\sqrt2", "2^-1", "",
    "x", "2x", "5 cm", "5\\text{cm}", "|3|", "\\ln 2", "\\infty", "e", "\\cot(1)", "12,13", "[1,2]",
    "(1,2)", "3=3", "5=a", "x+1=3", "3+", "[3", "1/0", "\\sqrt{-1}", "\\max(1,2)", "7\\mod 3",
    "(1/2)!",
)  # fmt: skip


@pytest.mark.parametrize("text", VALUES)
def test_an_expression_has_its_value(text: str) -> None:
    found = value(text)
    assert found == pytest.approx(VALUES[text], abs=1e-6)
    assert isinstance(found, int) == isinstance(VALUES[text], int)


def rounded(text: str) -> float | None:
    try:
        return round(value(text), 2)
    except Exception:
        return None


@pytest.mark.parametrize("text", NO_VALUE)
def test_what_the_authors_code_cannot_read_or_evaluate_has_no_value(text: str) -> None:
    assert rounded(text) is None


@pytest.mark.parametrize(
    ("reference", "answer", "equal"),
    [
        ("B", "b", True),
        ("$2\\sqrt{3}$", "\\sqrt{12}", True),
        ("$80-2 \\pi$", "80-2\\pi", True),
        ("$80-2 \\pi$", "80-2π", False),
        ("$120^{\\circ}$", "120", False),
        ("\\frac{1}{3}", "0.333", True),
        ("\\frac{1}{3}", "0.34", False),
        ("(2*3,4)", "(6,4.00)", True),
        ("(6,4)", "[6,4]", False),
        ("(\\infty,a)", "(\\infty,a)", True),
        ("3", " ", False),
        ("", "", False),
        ("x", "y", False),
    ],
)
def test_answers_are_equal_as_text_as_tuples_or_to_two_decimals(reference: str, answer: str, equal: bool) -> None:
    assert is_equal(reference, answer) is equal
