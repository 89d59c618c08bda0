"""What any score with any allocator and any selector must hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvbench.spelling import policy

from .drawing import FILES
from .views import random_case


@pytest.mark.parametrize("allocate", ["uniform", "head_adaptive", "global"])
@pytest.mark.parametrize("select", ["topk", "two_stage"])
def test_ties_go_to_the_more_recent_token(allocate: str, select: str) -> None:
    case = random_case((30, 19), seed=1)
    case.k = [torch.ones_like(k) for k in case.k]
    case.v = [torch.ones_like(v) for v in case.v]
    chosen = policy(
        f"knorm:allocate={allocate}:select={select}:eps=1" if select == "two_stage" else f"knorm:allocate={allocate}"
    )
    for r, t in enumerate(case.lengths):
        for layer in case.kept_tokens(chosen, [7, 7], r):
            assert layer == [list(range(t - 7, t))] * 2


@pytest.mark.parametrize("allocate", ["uniform", "head_adaptive", "global"])
@pytest.mark.parametrize("budget", [1, 3, 5, 8, 20])
def test_a_window_that_does_not_fit_loses_its_oldest_tokens(allocate: str, budget: int) -> None:
    case = random_case((50, 37), seed=2)
    chosen = policy(f"snapkv:window=20:allocate={allocate}")
    for r, t in enumerate(case.lengths):
        for layer in case.kept_tokens(chosen, [budget] * 2, r):
            assert layer == [list(range(t - budget, t))] * 2


def test_sinks_give_way_after_the_window_and_before_the_last_token() -> None:
    case = random_case((30,), layers=1, heads=1)
    for budget, tokens in {5: [0, 1, 2, 3, 29], 6: [0, 1, 2, 3, 28, 29]}.items():
        assert case.kept_tokens(policy("streaming_llm"), [budget], 0) == [[tokens]]


SINKS = ["streaming_llm", "roco", "d2o", "sirllm", "duo_attention:sinks=4", "roco:allocate=global"]


@pytest.mark.parametrize("spec", [*SINKS, *(f"{s}:select=two_stage" for s in SINKS[:2])])
def test_of_sinks_that_do_not_fit_the_last_goes_first(spec: str) -> None:
    case = random_case((30, 17), layers=1, heads=1)
    chosen = policy(spec).stand_in(case.info, Path(FILES.name))
    for row, last in enumerate((29, 16)):
        for budget, tokens in {1: [last], 2: [0, last], 4: [0, 1, 2, last]}.items():
            assert case.kept_tokens(chosen, [budget] * 2, row) == [[tokens]]


def test_noise_is_even_and_differs_by_layer_head_and_seed() -> None:
    case = random_case((257, 257), layers=2, heads=2)
    noise = torch.stack([v.noise() for v in case.views(policy("random"), [1, 1])])
    assert bool(((noise >= 0) & (noise < 1)).all())
    assert abs(float(noise.mean()) - 0.5) < 0.02
    assert abs(float(noise.var()) - 1 / 12) < 0.01
    rows = noise.flatten(0, 2) - 0.5
    correlation = (rows @ rows.T) / rows.square().sum(1)
    assert float((correlation - torch.eye(len(rows))).abs().max()) < 0.25


def test_a_score_that_reads_no_budget_says_so() -> None:
    case = random_case((30,))
    for spec, reads in (("snapkv", False), ("knorm", False), ("h2o", True)):
        chosen = policy(spec)
        view = case.views(chosen, [5])[0]
        assert chosen.score is not None
        chosen.score.score(view)
        assert view.read_budget is reads
