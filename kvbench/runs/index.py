"""Compact index of the responses in a run's journal."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import TypeAlias

from kvbench.files import Place

Key: TypeAlias = tuple[str, str, int, int]
"""A response's key: (cell, sample_id, question_id, repeat)."""


@dataclass(slots=True)
class _Cell:
    """The responses of a cell, in journal order.

    Attributes:
        requests: Request number of each response.
        starts: Byte offset of each response.
        sizes: Size of each response in bytes.
        base: Smallest request number.
        done: Bit set of requests: bit `i` stands for the request `base + i`.
    """

    requests: array[int] = field(default_factory=lambda: array("I"))
    starts: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("I"))
    base: int = 0
    done: int = 0

    def add(self, request_number: int, location: Place, *, done: bool) -> None:
        """Record where a response is, and whether its request is done."""
        if not self.requests:
            self.base = request_number
        elif request_number < self.base:
            self.done <<= self.base - request_number
            self.base = request_number
        self.requests.append(request_number)
        self.starts.append(location[0])
        self.sizes.append(location[1])
        bit = 1 << (request_number - self.base)
        self.done = self.done | bit if done else self.done & ~bit

    def has(self, request_number: int) -> bool:
        """Return whether a request is done."""
        return request_number >= self.base and bool(self.done >> (request_number - self.base) & 1)


class ResponseIndex:
    """Locations of a run's responses, by cell.

    A response takes 16 bytes and a bit. The index is this small because cells share requests: a request is numbered
    once, and the cells of one task have numbers close to each other.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int, int], int] = {}
        self._cells: dict[str, _Cell] = {}

    def add(self, key: Key, location: Place, *, done: bool) -> None:
        """Record a response.

        Args:
            key: Its key. A later response replaces an earlier one.
            location: Its location in the journal.
            done: Whether it answers the request; an error does not.
        """
        cell_name, sample, question, repeat = key
        request_number = self._numbers.setdefault((sample, question, repeat), len(self._numbers))
        indexed_cell = self._cells.get(cell_name)
        if indexed_cell is None:
            indexed_cell = self._cells[cell_name] = _Cell()
        indexed_cell.add(request_number, location, done=done)

    def done(self) -> Set[Key]:
        """Return a live set of the keys whose last response answers the request."""
        return _Done(self._numbers, self._cells)

    def places(self, cell: str) -> list[Place]:
        """Return the location of each request's last response, ordered by first response."""
        return [last_place for _, last_place in self._first_and_last(cell)]

    def all_places(self) -> list[Place]:
        """Return `places` of all cells in one order."""
        place_pairs = [pair for cell in self._cells for pair in self._first_and_last(cell)]
        return [last_place for _, last_place in sorted(place_pairs)]

    def _first_and_last(self, cell_name: str) -> list[tuple[int, Place]]:
        """Return the offset of the first response and the location of the last one, by request."""
        if (cell := self._cells.get(cell_name)) is None:
            return []
        pairs: dict[int, tuple[int, Place]] = {}
        for request, start, size in zip(cell.requests, cell.starts, cell.sizes, strict=True):
            first_start, _ = pairs.get(request, (start, None))
            pairs[request] = first_start, (start, size)
        return list(pairs.values())


class _Done(Set[Key]):
    """The keys of the done requests, as a set that is never materialised."""

    def __init__(self, numbers: dict[tuple[str, int, int], int], cells: dict[str, _Cell]) -> None:
        self._numbers, self._cells = numbers, cells

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, tuple) or len(key) != 4:
            return False
        indexed_cell, request_number = self._cells.get(key[0]), self._numbers.get(key[1:])
        return indexed_cell is not None and request_number is not None and indexed_cell.has(request_number)

    def __len__(self) -> int:
        return sum(cell.done.bit_count() for cell in self._cells.values())

    def __iter__(self) -> Iterator[Key]:
        request_keys = list(self._numbers)
        for cell_name, cell in self._cells.items():
            for bit_index in range(cell.done.bit_length()):
                if cell.done >> bit_index & 1:
                    yield (cell_name, *request_keys[cell.base + bit_index])
