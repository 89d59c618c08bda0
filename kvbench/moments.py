"""The moments at which a cache can be compressed, and how they are spelled."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

from kvbench.errors import UserError, quoted, unknown

Moment = Literal["context", "question", "decode", "chunked", "turns"]
"""When a cache is compressed.

`context`: the context, before the question is seen. `question`: context and question. `decode`: an
absolute budget holds while the answer is generated. `chunked`: the prompt comes in chunks, and the
cache is cut back after each. `turns`: before every new turn of a dialogue.
"""

MOMENTS: tuple[Moment, ...] = typing.get_args(Moment)

LATER: tuple[Moment, ...] = ("decode", "chunked", "turns")
"""The moments at which a cache can be cut more than once."""

CHUNK = 3072
"""Default tokens of a chunk at moment `chunked` (LocRet, arXiv 2410.01805)."""


@dataclass(frozen=True)
class Timing:
    """A moment, with the chunk size at moment `chunked`.

    Attributes:
        moment: When the cache is compressed.
        chunk: Tokens of a chunk at moment `chunked`; 0 at all others.
    """

    moment: Moment
    chunk: int = 0

    @classmethod
    def parse(cls, spelling: str) -> Timing:
        """Read a moment: `context`, `chunked` or `chunked:512`.

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
        # Python reads no integer of more than 4,300 digits.
        if not (chunk_size.isdecimal() and len(chunk_size) <= 10 and 1 <= int(chunk_size) < 2**31):
            raise UserError(f"moment {quoted(spelling)}: the chunk size is not a number of tokens; use chunked:512")
        return cls(moment, int(chunk_size))

    def __str__(self) -> str:
        if self.moment == "chunked" and self.chunk != CHUNK:
            return f"chunked:{self.chunk}"
        return self.moment
