"""Comparison of two tables of tab-separated values, regardless of row order."""

from __future__ import annotations

import csv
import re
import string

_ARTICLES = re.compile(r"\b(a|an|the)\b")

Line = tuple[str, ...]


def row_f1(answer: str, reference: str) -> float:
    """Return the F1 of the rows below the header, each compared as a whole.

    Precision is the fraction of the answer's rows in the reference, recall that of the reference's rows in the answer;
    duplicates count separately. Case, punctuation, articles and white space are ignored. A row with a wrong number of
    fields matches no complete row; as the last row, it is dropped, because the answer may be truncated there.

    Returns:
        0 to 1; 0 if a table is empty, the numbers of columns differ, or two columns have the same name (the official
        code cannot parse such a table).
    """
    try:
        answer_rows, reference_rows = _rows(answer), _rows(reference)
    except csv.Error:
        return 0.0
    if not answer_rows or not reference_rows or len(answer_rows[0]) != len(reference_rows[0]):
        return 0.0
    answer_set, reference_set = set(answer_rows), set(reference_rows)
    precision = sum(row in reference_set for row in answer_rows) / len(answer_rows)
    recall = sum(row in answer_set for row in reference_rows) / len(reference_rows)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _rows(tsv_text: str) -> list[Line]:
    header, *body_rows = csv.reader(tsv_text.strip().split("\n"), delimiter="\t")
    if len(set(header)) < len(header):
        return []
    if body_rows and len(body_rows[-1]) != len(header):
        body_rows = body_rows[:-1]
    placeholder_row = ["N/A"] * len(header)
    return [tuple(map(_bare, fields if len(fields) == len(header) else placeholder_row)) for fields in body_rows]


def _bare(cell: str) -> str:
    letters = "".join(character for character in cell.lower() if character not in string.punctuation)
    return "".join(_ARTICLES.sub(" ", letters).split())
