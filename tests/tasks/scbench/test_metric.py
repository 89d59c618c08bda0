"""SCBench's metrics, compared with numbers worked out by hand from their definitions."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench_tasks.scbench.metric import score
from kvbench_tasks.scbench.repoqa import extract, similarity


def got(kind: str, response: str, *outputs: str, **fields: Any) -> float:
    return score({"kind": f"scbench_{kind}", "outputs": list(outputs), **fields}, [response])["score"]


def test_retrieval_needs_the_exact_string() -> None:
    assert got("kv", 'It is "ab-12".', "ab-12") == 1
    assert got("kv", "It is AB-12.", "ab-12") == 0
    assert got("prefix_suffix", "xab-12y", "ab-12") == 1


def test_variable_tracking_counts_the_variables() -> None:
    assert got("vt", "abc, XYZ", "ABC", "XYZ", "QQQ", "RRR") == pytest.approx(2 / 4)


def test_english_answers_match_in_any_case() -> None:
    assert got("qa_eng", "I think OSKAR did.", "Oskar") == 1
    assert got("qa_eng", "Nobody", "Oskar") == 0
    assert got("many_shot", "(a) it is", "(A)") == 1
    # The official loop over the characters of "(B)" would take the bracket for the answer.
    assert got("many_shot", "(a) it is", "(B)") == 0


def test_chinese_answers_are_compared_by_character() -> None:
    # 2 of the 5 characters of the response are the 2 of the answer: P = 2/5, R = 1, F1 = 4/7.
    assert got("qa_chn", "洪水冲渡船！", "渡船。") == pytest.approx(4 / 7)
    assert got("qa_chn", "渡 船", "渡船。") == 1


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("C. At the north quay", 1),
        ("A", 0),
        ("At the north quay", 0),  # begins with a letter, as the official code has it
        ("the answer is: C", 1),
        ('I would say the "answer is" C', 1),
        ("the option is B", 0),
        ("the answer is:", 0),
        ("it must be C I think", 1),
        ("it must be B or C", 0),
        ("", 0),
        ("who knows", 0),
    ],
)
def test_choices(response: str, right: int) -> None:
    assert got("choice_eng", response, "At the north quay", "C") == right


def test_numbers() -> None:
    assert got("mf", "The number is 42, not 7.", "42") == 1
    assert got("mf", "42.9", "42") == 1
    assert got("mf", "4 2", "42") == 0
    assert got("mf", "none", "42") == 0
    assert got("mf", "4" * 400, "42") == 0  # beyond what a float holds
    assert got("mf", "It is 4.5", "4.5") == 1
    assert got("mf", "4.7", "4.5") == got("mf", "4", "4.5") == 0
    assert got("passkey", "It is 71300.", "71300") == 1
    assert got("passkey", "1: 71300", "71300") == 0


def test_summaries_are_rouge_l_over_lines() -> None:
    # 3 of 4 words of the response in order in the 5 of the answer: P = 3/4, R = 3/5, F = 2/3.
    assert got("summary", "mules carry old letters", "the mules carry grey letters") == (pytest.approx(2 / 3))
    assert got("summary", "", "mules") == 0


CODE = "def one(x):\n    return x + 1"
OTHER = "def two(y, z):\n    y = y * z\n    return y - z"


def test_the_function_must_be_the_most_similar_and_similar_enough() -> None:
    fields = {"lang": "python", "name": "one", "names": ["one", "two"], "codes": [CODE, OTHER]}
    assert got("repoqa", f"```python\n{CODE}\n```", CODE, **fields) == 1
    assert got("repoqa", CODE, CODE, **fields) == 1
    assert got("repoqa", f"```python\n{OTHER}\n```", CODE, **fields) == 0
    assert got("repoqa", "return x + 1", CODE, **fields) == 0
    assert got("repoqa", "", CODE, **fields) == 0


def test_similarity_is_bleu() -> None:
    assert similarity("a b c d", "a b c d") == 1
    # 1- to 4-grams shared: 4/5, 3/4, 2/3, 1/2; no brevity penalty at equal lengths.
    assert similarity("a b c d x", "a b c d e") == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 / 2) ** 0.25)


def test_code_is_taken_out_of_its_block() -> None:
    block = f"Sure!\n```python\nimport os\n\n{CODE}\n\n{OTHER}\n```\nDone."
    assert extract(block, "python") == CODE
    assert extract("Sure!\n```go\nfunc f() {}\n```\n", "go") == "func f() {}\n"
    assert extract("```python\nnot code (\n```", "python") == "not code (\n"
    assert extract(f"```\nx = 1\n```\n```\n{CODE}\n```", "python") == CODE
    assert extract(" no block ", "python") == "no block"
