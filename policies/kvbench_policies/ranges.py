"""Range checks of parameters, with one-line errors that name the parameter, its value and the valid range."""

from __future__ import annotations

import math

from kvbench.errors import UserError


def check_count(parameter: str, value: int, minimum: int, unit: str = "tokens") -> None:
    """Reject a count below `minimum`.

    Raises:
        UserError: The value is too small.
    """
    if value < minimum:
        raise UserError(f"{parameter}={value} is too small; use {minimum} or more {unit}")


def check_odd(parameter: str, value: int) -> None:
    """Reject a width that is not odd and positive.

    Raises:
        UserError: The value is even or below 1.
    """
    if value < 1 or value % 2 == 0:
        raise UserError(f"{parameter}={value} is not an odd number; use 1, 3, 5 or more entries")


def check_share(parameter: str, value: float) -> None:
    """Reject a number outside [0, 1].

    Raises:
        UserError: The value is out of range.
    """
    if not 0 <= value <= 1:
        raise UserError(f"{parameter}={value} is out of range; use a number from 0 to 1")


def check_finite(parameter: str, value: float, minimum: float) -> None:
    """Reject a number that is infinite, NaN or below `minimum`.

    Raises:
        UserError: The value is out of range.
    """
    if not (math.isfinite(value) and value >= minimum):
        raise UserError(f"{parameter}={value} is out of range; use a finite number, {minimum:g} or more")
