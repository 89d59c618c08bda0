r"""Extraction of the answer in `\boxed{...}`."""

from __future__ import annotations

import re

_PIECE = re.compile(
    r"""\\boxed\s*(?:(?P<open>\{)|(?P<bare>-?\w[\w./]*))  # a box, or one token right after it
    | \\.  # any other escape: \{ and \} are not braces
    | (?P<brace>[{}])""",
    re.VERBOSE | re.DOTALL,
)


def boxed(solution: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` of a text, stripped of white space.

    Braces within the box are balanced; the innermost of nested boxes counts. `\boxed 5` counts, too; an unclosed box
    does not. The text is parsed in one pass.

    Returns:
        The content, or None without a box.
    """
    last_box: tuple[int, str] | None = None
    content_starts: list[int | None] = []  # start of a box's content; None for any other brace
    for match in _PIECE.finditer(solution):
        if match["open"]:
            content_starts.append(match.end())
        elif match["bare"]:
            last_box = _latest_box(last_box, match.start("bare"), match["bare"].rstrip("."))
        elif match["brace"] == "{":
            content_starts.append(None)
        elif match["brace"] == "}" and content_starts:
            start = content_starts.pop()
            if start is not None:
                last_box = _latest_box(last_box, start, solution[start : match.start()])
    return None if last_box is None else last_box[1].strip()


def _latest_box(last_box: tuple[int, str] | None, start: int, content: str) -> tuple[int, str]:
    return last_box if last_box is not None and last_box[0] > start else (start, content)
