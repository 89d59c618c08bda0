"""SCBench's metrics (scbench/compute_scores.py), by what a turn asks for."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any

from kvbench.metrics import f1_words, rouge_lsum
from kvbench_tasks.scbench.repoqa import extract, similarity

Doc = dict[str, Any]

_THRESHOLD = 0.8
"""Least similarity of a RepoQA answer to its function."""

_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､"
    "、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE)


def score(doc: Doc, results: list[str]) -> dict[str, float]:
    """The score of a response, from 0 to 1; called by lm-eval."""
    return {"score": float(_METRICS[doc["kind"]](doc, results[0]))}


def contains(doc: Doc, response: str) -> float:
    """1 if the response contains the answer; case counts."""
    return float(doc["outputs"][0] in response)


def contains_any_case(doc: Doc, response: str) -> float:
    """1 if the response contains the answer, ignoring case."""
    return float(doc["outputs"][0].upper() in response.upper())


def share(doc: Doc, response: str) -> float:
    """The share of the answers that the response contains, ignoring case."""
    found = [output.lower() in response.lower() for output in doc["outputs"]]
    return sum(found) / len(found)


def choice(doc: Doc, response: str) -> float:
    """1 if the response names the right option.

    The first of these that the response has decides: a letter at its beginning; the whole response
    as an option; what follows "answer is:", "answer:", "answer is" or "option is"; a word that is a
    letter.
    """
    right = doc["outputs"]
    said = response.strip()
    if not said:
        return 0.0
    if said[0] in "ABCD":
        return float(said[0] in right)
    if said in right:
        return 1.0
    said = re.sub(" +", " ", re.sub("[\n\"'.,?!{}]", " ", said))
    for begin in ("answer is:", "answer:", "answer is", "option is"):
        _, mark, rest = said.partition(begin)
        if mark:
            return float(rest[1:].startswith(tuple(right)))  # a space follows it
    letter = next((word for word in said.split() if word in "ABCD"), "")
    return float(letter in right)


def number(doc: Doc, response: str) -> float:
    """1 if the first number in the response is the answer; decimals of a whole answer are cut."""
    found, wanted = re.search(r"\d+(?:\.\d+)?", response), doc["outputs"][0]
    if found is None:
        return 0.0
    said = float(found[0])
    return float((said if "." in wanted else said // 1) == float(wanted))


def digits(doc: Doc, response: str) -> float:
    """1 if the first run of digits in the response is the answer."""
    found = re.search("[0-9]+", response)
    return float(found is not None and found[0] == doc["outputs"][0])


def chinese(doc: Doc, response: str) -> float:
    """F1 over characters, without case, punctuation and white space."""
    return f1_words(_characters(response), _characters(doc["outputs"][0]))


def _characters(text: str) -> list[str]:
    return list("".join(text.lower().translate(_PUNCTUATION).split()))


def summary(doc: Doc, response: str) -> float:
    """ROUGE-Lsum, F-measure, no stemming."""
    return rouge_lsum(response, doc["outputs"])


def function(doc: Doc, response: str) -> float:
    """1 if the function asked for is the repository's most similar one, and similar enough.

    Similarity is BLEU over words, smoothed (method 4 of Chen and Cherry).
    """
    said = extract(response, doc["lang"])
    best, name = 0.0, ""
    for candidate, code in zip(doc["names"], doc["codes"], strict=True):
        found = similarity(said, code)
        if found > best:
            best, name = found, candidate
    return float(name == doc["name"] and best >= _THRESHOLD)


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
