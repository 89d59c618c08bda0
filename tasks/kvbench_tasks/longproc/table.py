"""Compares two tables of tab-separated values, whatever the order of their rows."""

from __future__ import annotations

import csv
import re
import string

_ARTICLES = re.compile(r"\b(a|an|the)\b")

Line = tuple[str, ...]


def row_f1(answer: str, reference: str) -> float:
    """F1 of the rows below the header, each compared as a whole.

    Precision is the share of the answer's rows that are in the reference, recall the share of the
    reference's rows that are in the answer; rows that occur twice count twice. Case, punctuation,
    articles and white space do not count. A row with a wrong number of fields matches no complete
    row; as the last row it is left out, because the answer may be cut there.

    Returns:
        0 to 1; 0 where a table is empty, the numbers of columns differ, or two columns have the
        same name (the official code cannot read such a table).
    """
    try:
        mine, wanted = _rows(answer), _rows(reference)
    except csv.Error:
        return 0.0
    if not mine or not wanted or len(mine[0]) != len(wanted[0]):
        return 0.0
    here, there = set(mine), set(wanted)
    precision = sum(row in there for row in mine) / len(mine)
    recall = sum(row in here for row in wanted) / len(wanted)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _rows(text: str) -> list[Line]:
    header, *body = csv.reader(text.strip().split("\n"), delimiter="\t")
    if len(set(header)) < len(header):
        return []
    if body and len(body[-1]) != len(header):
        body = body[:-1]
    missing = ["N/A"] * len(header)
    return [tuple(map(_bare, line if len(line) == len(header) else missing)) for line in body]


def _bare(cell: str) -> str:
    words = "".join(c for c in cell.lower() if c not in string.punctuation)
    return "".join(_ARTICLES.sub(" ", words).split())
