"""The moments at which a cache can be compressed, and their spelling."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from kvbench.errors import UserError, quoted, unknown

Moment = Literal["context", "question", "decode", "chunked", "turns"]
"""When a cache is compressed.

`context`: after the context, before the question is seen. `question`: after context and question. `decode`: also while
the answer is generated; a fraction as budget refers to the prompt. `chunked`: after each chunk of the prompt. `turns`:
before every new turn of a dialogue.
"""

MOMENTS: tuple[Moment, ...] = typing.get_args(Moment)

LATER: tuple[Moment, ...] = ("decode", "chunked", "turns")
"""The moments with more than one eviction step."""

CHUNK = 3072
"""Default chunk size in tokens at moment `chunked` (LocRet, arXiv 2410.01805)."""


@dataclass(frozen=True)
class Timing:
    """A moment, with the chunk size at moment `chunked`.

    Attributes:
        moment: When the cache is compressed.
        chunk: Chunk size in tokens at moment `chunked`; 0 at all others.
    """

    moment: Moment
    chunk: int = 0

    @classmethod
    def parse(cls, spelling: str) -> Timing:
        """Parse a moment such as `context`, `chunked` or `chunked:512`.

        Raises:
            UserError: The moment is unknown, or the chunk size is not a number.
        """
        moment_name, separator, chunk_size = spelling.partition(":")
        moment = next((candidate for candidate in MOMENTS if candidate == moment_name), None)
        if moment is None:
            raise unknown("moment", spelling, MOMENTS)
        if moment != "chunked":
            if separator:
                raise UserError(f"moment {quoted(spelling)}: {moment_name} takes no number; use {moment_name}")
            return cls(moment)
        if not separator:
            return cls(moment, CHUNK)
        # Python refuses to parse integers of more than 4,300 digits.
        if not (chunk_size.isdecimal() and len(chunk_size) <= 10 and 1 <= int(chunk_size) < 2**31):
            raise UserError(f"moment {quoted(spelling)}: the chunk size is not a number of tokens; use chunked:512")
        return cls(moment, int(chunk_size))

    def __str__(self) -> str:
        if self.moment == "chunked" and self.chunk != CHUNK:
            return f"chunked:{self.chunk}"
        return self.moment
