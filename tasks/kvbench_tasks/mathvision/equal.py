"""Whether an answer equals the reference, by the rules of MATH-Vision's authors.

Both are compared as text without regard to case, then element by element if they are tuples, then
as numbers to two decimals.
"""

from __future__ import annotations

from kvbench_tasks.mathvision.latex import value

_BRACKETS = ("()", "[]")


def is_equal(reference: str, answer: str) -> bool:
    """Compare an answer in LaTeX with the reference; nothing equals an empty text."""
    first, second = reference.lower(), answer.lower()
    if not first.strip(" ") or not second.strip(" "):
        return False
    if first.strip() == second.strip():
        return True
    first, second = _elements(first), _elements(second)
    if first == second:
        return True
    try:
        return round(value(first), 2) == round(value(second), 2)
    except Exception:  # also of arithmetic: division by zero, overflow, complex numbers
        return False


def _elements(text: str) -> str:
    """A tuple or list with its elements as numbers of two decimals; other texts as they are."""
    parts = text[1:-1].split(",")
    if len(parts) < 2 or text[0] + text[-1] not in _BRACKETS:
        return text
    try:
        numbers = [
            part if "infty" in part or part in ("a", "-a") else str(round(value(part), 2))
            for part in parts
        ]
    except Exception:
        return text
    return text[0] + ",".join(numbers) + text[-1]
