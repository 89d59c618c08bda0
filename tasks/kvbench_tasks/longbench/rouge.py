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
    response_sentences, reference_sentences = _sentences(response), _sentences(reference)
    if not response_sentences or not reference_sentences:
        return 0.0
    common_words: set[str] = set()
    for sentence in reference_sentences:
        for candidate in response_sentences:
            common_words |= _common(sentence, candidate)
    precision = len(common_words) / len({word for sentence in response_sentences for word in sentence})
    recall = len(common_words) / len({word for sentence in reference_sentences for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common(reference: list[str], response: list[str]) -> set[str]:
    """Words of a longest common subsequence of two sentences."""
    response_words = set(response)
    lengths = [[0] * (len(response) + 1)]
    for word in reference:
        if word not in response_words:  # the row is the same as the one above
            lengths.append(lengths[-1])
            continue
        previous_row, length_row, left_length = lengths[-1], [0], 0
        for response_index, candidate in enumerate(response):
            left_length = (
                previous_row[response_index] + 1
                if word == candidate
                else max(previous_row[response_index + 1], left_length)
            )
            length_row.append(left_length)
        lengths.append(length_row)
    common_words = set()
    reference_index, response_index = len(reference), len(response)
    while reference_index and response_index:
        if reference[reference_index - 1] == response[response_index - 1]:
            common_words.add(reference[reference_index - 1])
            reference_index, response_index = reference_index - 1, response_index - 1
        elif lengths[reference_index - 1][response_index] > lengths[reference_index][response_index - 1]:
            reference_index -= 1
        else:
            response_index -= 1
    return common_words
