"""Every policy holds its budget to the entry at every moment, cut after cut, with padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvbench
from kvbench import registry
from kvbench.engine.models import model_info
from kvbench.plugin import Policy
from kvbench.spelling import policy
from tests.sweeps import slow_but

from .conftest import batch, build, step

SPECS = [
    *(
        name
        for name in registry.names(registry.POLICIES)
        if kvbench.policy(name).evicts and not kvbench.policy(name).is_informed
    ),
    "h2o:merge=ema",
    "snapkv:window=4:merge=value:allocate=pyramid",
    "keydiff:allocate=inverse_variance:scale=raw",
    "knorm:allocate=global:select=mass",
    "roco:allocate=ada_pyramid:select=two_stage",
    "rkv:allocate=retrieval:select=important_recent:merge=value",
    "random:allocate=inverse_variance:share=layer_decay:merge=ema",
    "tova:allocate=head_profile:pool_share=2",
]

SWEEP = slow_but(SPECS, "h2o", "criticalkv", "d2o", "trimkv", "kvzip", *SPECS[-4:])


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


def made(spec: str, folder: Path) -> Policy:
    """The policy; where it reads files of the model, with such as fit the random one."""
    return policy(spec).stand_in(model_info(build("llama")), folder)


def entries(cache: Any, row: int) -> int:
    live: int = cache.live_entries(row)
    return live


@pytest.mark.parametrize("spec", SWEEP)
@torch.no_grad()
def test_decode(llama: Any, spec: str, tmp_path: Path) -> None:
    pads, budget, buffer = [0, 17], 9, 2
    ids, mask = batch(2, 44, pads)
    chosen = made(f"{spec}:buffer={buffer}", tmp_path)
    with kvbench.attach(llama, chosen, budget, moment="decode") as cache:
        first = 0
        for n in (24, *[1] * 12, 5, 3):
            logits = step(llama, cache, ids[:, first : first + n], mask, first)
            assert bool(logits[:, -1].isfinite().all())
            first += n
            for row, pad in enumerate(pads):
                held, seen = entries(cache, row), first - pad
                assert held <= 6 * min(seen, budget + buffer - 1)
                assert held >= 6 * min(seen, budget)
                assert held % 6 == 0, "appended entries go to every head"


@pytest.mark.parametrize("spec", SWEEP)
@torch.no_grad()
def test_chunked(llama: Any, spec: str, tmp_path: Path) -> None:
    pads, budget = [0, 17], 13
    ids, mask = batch(2, 60, pads)
    with kvbench.attach(llama, made(spec, tmp_path), budget, moment="chunked") as cache:
        for first in range(0, 60, 20):
            logits = step(llama, cache, ids[:, first : first + 20], mask, first)
            assert bool(logits[:, -1].isfinite().all())
            for row, pad in enumerate(pads):
                assert entries(cache, row) == 6 * min(first + 20 - pad, budget)


@pytest.mark.parametrize("spec", SWEEP)
@torch.no_grad()
def test_turns(llama: Any, spec: str, tmp_path: Path) -> None:
    pads = [0, 17]
    ids, mask = batch(2, 60, pads)
    with kvbench.attach(llama, made(spec, tmp_path), 0.4, moment="turns") as cache:
        for first in range(0, 60, 20):
            logits = step(llama, cache, ids[:, first : first + 20], mask, first)
            assert bool(logits[:, -1].isfinite().all())
            cache.compress()
            for row, pad in enumerate(pads):
                assert entries(cache, row) == 6 * ((2 * (first + 20 - pad) * 2 + 5) // 10)
