r"""Finds the answer that a solution puts into `\boxed{...}`."""

from __future__ import annotations

import re

_PIECE = re.compile(
    r"""\\boxed\s*(?:(?P<open>\{)|(?P<bare>-?\w[\w./]*))  # a box, or one token right after it
    | \\.  # any other escape: \{ and \} are not braces
    | (?P<brace>[{}])""",
    re.VERBOSE | re.DOTALL,
)


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` of a text, stripped of white space.

    Braces within the box are balanced; of nested boxes the innermost counts. `\boxed 5` counts too.
    A box that is never closed does not count. The text is read in one pass.

    Returns:
        The content, or None where there is no box.
    """
    found: tuple[int, str] | None = None
    opened: list[int | None] = []  # start of a box's content; None for any other brace
    for piece in _PIECE.finditer(text):
        if piece["open"]:
            opened.append(piece.end())
        elif piece["bare"]:
            found = _later(found, piece.start("bare"), piece["bare"].rstrip("."))
        elif piece["brace"] == "{":
            opened.append(None)
        elif piece["brace"] == "}" and opened:
            begin = opened.pop()
            if begin is not None:
                found = _later(found, begin, text[begin : piece.start()])
    return None if found is None else found[1].strip()


def _later(found: tuple[int, str] | None, begin: int, content: str) -> tuple[int, str]:
    return found if found is not None and found[0] > begin else (begin, content)
