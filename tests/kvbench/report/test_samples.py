"""Samples that are grouped once, against pandas that searches all of them."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvbench.report.sorted_samples import Samples

KEY = ["context_id", "sample_id", "question_id", "repeat"]


def frame(rows: int = 400) -> pd.DataFrame:
    """Random samples of four cells in no order; some responses occur twice."""
    rng = np.random.default_rng(0)
    names = np.array(["é", "b", "10", "9", "a" * 20])
    return pd.DataFrame(
        {
            "cell": rng.choice(["c1", "c2", "c3", "c4"], rows),
            "context_id": names[rng.integers(0, 5, rows)],
            "sample_id": names[rng.integers(0, 5, rows)],
            "question_id": rng.integers(0, 3, rows),
            "repeat": rng.integers(0, 2, rows),
            "score": rng.random(rows),
        }
    )


@pytest.mark.parametrize("coded", [False, True])
def test_scores_side_by_side_are_those_of_a_pivot_table(coded: bool) -> None:
    plain = frame()
    given = plain.astype(dict.fromkeys(["cell", *KEY[:2]], "category")) if coded else plain
    values, codes = Samples(given).wide(["c3", "none", "c1"])
    known = plain[plain["cell"].isin(["c1", "c3"])].drop_duplicates(["cell", *KEY], keep="last")
    wide = known.pivot(index=KEY, columns="cell", values="score")
    wide = wide.reindex(columns=["c3", "none", "c1"])
    np.testing.assert_array_equal(values, wide.to_numpy())
    assert codes.tolist() == wide.index.get_level_values(0).factorize(sort=True)[0].tolist()


def test_the_last_score_of_a_response_counts() -> None:
    plain = frame()
    samples = Samples(plain)
    known = plain.drop_duplicates(["cell", *KEY], keep="last")
    assert len(samples) == len(known) < len(plain)
    pd.testing.assert_frame_equal(samples.of(["c2", "c4"]), known[known["cell"].isin(["c2", "c4"])])


def test_no_samples_are_no_samples() -> None:
    samples = Samples(frame()[:0])
    assert len(samples) == len(samples.of(["c1"])) == 0
    assert samples.wide(["c1"])[0].shape == (0, 1)
