r"""Numerals with a base, such as `4210_5`: math-verify drops the subscript of a number."""

from __future__ import annotations

import re

_NUMERAL = re.compile(
    r"""(?<![\w\\.])\(?(?P<digits>[0-9A-F]+(?:\.[0-9A-F]+)?)\)?
    \s?_\s?(?:\{\s?\(?(?:base\s)?(?P<group>\w+)\)?\s?\}|(?P<base>\d+|[a-z]))""",
    re.VERBOSE,
)
_NAMES = ("two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen").split()
_BASES = {name: str(base) for base, name in enumerate(_NAMES, 2)}


def canonical(expression: str) -> str:
    """Normalise numerals with a base: digits, `_`, and the base, in decimal if known."""

    def written(match: re.Match[str]) -> str:
        numeral = _read(match)
        return match[0] if numeral is None else f"{numeral[0]}_{numeral[1]}"

    return _NUMERAL.sub(written, expression)


def same_bases(reference: str, answer: str) -> bool:
    """Return whether the numerals of two texts agree, as far as both texts give bases.

    Texts with the same number of numerals must have the same ones, in any order. Otherwise one may be a sum of the
    other's, and only the bases must be the same. A text without a base agrees with every text, because the problem may
    have named the base.
    """
    reference_numerals, answer_numerals = _numerals(reference), _numerals(answer)
    if not reference_numerals or not answer_numerals:
        return True
    if len(reference_numerals) == len(answer_numerals):
        return sorted(reference_numerals) == sorted(answer_numerals)
    return {base for _, base in reference_numerals} == {base for _, base in answer_numerals}


def _numerals(expression: str) -> list[tuple[str, str]]:
    return [numeral for match in _NUMERAL.finditer(expression) if (numeral := _read(match))]


def _read(match: re.Match[str]) -> tuple[str, str] | None:
    """Return digits and base; None for a symbol with an index, such as `2C_1`."""
    base_name = (match["group"] or match["base"]).lower()
    base = _BASES.get(base_name, base_name)
    integer, _, fraction = match["digits"].partition(".")
    if not (integer + fraction).isdigit():  # letters are digits in larger bases only
        largest_digit = max(int(digit, 16) for digit in integer + fraction)
        if not re.fullmatch("[0-9]{1,2}", base) or largest_digit >= int(base):
            return None
    fraction = fraction.rstrip("0")
    return (integer.lstrip("0") or "0") + (f".{fraction}" if fraction else ""), base
