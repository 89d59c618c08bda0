"""Options of analyses: what users name, how it is checked, and which layers and heads to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvbench.errors import UserError


def chosen(wanted: tuple[int, ...] | None, there: Sequence[int], flag: str, most: int) -> list[int]:
    """Which layers or heads to draw.

    Args:
        wanted: Those that are named; None for some, evenly spaced, and empty for all.
        there: Those that the model has.
        flag: What the user calls them, `layers` or `heads`.
        most: How many at most if none is named.

    Raises:
        UserError: The model does not have one that is named.
    """
    for one in wanted or ():
        if one not in there:
            kind = "full-attention layers" if flag == "layers" else "KV heads"
            raise UserError(f"--{flag} {one}: the model's {kind} are {_ranges(there)}")
    if wanted:
        return list(wanted)
    if wanted is not None:
        return list(there)
    return spread(there, most)


def spread(numbers: Sequence[int], most: int) -> list[int]:
    """At most that many of some numbers, evenly spaced, with the first and the last."""
    if len(numbers) <= most:
        return list(numbers)
    gap = (len(numbers) - 1) / max(1, most - 1)
    return [numbers[round(i * gap)] for i in range(most)]


def _ranges(numbers: Sequence[int]) -> str:
    """`0 to 3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{r[0]} to {r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


def parts(value: str | Sequence[str]) -> list[str]:
    """The different parts of a text with commas, or of several."""
    texts = [value] if isinstance(value, str) else value
    return list(dict.fromkeys(p.strip() for text in texts for p in text.split(",") if p.strip()))


def whole(flag: str, listed: list[str], right: str) -> tuple[int, ...]:
    """Read whole numbers.

    Args:
        flag: What the user calls them.
        listed: The numbers as texts.
        right: What the message recommends.

    Raises:
        UserError: One is not a whole number, or there is none.
    """
    for one in listed:
        if not (one.isascii() and one.isdecimal()):
            raise UserError(f"--{flag} {one}: use whole numbers with commas, such as {right}")
    if not listed:
        raise UserError(f"--{flag} names nothing; use {right}")
    return tuple(int(one) for one in listed)


def whole_or_all(flag: str, value: str | Sequence[str]) -> tuple[int, ...]:
    """Read whole numbers; `all` is empty.

    Raises:
        UserError: One is not a whole number, or there is none.
    """
    listed = parts(value)
    return () if listed == ["all"] else whole(flag, listed, "0,3, or all")


def check_least(options: object, least: Mapping[str, int]) -> None:
    """Check that options, by attribute, are whole numbers from some least one, or None.

    Raises:
        UserError: One is smaller.
    """
    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {value}: use a whole number from {smallest}")


def plain_values(options: Any) -> dict[str, Any]:
    """A dataclass of options as plain lists and values."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(options).items()}
