"""Selection of a task's samples by the length of their prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, overload

from kvbench.errors import LeftOut, UserError, quoted

if TYPE_CHECKING:
    from kvbench.harness.protocol import Request

_RANGE = re.compile(r"([0-9]{1,9})?-([0-9]{1,9})?")


@dataclass(frozen=True)
class TokenRange:
    """A range of prompt lengths in tokens, both ends included.

    Attributes:
        least: Fewest tokens.
        most: Most tokens; None: any number.
    """

    least: int = 0
    most: int | None = None

    @classmethod
    def parse(cls, spelling: str) -> TokenRange:
        """Parse `8001-`, `-4096` or `4000-8000`.

        Raises:
            UserError: The spelling is none of these, or no length is in the range.
        """
        match = _RANGE.fullmatch(spelling.strip())
        if not match or match[0] == "-":
            raise UserError(f"prompt_tokens {quoted(spelling)} is not a range; use 8001-, -4096 or 4000-8000")
        token_range = cls(int(match[1] or 0), int(match[2]) if match[2] else None)
        if token_range.most is not None and token_range.most < max(1, token_range.least):
            raise UserError(f"prompt_tokens {quoted(spelling)} contains no length; use 8001-, -4096 or 4000-8000")
        return token_range

    def __str__(self) -> str:
        return f"{self.least or ''}-{'' if self.most is None else self.most}"

    def __contains__(self, token_count: object) -> bool:
        if not isinstance(token_count, int) or token_count < self.least:
            return False
        return self.most is None or token_count <= self.most


@dataclass(frozen=True)
class SelectedRequests(Sequence["Request"]):
    """Some of a task's requests, in their order.

    Attributes:
        requests: All of them.
        indices: Indices of the selected ones.
    """

    requests: Sequence[Request]
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        if isinstance(index, int):
            return self.requests[self.indices[index]]
        return [self.requests[position] for position in self.indices[index]]

    def __iter__(self) -> Iterator[Request]:
        return (self.requests[position] for position in self.indices)


def select_by_length(
    requests: Sequence[Request], token_range: TokenRange, count_tokens: Callable[[Request], int]
) -> SelectedRequests:
    """Select the samples whose longest prompt is in a range; the questions and turns of a sample stay together.

    Args:
        requests: A task's requests; those of one sample are adjacent.
        token_range: The range.
        count_tokens: Tokens of a request's prompt, before anything is truncated.

    Raises:
        LeftOut: No sample is in the range.
    """
    indices: list[int] = []
    sample_lengths: list[int] = []
    for _, sample in groupby(enumerate(requests), lambda numbered: numbered[1].sample_id):
        numbered_requests = [*sample]
        sample_lengths.append(max(count_tokens(request) for _, request in numbered_requests))
        if sample_lengths[-1] in token_range:
            indices += [index for index, _ in numbered_requests]
    if not indices:
        raise LeftOut(
            f"none of its {len(sample_lengths)} samples has a prompt of {token_range} tokens; they have "
            f"{min(sample_lengths)} to {max(sample_lengths)}"
        )
    return SelectedRequests(requests, tuple(indices))
