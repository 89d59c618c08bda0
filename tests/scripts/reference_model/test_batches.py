"""Batches have a target for every answer token and for nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.reference import samples
from kvbench.reference.samples import Knobs
from scripts.reference_model.batches import make_batch
from scripts.reference_model.curriculum import CURRICULUM, Stage


def test_batches_supervise_the_answers_and_nothing_else() -> None:
    mix = dict.fromkeys(samples.TASKS, 1.0)
    batch = make_batch(np.random.default_rng(3), 24, 160, mix, Knobs())
    assert batch.ids.shape == (24, 160)
    np.testing.assert_allclose(np.bincount(batch.slots, weights=batch.weights), 1, atol=1e-6)
    # The token that follows a supervised position is one of its targets.
    after = batch.ids.reshape(-1)[batch.positions + 1]
    hit = np.zeros(len(batch.positions), dtype=bool)
    np.logical_or.at(hit, batch.slots, after[batch.slots] == batch.targets)
    assert hit.all()
    assert batch.spans[0][1] == 0
    assert batch.spans[-1][2] == len(batch.positions)


def test_same_seed_gives_the_same_batch() -> None:
    mix = {"mixed": 1.0, "cwe": 1.0}
    first, second = (make_batch(np.random.default_rng([1, 5]), 8, 128, mix, Knobs()) for _ in range(2))
    np.testing.assert_array_equal(first.ids, second.ids)
    np.testing.assert_array_equal(first.targets, second.targets)


@pytest.mark.parametrize("stage", CURRICULUM, ids=lambda stage: stage.name)
def test_every_stage_of_the_curriculum_can_be_drawn(stage: Stage) -> None:
    for feed in stage.feeds:
        assert set(feed.mix) <= set(samples.TASKS)
        for length in sorted(set(feed.lengths))[:2]:
            make_batch(np.random.default_rng(0), 4, length, feed.mix, stage.knobs)
