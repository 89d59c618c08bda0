"""ROUGE-L as LongBench reports it: the `rouge-l` of the package `rouge` 1.0.1.

It differs from ROUGE-L and ROUGE-Lsum of `rouge_score` (`kvbench.metrics`): it splits sentences at
full stops, counts each word once and leaves case and punctuation as they are.
"""

from __future__ import annotations


def union_rouge_l(response: str, reference: str) -> float:
    """F of the union longest common subsequence over sentences (Lin 2004), as `rouge` defines it.

    A full stop ends a sentence, and white space separates words. For each pair of a reference
    sentence and a response sentence, the longest common subsequence is taken; of several, the one
    that a walk back from the ends finds, which leaves a word of the response before one of the
    reference. Let U be the set of all words in these subsequences, R the set of words of the
    reference and C that of the response. Recall is |U| / |R|, precision |U| / |C|, and
    F = 2PR / (P + R + 1e-8). The score is 0 where either text has no sentence. A sentence of white
    space alone has one word, the empty one.
    """
    found, wanted = _sentences(response), _sentences(reference)
    if not found or not wanted:
        return 0.0
    union: set[str] = set()
    for sentence in wanted:
        for other in found:
            union |= _common(sentence, other)
    precision = len(union) / len({word for sentence in found for word in sentence})
    recall = len(union) / len({word for sentence in wanted for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common(wanted: list[str], found: list[str]) -> set[str]:
    """Words of a longest common subsequence of two sentences."""
    words = set(found)
    table = [[0] * (len(found) + 1)]
    for word in wanted:
        if word not in words:  # the row is the same as the one above
            table.append(table[-1])
            continue
        above, row, left = table[-1], [0], 0
        for j, other in enumerate(found):
            left = above[j] + 1 if word == other else max(above[j + 1], left)
            row.append(left)
        table.append(row)
    common = set()
    i, j = len(wanted), len(found)
    while i and j:
        if wanted[i - 1] == found[j - 1]:
            common.add(wanted[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return common
