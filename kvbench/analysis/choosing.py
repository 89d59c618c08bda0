"""Parsing and validation of analysis options, and selection of layers and heads to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvbench.errors import UserError
from kvbench.runs.options import ANALYSIS, declare


def select_numbers(requested: tuple[int, ...] | None, available: Sequence[int], flag: str, max_count: int) -> list[int]:
    """Select layers or heads to draw.

    Args:
        requested: Requested numbers; None for a few, evenly spaced, and empty for all.
        available: Those of the model.
        flag: Name of the option, `layers` or `heads`.
        max_count: Maximum number selected if `requested` is None.

    Raises:
        UserError: A requested number does not exist in the model.
    """
    for number in requested or ():
        if number not in available:
            kind = "full-attention layers" if flag == "layers" else "KV heads"
            raise UserError(f"--{flag} {number}: the model's {kind} are {_ranges(available)}")
    if requested:
        return list(requested)
    if requested is not None:
        return list(available)
    return evenly_spaced(available, max_count)


def evenly_spaced(numbers: Sequence[int], max_count: int) -> list[int]:
    """Return at most `max_count` of the numbers, evenly spaced, including the first and the last."""
    if len(numbers) <= max_count:
        return list(numbers)
    spacing = (len(numbers) - 1) / max(1, max_count - 1)
    return [numbers[round(index * spacing)] for index in range(max_count)]


def _ranges(numbers: Sequence[int]) -> str:
    """Format 0, 1, 2, 3, 7 as `0 to 3, 7`."""
    intervals: list[list[int]] = []
    for number in numbers:
        if intervals and number == intervals[-1][-1] + 1:
            intervals[-1].append(number)
        else:
            intervals.append([number])
    return ", ".join(
        f"{interval[0]} to {interval[-1]}" if len(interval) > 1 else str(interval[0]) for interval in intervals
    )


def split_commas(comma_text: str | Sequence[str]) -> list[str]:
    """Return the distinct parts of one or more comma-separated texts."""
    comma_texts = [comma_text] if isinstance(comma_text, str) else comma_text
    return list(
        dict.fromkeys(
            element.strip() for comma_list in comma_texts for element in comma_list.split(",") if element.strip()
        )
    )


def parse_integers(flag: str, numerals: list[str], example: str) -> tuple[int, ...]:
    """Parse a list of integers.

    Args:
        flag: Name of the option.
        numerals: The numbers as texts.
        example: Example for the error message.

    Raises:
        UserError: A value is not an integer, or the list is empty.
    """
    for numeral in numerals:
        if not (numeral.isascii() and numeral.isdecimal()):
            raise UserError(f"--{flag} {numeral}: use comma-separated whole numbers, such as {example}")
    if not numerals:
        raise UserError(f"--{flag} names nothing; use {example}")
    return tuple(int(numeral) for numeral in numerals)


def drawn(flag: str, metavar: str) -> Any:
    """Declare an option with the layers or heads to draw."""
    what = {"layers": "Layers", "heads": "KV heads"}[flag]
    help_text = f"{what} to draw, comma-separated, or all. Default: a few."
    return declare(None, _integers_or_all(flag), str, ANALYSIS, metavar, help_text)


def _integers_or_all(flag: str) -> Callable[[Any], tuple[int, ...] | None]:
    """Return a parser of comma-separated integers: None gives None, and `all` an empty tuple."""

    def read(value: Any) -> tuple[int, ...] | None:
        if value is None or isinstance(value, tuple):
            return value
        numerals = split_commas(value)
        return () if numerals == ["all"] else parse_integers(flag, numerals, "0,3, or all")

    return read
