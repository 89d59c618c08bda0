"""A vision encoder runs once for the same pixel values, and nothing depends on whether it ran again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import kvbench
from kvbench.budget import Budget
from kvbench.engine import driver
from kvbench.engine.driver import engine
from kvbench.engine.encoding import forget_encoded, join_pixels
from kvbench.engine.prefix import Compression, Prefix
from kvbench.engine.pruning import pruning_of

from .test_vision import Family, build, turn

POLICIES = ("divprune", "cdpruner", "snapkv:window=4", "fastv:layer=1", "visionzip", "prumerge")
"""The last two watch the tower."""


@contextmanager
def tower_calls(family: Family) -> Iterator[list[str]]:
    """Note every call of the vision tower."""
    inner, calls = family.model.model, list[str]()
    tower = inner.visual if hasattr(inner, "visual") else inner.vision_tower
    handle = tower.register_forward_pre_hook(lambda *_: calls.append("tower"))
    try:
        yield calls
    finally:
        handle.remove()


def outcome(family: Family, policy: str, ids: Any, mask: Any, pixels: Any) -> tuple[Any, list[Any]]:
    """The logits of a prompt, and the kept entries."""
    chosen, limit = kvbench.policy(policy), Budget.parse("visual:4")
    with engine(family.model), torch.no_grad():
        prefix = Prefix(family.model, chosen.needs, pruning_of(chosen, limit))
        logits = prefix.extend(ids, mask, pixels)
        (cache,) = prefix.compress([Compression(chosen, limit, "context", 0)])
    return logits, cache.kept()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "llava"])
def test_every_policy_gets_the_same_from_one_encoding_and_from_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = build(name)
    ids, mask, pixels = turn(family, [0, 3], images=2, seed=0)
    with tower_calls(family) as calls:
        shared = [outcome(family, policy, ids, mask, pixels) for policy in (*POLICIES, *POLICIES)]
        assert len(calls) == 2  # without and with the tower's attention
    monkeypatch.setattr(driver, "encoding_once", lambda model: nullcontext())
    with tower_calls(family) as calls:
        alone = [outcome(family, policy, ids, mask, pixels) for policy in POLICIES]
        assert len(calls) == len(POLICIES)
    for (logits, kept), (own_logits, own_kept) in zip(shared, [*alone, *alone], strict=True):
        assert torch.equal(logits, own_logits)
        assert all(torch.equal(a, b) for a, b in zip(kept, own_kept, strict=True))
    other = turn(family, [0, 3], images=2, seed=1)[2]
    assert not torch.equal(outcome(family, "divprune", ids, mask, other)[0], alone[0][0])


def test_nothing_is_encoded_again_until_it_is_forgotten_and_nothing_stays_without_its_pixels() -> None:
    family = build("qwen2_vl")
    ids, mask, pixels = turn(family, [0], images=1, seed=0)
    with tower_calls(family) as calls:
        first = outcome(family, "divprune", ids, mask, pixels)[0]
        forget_encoded(family.model)
        assert torch.equal(outcome(family, "divprune", ids, mask, pixels)[0], first)
        assert len(calls) == 2
        again = {field: tensor.clone() for field, tensor in pixels.items()}
        assert torch.equal(outcome(family, "divprune", ids, mask, again)[0], first)
        assert len(calls) == 3
    assert "get_image_features" not in vars(family.model.model)


def test_a_gradient_is_never_taken_from_a_kept_output() -> None:
    family = build("qwen2_vl")
    ids, _, pixels = turn(family, [0], images=1, seed=0)
    with tower_calls(family) as calls, engine(family.model), torch.enable_grad():
        for _ in range(2):
            Prefix(family.model, ()).extend(ids, None, pixels)
        assert len(calls) == 2


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@torch.no_grad()
def test_images_of_several_sequences_are_encoded_one_by_one_and_shown_together(name: str) -> None:
    """A padded batch, one row of which waits, gives the logits of its sequences alone."""
    family = build(name)
    begun = turn(family, [0, 0, 0], images=0, seed=0)[0]
    shown = [turn(family, [0], images=images, seed=images) for images in (1, 2)]
    width = max(ids.shape[1] for ids, _, _ in shown) + 2
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.bool)
    for row, (own_ids, _, _) in zip((0, 2), shown, strict=True):
        ids[row, -own_ids.shape[1] :], mask[row, -own_ids.shape[1] :] = own_ids, True

    def logits(rows: list[int], *given: Any) -> Any:
        prefix = Prefix(family.model, ())
        prefix.extend(begun[rows])
        return prefix.extend(*given)

    each = [own_pixels for _, _, own_pixels in shown]
    with tower_calls(family) as calls, engine(family.model):
        together = logits([0, 1, 2], ids, mask, join_pixels(family.model, each))
        alone = torch.cat([logits([row], own[0], None, own[2]) for row, own in zip((0, 2), shown, strict=True)])
        assert len(calls) == 2, "one per sequence, for all forwards"
        torch.testing.assert_close(together[[0, 2]], alone, rtol=1e-4, atol=1e-5)
        swapped = logits([0, 1, 2], ids, mask, join_pixels(family.model, each[::-1]))
        assert not torch.allclose(swapped[[0, 2]], alone, atol=1e-3)
