"""Excerpts of a prompt for the result tables: where a reference answer occurs in it, and its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, zip_longest
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]
"""Begin and end of a part of a text."""

END = 400
"""Number of characters at the end of a prompt that are kept."""
_AROUND = 120
"""Characters kept on either side of a reference answer."""
_MOST_EXCERPTS = 6
_MOST_OCCURRENCES = 8
"""A text that occurs more often, such as `no`, does not show where the answer comes from."""
_REFERENCE_LENGTHS = range(2, END)
"""Lengths of the references to search for: a single letter names a choice, and a long text is a summary."""


def prompt_excerpt(prompt: str, references: Iterable[str]) -> str:
    """Return the end of a prompt, after excerpts from before it in which reference answers occur verbatim.

    Omitted text is marked by `…`. The first occurrence of every reference comes before any second one if there are too
    many.
    """
    end_begin = max(0, len(prompt) - END)
    spans_by_reference = [
        list(islice(_occurrences(prompt, reference), _MOST_OCCURRENCES + 1)) for reference in _searchable(references)
    ]
    rare_spans = [spans for spans in spans_by_reference if len(spans) <= _MOST_OCCURRENCES]
    in_turns = (span for turn in zip_longest(*rare_spans) for span in turn if span is not None)
    hidden_spans = [span for span in in_turns if span[0] < end_begin][:_MOST_EXCERPTS]
    windows = [(max(0, begin - _AROUND), min(len(prompt), end + _AROUND)) for begin, end in hidden_spans]
    pieces = []
    for begin, end in _merged([*windows, (end_begin, len(prompt))]):
        pieces.append("…" * (begin > 0) + prompt[begin:end] + "…" * (end < len(prompt)))
    return "\n".join(pieces)


def reference_spans(text: str, references: Iterable[str]) -> list[Span]:
    """Return where reference answers occur verbatim in a text, as whole words, in order and without overlap."""
    return _merged(chain.from_iterable(_occurrences(text, reference) for reference in _searchable(references)))


def _searchable(references: Iterable[str]) -> list[str]:
    stripped = dict.fromkeys(reference.strip() for reference in references)
    return [reference for reference in stripped if len(reference) in _REFERENCE_LENGTHS]


def _occurrences(text: str, reference: str) -> Iterator[Span]:
    begin = text.find(reference)
    while begin >= 0:
        end = begin + len(reference)
        if not (_joined(text[begin - 1 : begin], reference[0]) or _joined(reference[-1], text[end : end + 1])):
            yield begin, end
        begin = text.find(reference, end)


def _joined(left: str, right: str) -> bool:
    """Return whether two adjacent characters belong to one word; other scripts do not separate words by spaces."""
    return (left + right).isascii() and left.isalnum() and right.isalnum()


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, with those that touch or overlap as one."""
    merged_spans: list[Span] = []
    for begin, end in sorted(spans):
        if merged_spans and begin <= merged_spans[-1][1]:
            merged_spans[-1] = (merged_spans[-1][0], max(end, merged_spans[-1][1]))
        else:
            merged_spans.append((begin, end))
    return merged_spans
