"""Formatting of numbers: points, percentages, bytes and intervals."""

from __future__ import annotations

import math
from enum import StrEnum

MINUS = "\N{MINUS SIGN}"
DASH = "\N{EN DASH}"
BETTER, WORSE = "\N{SUPERSCRIPT PLUS SIGN}", "\N{SUPERSCRIPT MINUS}"
"""Marks for numbers that are significantly better or worse than a reference."""
_FIXED = {"points": (100, ""), "rating": (10, ""), "percent": (100, "%")}
"""Scale and unit of the formats that show a number in [0, 1] on another scale."""
LEAST_P = 0.001
"""p-values below this are shown as smaller than it."""
_ROUNDING = 1e-12
"""Relative error of a mean that does not change how it is rounded."""
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class NumberFormat(StrEnum):
    """Kind of a column's numbers, which determines their format."""

    TEXT = "text"
    POINTS = "points"
    """A score in [0, 1], shown as 0 to 100 with one decimal."""
    RATING = "rating"
    """A rating in [0, 1], shown on the judge's scale up to 10 with two decimals."""
    NUMBER = "number"
    """Any number, with four significant digits."""
    PERCENT = "percent"
    """A share in [0, 1] as a percentage."""
    BYTES = "bytes"
    """Bytes with a binary unit and three significant digits."""
    COUNT = "count"
    """An integer, or the mean of integers with one decimal."""
    TIMES = "times"
    """A factor, such as `2.78×`."""
    P_VALUE = "p"
    """A p-value, with two significant digits; `<0.001` below that."""


def number(value: float, kind: NumberFormat, *, signed: bool = False, digits: int | None = None) -> str:
    """Format a number.

    Args:
        value: The number; NaN gives a dash.
        kind: Format of the number.
        signed: Whether to write a plus sign before a positive number.
        digits: Number of decimals, instead of the format's own.
    """
    if math.isnan(value):
        return DASH
    if digits is None or math.isinf(value):
        ascii_text = _bare(value, kind)
    else:
        scale, unit = _FIXED.get(kind, (1, ""))
        ascii_text = f"{_fixed(scale * value, digits)}{unit}"
    unsigned_text = ascii_text.lstrip("-")
    if ascii_text.startswith("-") and unsigned_text.strip("0.%×"):
        return MINUS + unsigned_text
    return "+" + unsigned_text if signed and unsigned_text.strip("0.%×") else unsigned_text


def interval(lower: float, upper: float, kind: NumberFormat, *, signed: bool = False) -> str:
    """Format an interval, such as `[−6.0, −0.4]`; NaN ends give a dash."""
    if math.isnan(lower) or math.isnan(upper):
        return DASH
    bounds = (number(bound, kind, signed=signed).rstrip("%×") for bound in (lower, upper))
    return f"[{', '.join(bounds)}]"


def score_kind(*, unit_scaled: bool) -> NumberFormat:
    """Return the format of scores: points if the task is scored in [0, 1], else plain numbers."""
    return NumberFormat.POINTS if unit_scaled else NumberFormat.NUMBER


def percent(share: float) -> str:
    """Format a fraction as a percentage."""
    return number(share, NumberFormat.PERCENT)


def size(byte_count: float) -> str:
    """Format bytes with a binary unit."""
    return number(byte_count, NumberFormat.BYTES)


def _bare(value: float, kind: NumberFormat) -> str:
    """Format a number with an ASCII minus sign, which a rounded zero may keep."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    match kind:
        case NumberFormat.POINTS:
            return _fixed(100 * value, 1)
        case NumberFormat.RATING:
            return _fixed(10 * value, 2)
        case NumberFormat.PERCENT:
            # From 99.95%, the text is 100%; `verdict.cheapest` does not count that as a saving either.
            return f"{_fixed(100 * value, 0 if abs(value) >= 0.9995 else 1)}%"
        case NumberFormat.BYTES:
            return _size(value)
        case NumberFormat.COUNT:
            return _fixed(value, 1).removesuffix(".0")
        case NumberFormat.TIMES:
            return f"{_fixed(value, 2)}×"
        case NumberFormat.P_VALUE:
            return f"<{LEAST_P:g}" if value < LEAST_P else f"{value:.2g}"
        case _:
            return _four_digits(value)


def _fixed(value: float, digits: int) -> str:
    """Format with decimals; ties go away from zero, also where the last bits of a mean put it just below one."""
    return f"{value * (1 + _ROUNDING):.{digits}f}"


def _four_digits(value: float) -> str:
    """Format with four significant digits, trailing zeros included, so that the numbers of a column align."""
    rounded = float(f"{value:.4g}")
    if not 1e-4 <= abs(rounded) < 1e6:
        return f"{rounded:g}"
    return f"{rounded:.{max(0, 3 - math.floor(math.log10(abs(rounded))))}f}"


def _size(byte_count: float) -> str:
    byte_units = list(_BYTE_UNITS)
    while byte_count >= 999.5 and len(byte_units) > 1:
        byte_count /= 1024
        del byte_units[0]
    decimals = 0 if byte_units[0] == "B" or byte_count >= 99.95 else 1 if byte_count >= 9.995 else 2
    return f"{byte_count:.{decimals}f} {byte_units[0]}"
