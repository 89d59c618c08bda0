"""SCBench's metrics (scbench/compute_scores.py), by kind of turn."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any

from kvbench.metrics import f1_words, rouge_lsum
from kvbench_tasks.scbench.repoqa import extract, similarity

Doc = dict[str, Any]

_THRESHOLD = 0.8
"""Minimum similarity of a RepoQA answer to its function."""

_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､"
    "、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE)


def score(doc: Doc, results: list[str]) -> dict[str, float]:
    """Score a response from 0 to 1; called by lm-eval."""
    return {"score": float(_METRICS[doc["kind"]](doc, results[0]))}


def contains(doc: Doc, response: str) -> float:
    """Return 1 if the response contains the answer, case-sensitive."""
    return float(doc["outputs"][0] in response)


def contains_any_case(doc: Doc, response: str) -> float:
    """Return 1 if the response contains the answer, ignoring case."""
    return float(doc["outputs"][0].upper() in response.upper())


def share(doc: Doc, response: str) -> float:
    """Return the fraction of the answers that the response contains, ignoring case."""
    matches = [output.lower() in response.lower() for output in doc["outputs"]]
    return sum(matches) / len(matches)


def choice(doc: Doc, response: str) -> float:
    """Return 1 if the response names the correct option.

    The first match decides: a letter at the beginning; the whole response as an option; the text after "answer is:",
    "answer:", "answer is" or "option is"; a word that is a letter.
    """
    correct_options = doc["outputs"]
    reply = response.strip()
    if not reply:
        return 0.0
    if reply[0] in "ABCD":
        return float(reply[0] in correct_options)
    if reply in correct_options:
        return 1.0
    reply = re.sub(" +", " ", re.sub("[\n\"'.,?!{}]", " ", reply))
    for prefix in ("answer is:", "answer:", "answer is", "option is"):
        _, separator, remainder = reply.partition(prefix)
        if separator:
            return float(remainder[1:].startswith(tuple(correct_options)))  # a space follows it
    letter = next((word for word in reply.split() if word in "ABCD"), "")
    return float(letter in correct_options)


def number(doc: Doc, response: str) -> float:
    """Return 1 if the first number in the response is the answer; for an integer answer, decimals are truncated."""
    match, expected = re.search(r"\d+(?:\.\d+)?", response), doc["outputs"][0]
    if match is None:
        return 0.0
    value = float(match[0])
    return float((value if "." in expected else value // 1) == float(expected))


def digits(doc: Doc, response: str) -> float:
    """Return 1 if the first run of digits in the response is the answer."""
    match = re.search("[0-9]+", response)
    return float(match is not None and match[0] == doc["outputs"][0])


def chinese(doc: Doc, response: str) -> float:
    """Return the F1 over characters, ignoring case, punctuation and white space."""
    return f1_words(_characters(response), _characters(doc["outputs"][0]))


def _characters(text: str) -> list[str]:
    return list("".join(text.lower().translate(_PUNCTUATION).split()))


def summary(doc: Doc, response: str) -> float:
    """Return the ROUGE-Lsum F-measure, without stemming."""
    return rouge_lsum(response, doc["outputs"])


def function(doc: Doc, response: str) -> float:
    """Return 1 if the function asked for is the repository's most similar one, above the threshold.

    Similarity is smoothed BLEU over words (method 4 of Chen and Cherry).
    """
    answer_code = extract(response, doc["lang"])
    best_score, best_name = 0.0, ""
    for candidate, code in zip(doc["names"], doc["codes"], strict=True):
        bleu_score = similarity(answer_code, code)
        if bleu_score > best_score:
            best_score, best_name = bleu_score, candidate
    return float(best_name == doc["name"] and best_score >= _THRESHOLD)


_METRICS: dict[str, Callable[[Doc, str], float]] = {
    "scbench_kv": contains,
    "scbench_prefix_suffix": contains,
    "scbench_vt": share,
    "scbench_repoqa": function,
    "scbench_qa_eng": contains_any_case,
    "scbench_qa_chn": chinese,
    "scbench_choice_eng": choice,
    "scbench_many_shot": contains_any_case,
    "scbench_mf": number,
    "scbench_summary": summary,
    "scbench_passkey": digits,
}
