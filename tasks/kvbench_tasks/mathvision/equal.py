"""Equality of an answer and the reference, by the rules of MATH-Vision's authors.

Both are compared as text without regard to case, then element by element if they are tuples, then as numbers to two
decimals.
"""

from __future__ import annotations

from kvbench_tasks.mathvision.latex import value

_BRACKETS = ("()", "[]")


def is_equal(reference: str, answer: str) -> bool:
    """Return whether an answer in LaTeX equals the reference; an empty text equals nothing."""
    reference_text, answer_text = reference.lower(), answer.lower()
    if not reference_text.strip(" ") or not answer_text.strip(" "):
        return False
    if reference_text.strip() == answer_text.strip():
        return True
    reference_text, answer_text = _elements(reference_text), _elements(answer_text)
    if reference_text == answer_text:
        return True
    try:
        return round(value(reference_text), 2) == round(value(answer_text), 2)
    except Exception:  # also of arithmetic: division by zero, overflow, complex numbers
        return False


def _elements(expression: str) -> str:
    """Format the elements of a tuple or list as numbers with two decimals; return other texts unchanged."""
    elements = expression[1:-1].split(",")
    if len(elements) < 2 or expression[0] + expression[-1] not in _BRACKETS:
        return expression
    try:
        numbers = [
            element if "infty" in element or element in ("a", "-a") else str(round(value(element), 2))
            for element in elements
        ]
    except Exception:
        return expression
    return expression[0] + ",".join(numbers) + expression[-1]
