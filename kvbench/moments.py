"""The moments at which a cache can be compressed, and how they are spelled."""

from __future__ import annotations

import typing
from typing import Literal

from kvbench.errors import UserError, nearest

Moment = Literal["context", "question", "decode", "chunked", "turns"]
"""When a cache is compressed.

`context`: the context, before the question is seen. `question`: context and question. `decode`: an
absolute budget holds while the answer is generated. `chunked`: the prompt comes in chunks, and the
cache is cut back after each. `turns`: before every new turn of a dialogue.
"""

MOMENTS: tuple[Moment, ...] = typing.get_args(Moment)

LATER: tuple[Moment, ...] = ("decode", "chunked", "turns")
"""The moments at which a cache may be cut more than once."""

CHUNK = 3072
"""Tokens of a chunk where `chunked` names none (LocRet, arXiv 2410.01805)."""


def split_moment(spelling: str) -> tuple[Moment, int]:
    """Part a moment's spelling: `chunked:512` is (`chunked`, 512); others have chunk size 0.

    Raises:
        UserError: There is no such moment, or a chunk size that is not one.
    """
    name, colon, size = spelling.partition(":")
    moment = next((m for m in MOMENTS if m == name), None)
    if moment is None:
        hint = nearest(name, MOMENTS) or f"; there are {', '.join(MOMENTS)}"
        raise UserError(f"unknown moment {spelling!r}{hint}")
    if moment != "chunked":
        if colon:
            raise UserError(f"moment {spelling!r}: {name} takes no number")
        return moment, 0
    if not colon:
        return moment, CHUNK
    if not size.isdecimal() or not 1 <= int(size) < 2**31:
        raise UserError(f"moment {spelling!r}: tokens of a chunk, as chunked:512, would be right")
    return moment, int(size)
