"""Differences over seeds and within them, on frames whose numbers are known."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from kvbench.report.overall import MEMORY
from scripts.ablations.contrast import Contrast, contrasts, markdown, pooled
from scripts.ablations.recipe import Ablation, Variant

CONTEXTS = 10
NAMES = {"a0": ("A", 0), "a1": ("A", 1), "b0": ("B", 0), "b1": ("B", 1)}
SCORES = {  # of the contexts: right ones first
    "full": 10,
    "a0": 4,
    "a1": 6,
    "b0": 7,
    "b1": 8,
}


def _frames(scores: dict[str, int]) -> tuple[pd.DataFrame, pd.DataFrame]:
    cells, samples = [], []
    for policy, right in scores.items():
        cells.append(
            {
                "model": "m",
                "model_revision": "",
                "group": "ruler",
                "task": "vt",
                "length": 512,
                "seed": 0,
                "dtype": "float32",
                "device": "cpu",
                "attention": "sdpa",
                "moment": "" if policy == "full" else "context",
                "policy": policy,
                "budget": "full" if policy == "full" else "0.2",
                "cell": f"cell-{policy}",
                "status": "ok",
                "samples": CONTEXTS,
                "discriminative": True,
                "informed": False,
                "metric": "m",
                "is_mean": True,
                "higher_is_better": True,
                "score": right / CONTEXTS,
                **dict.fromkeys(MEMORY, 1.0),
                **dict.fromkeys(("score_lo", "score_hi", "diff", "diff_lo", "diff_hi"), math.nan),
            }
        )
        samples += [
            {
                "cell": f"cell-{policy}",
                "context_id": f"{i}",
                "sample_id": f"{i}",
                "question_id": 0,
                "repeat": 0,
                "score": float(i < right),
            }
            for i in range(CONTEXTS)
        ]
    return pd.DataFrame(cells), pd.DataFrame(samples)


def test_seeds_are_repeats_of_the_same_questions() -> None:
    cells, samples = pooled(*_frames(SCORES), NAMES)
    assert list(cells["policy"]) == ["A", "B"]
    assert set(samples["cell"]) == {"cell-a0", "cell-b0"}
    assert len(samples) == 4 * CONTEXTS
    assert sorted(samples["repeat"].unique()) == [0, 1]
    of_second = samples[(samples["cell"] == "cell-a0") & (samples["repeat"] == 1)]
    assert of_second["score"].sum() == SCORES["a1"]


def test_differences_are_means_over_the_seeds() -> None:
    by_variant = contrasts(*_frames(SCORES), NAMES)
    (base,), (other,) = by_variant["A"], by_variant["B"]
    assert base.place == other.place == ("ruler", 512, "context", "0.2")
    assert base.score == pytest.approx((4 + 6) / 20)
    assert base.by_seed == pytest.approx((0.4, 0.6))
    assert math.isnan(base.diff)
    assert other.score == pytest.approx((7 + 8) / 20)
    assert other.diff == pytest.approx((3 + 2) / 20)
    assert other.by_seed == pytest.approx((0.7, 0.8))
    assert other.lo < other.diff < other.hi


def test_a_variant_with_a_failed_seed_has_no_numbers() -> None:
    cells, samples = _frames(SCORES)
    cells.loc[cells["policy"] == "b1", "status"] = "error"
    by_variant = contrasts(cells, samples, NAMES)
    assert by_variant["B"] == []


@pytest.mark.parametrize(
    ("lo", "hi", "by_seed", "direction"),
    [
        (0.1, 0.3, (0.7, 0.8), "better"),
        (-0.3, -0.1, (0.3, 0.2), "worse"),
        (-0.1, 0.3, (0.7, 0.8), ""),
        (0.1, 0.5, (0.9, 0.5), ""),  # below a training of the first
        (-0.5, -0.1, (0.1, 0.5), ""),
        (math.nan, math.nan, (math.nan, math.nan), ""),
    ],
)
def test_a_direction_needs_the_interval_and_every_training(
    lo: float, hi: float, by_seed: tuple[float, ...], direction: str
) -> None:
    place = ("g", 1, "context", "0.2")
    first = Contrast(place, 0.5, (0.4, 0.6))
    assert Contrast(place, 0.7, by_seed, 0.2, lo, hi).direction(first) == direction


def test_the_table_says_whether_the_paper_agrees() -> None:
    place = ("ruler", 512, "context", "0.2")
    rows = {
        "A": [Contrast(place, 0.5, (0.45, 0.55))],
        "B": [Contrast(place, 0.4, (0.38, 0.42), -0.1, -0.15, -0.05)],
        "C": [Contrast(place, 0.6, (0.58, 0.62), 0.1, 0.05, 0.15)] * 2,
        "D": [Contrast(place, 0.5, (0.4, 0.6), 0.0, -0.05, 0.05)],
    }
    variants = (
        Variant("A", "trimkv", paper=(50.0, 60.0)),
        Variant("B", "trimkv", paper=(40.0, 50.0)),
        Variant("C", "trimkv", paper="worse"),
        Variant("D", "trimkv", paper=(55.0, 50.0)),
    )
    table = Ablation("x", "Parts", "Table 1", ("64", "128"), variants)
    lines = markdown(table, rows).splitlines()
    assert lines[6].endswith("| 50.0 | 45.0, 55.0 | – |  | 50 at 64, 60 at 128 |")
    assert lines[7].split(" | ")[3:5] == ["38.0, 42.0", "−10.0 [−15.0, −5.0]"]
    assert lines[7].endswith("| worse, as in the paper | 40 at 64, 50 at 128 |")
    assert lines[8].endswith("| better, unlike the paper | worse |")
    assert lines[9].endswith("| better, unlike the paper |  |")  # the paper's score is in the first row only
    assert lines[10].endswith("| not clear | 55 at 64, 50 at 128 |")
    assert len({line.count("|") for line in lines[4:]}) == 1
