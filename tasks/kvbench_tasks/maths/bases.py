r"""Numerals with a base, such as `4210_5`: math-verify drops the subscript of a number."""

from __future__ import annotations

import re

_NUMERAL = re.compile(
    r"""(?<![\w\\.])\(?(?P<digits>[0-9A-F]+(?:\.[0-9A-F]+)?)\)?
    \s?_\s?(?:\{\s?\(?(?:base\s)?(?P<group>\w+)\)?\s?\}|(?P<base>\d+|[a-z]))""",
    re.VERBOSE,
)
_NAMES = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
).split()
_BASES = {name: str(base) for base, name in enumerate(_NAMES, 2)}


def canonical(text: str) -> str:
    """Write all numerals with a base in one way: digits, `_`, and the base, in decimal if known."""

    def written(found: re.Match[str]) -> str:
        numeral = _read(found)
        return found[0] if numeral is None else f"{numeral[0]}_{numeral[1]}"

    return _NUMERAL.sub(written, text)


def same_bases(gold: str, answer: str) -> bool:
    """Whether the numerals of two texts agree, as far as both texts give bases.

    Texts with equally many numerals must have the same ones, in any order. Otherwise one of them
    may be a sum of the other's, and only the bases that occur must be the same. A text without any
    base agrees with every text: the problem may have named the base.
    """
    wanted, found = _numerals(gold), _numerals(answer)
    if not wanted or not found:
        return True
    if len(wanted) == len(found):
        return sorted(wanted) == sorted(found)
    return {base for _, base in wanted} == {base for _, base in found}


def _numerals(text: str) -> list[tuple[str, str]]:
    return [numeral for found in _NUMERAL.finditer(text) if (numeral := _read(found))]


def _read(found: re.Match[str]) -> tuple[str, str] | None:
    """Digits and base; None for a symbol with an index, such as `2C_1`."""
    name = (found["group"] or found["base"]).lower()
    base = _BASES.get(name, name)
    whole, _, fraction = found["digits"].partition(".")
    if not (whole + fraction).isdigit():  # letters are digits in larger bases only
        highest = max(int(digit, 16) for digit in whole + fraction)
        if not re.fullmatch("[0-9]{1,2}", base) or highest >= int(base):
            return None
    fraction = fraction.rstrip("0")
    return (whole.lstrip("0") or "0") + (f".{fraction}" if fraction else ""), base
