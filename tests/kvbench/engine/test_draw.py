"""Drawn tokens: the distribution is transformers', the noise belongs to the response alone."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvbench.decoding import Sampling
from kvbench.engine.draw import Draw, choose, gumbel, most_likely, warped

SAMPLINGS = [
    Sampling(0.6, 0.95, 20),
    Sampling(1.7, 0.5),
    Sampling(0.3, 1.0, 3),
    Sampling(1.0, 0.05, 7),
    Sampling(2.0, 0.9, 10_000),
    Sampling(),
]


def logits(rows: int, tokens: int, ties: bool) -> torch.Tensor:
    made = torch.randn(rows, tokens, generator=torch.Generator().manual_seed(rows)) * 3
    return (made * 2).round() / 2 if ties else made


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_warpers_are_those_of_transformers(sampling: Sampling, ties: bool) -> None:
    raw = logits(5, 101, ties)
    ids = torch.zeros(5, 1, dtype=torch.long)
    want = TemperatureLogitsWarper(sampling.temperature)(ids, raw)  # type: ignore[arg-type]
    if sampling.top_k:
        want = TopKLogitsWarper(sampling.top_k)(ids, want)  # type: ignore[arg-type]
    if sampling.top_p < 1:
        want = TopPLogitsWarper(sampling.top_p)(ids, want)  # type: ignore[arg-type]
    got = warped(raw, sampling)
    if ties and sampling.top_p < 1:  # which of equal tokens goes is nobody's promise: how many is
        assert torch.equal(got.isfinite().sum(-1), want.isfinite().sum(-1))
        assert torch.equal(got.sort(-1).values, want.sort(-1).values)
    else:
        assert torch.equal(got, want)
    assert got.isfinite().any(-1).all()


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    row = torch.tensor([[1.0, 0.0, 2.0, -1.0, 1.5]])
    sampling = Sampling(0.8, 1.0, 4)
    draws = 8000
    steps = list(range(draws))
    tokens = choose(row.expand(draws, -1), [Draw(sampling, (0, "t", "0", 0, 0))] * draws, steps)
    seen = torch.bincount(torch.tensor(tokens), minlength=5) / draws
    want = warped(row, sampling).softmax(-1)[0]
    assert want[3] == 0 and seen[3] == 0
    # Four standard errors.
    assert ((seen - want).abs() <= 4 * (want * (1 - want) / draws).sqrt() + 1e-9).all()


def test_noise_is_splitmix64_and_gumbel() -> None:
    # The first outputs of SplitMix64 from the state 0, as its authors' code gives them.
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    uniform = [((word >> 12) + 0.5) / 2**52 for word in words]
    want = [-math.log(-math.log(u)) for u in uniform]
    assert gumbel([0], 3, torch.device("cpu"))[0].tolist() == pytest.approx(want, rel=1e-12)


def test_a_token_depends_on_nothing_but_its_own_row() -> None:
    raw = logits(6, 301, ties=False)
    draws = [None if i == 2 else Draw(SAMPLINGS[i % 2], (7, "task", f"{i}", 0, i)) for i in range(6)]
    steps = [3, 0, 5, 3, 8, 1]
    together = choose(raw, draws, steps)
    alone = [choose(raw[i : i + 1], [draws[i]], [steps[i]])[0] for i in range(6)]
    assert together == alone
    assert together[2] == int(raw[2].argmax())
    assert choose(raw.flip(0), draws[::-1], steps[::-1]) == together[::-1]
    rows = [4, 1, 0]
    assert choose(raw, [draws[i] for i in rows], [steps[i] for i in rows], rows) == [together[i] for i in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_most_likely_token_is_the_first_of_equal_ones_and_nan_wins(dtype: torch.dtype) -> None:
    raw = logits(5, 301, ties=True).to(dtype)
    raw[1] = 0.5
    raw[2, 7], raw[2, 200] = math.nan, math.inf
    raw[3] = -math.inf
    found = most_likely(raw)
    assert found.dtype == torch.int64 and found.tolist() == [
        next(i for i, x in enumerate(row) if math.isnan(x) or (x == max(row) and not any(map(math.isnan, row))))
        for row in raw.tolist()
    ]
    assert most_likely(raw[:, None]).shape == (5, 1)
    assert choose(raw, [None] * 5, [0] * 5)[1:4] == [0, -1, -1]


def test_every_part_of_the_key_and_the_step_change_the_noise() -> None:
    key = (0, "t", "0", 0, 0)
    keys = [key, (1, *key[1:]), (0, "u", "0", 0, 0), (0, "t", "1", 0, 0)]
    keys += [(0, "t", "0", 1, 0), (0, "t", "0", 0, 1)]
    states = [Draw(Sampling(), k).state(step) for k in keys for step in (0, 1)]
    assert len(set(states)) == len(states)
    # What a key is made of does not run together.
    assert Draw(Sampling(), ("1", "23")).state(4) != Draw(Sampling(), ("12", "3")).state(4)


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    choose(logits(2, 50, False), [Draw(Sampling(), (0,)), None], [0, 0])
    assert torch.equal(torch.get_rng_state(), before)
