"""Sentences of an analysis of causes."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvbench.analysis.causes.diagnosis import ELSEWHERE, HEAD, NOT_FOUND, RIGHT, VALUES
from kvbench.analysis.causes.frames import CELL
from kvbench.analysis.causes.swaps import EVIDENCE, NOT_REPRODUCED
from kvbench.analysis.causes.tables import sentences

_CELL = dict(zip(CELL, ("m", "t", 64, "question", "snapkv", "0.2"), strict=True))


def row(verdict: str, give: bool | None = None, heads: str = "", **more: Any) -> dict[str, Any]:
    """A sample; what is given and taken counts if `give` is set."""
    sets = {"heads": heads, "n_heads": len(heads.split()), "layers": "", "n_layers": 0, "anchors": ""}
    random = {"give_random_right": False, "take_random_right": True}
    return {
        **_CELL,
        "informed": False,
        "verdict": verdict,
        "give_right": give,
        "take_right": not give,
        "source": "",
        **random,
        **sets,
        **more,
    }


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    made = pd.DataFrame(rows)
    return made.astype(dict.fromkeys(made.filter(like="_right"), "boolean"))


def test_a_sentence_counts_every_verdict_and_names_layers_and_heads() -> None:
    samples = frame(
        row(RIGHT),
        row(HEAD, True, "3.0", source="search"),
        row(ELSEWHERE, False, anchors="recent tokens"),
        row(NOT_FOUND),
        row(VALUES),
    )
    (text,) = sentences(samples, pd.DataFrame(columns=CELL), None, {"snapkv": "SnapKV"}.__getitem__)
    assert text == (
        "SnapKV at 0.2 (t, question, 64 tokens) loses 4 of the 5 questions that the full cache answers (80%, 95% CI "
        "38% to 96%): giving the evicted evidence (found by a search in 1) back restores 1 of 2, and the full cache "
        "loses 1 of 2 without it; as many random entries restore 0 and lose 0; in the median, 1 KV head of it is "
        "enough (most often layer 3, head 0 in 1); the evidence needs recent tokens in 1 as well; in 1, the keys and "
        "values that it writes are at fault; in 1, no evidence was found."
    )


def test_a_sentence_about_two_policies_counts_what_has_no_evidence() -> None:
    pairs = [
        {**_CELL, "explained": explained, "take_others_evidence_right": not lost, "heads": heads, "layers": "3",
         "swapped_back": lost}
        for explained, lost, heads in ((EVIDENCE, True, "3.0"), (NOT_FOUND, False, ""), (NOT_REPRODUCED, True, ""))
    ]  # fmt: skip
    _, text = sentences(frame(row(NOT_FOUND)), frame(*pairs), "h2o")
    assert text == (
        "Of the 3 questions that snapkv at 0.2 (t, question, 64 tokens) loses and h2o answers, the entries of h2o that "
        "bring the answer back are those of the evidence in 1; h2o loses 1 of 1 without the evidence that only it "
        "keeps; in 1, masks do not reproduce the difference; in 1, no evidence was found; most often swapped: layer 3 "
        "in 2; layer 3, head 0 in 1, and swapping the same units back loses 2."
    )
