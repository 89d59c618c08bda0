"""LoCoCo: the slots of a cut and what is merged into them, against a loop over the equations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.errors import UserError
from kvbench.plugin import AttentionMass, Merger, ModelInfo, Policy
from kvbench.spelling import policy
from kvbench_policies.gates import ConvolutionConfig, MergeConvolutions, files, load, save
from kvbench_policies.lococo import compress

from . import oracles_merging as om
from .caches import DIM, Cache, Oracle, Row
from .drawing import llama
from .test_merging import SHAPES, random_keep
from .views import decide

pytestmark = pytest.mark.usefixtures("seeded")


def info(heads: int, group: int = 1, layers: int = 1) -> ModelInfo:
    return ModelInfo("test", layers, heads, heads * group, DIM, 12, lambda layer: torch.empty(0))


def made(model: ModelInfo, **changes: Any) -> MergeConvolutions:
    """Random convolutions whose weights over the entries are neither even nor at one entry."""
    given = {"slots": 5, "kernel_size": 3, "mix": 0.4, **changes}
    convolutions = MergeConvolutions(ConvolutionConfig.of(model, **given))
    with torch.no_grad():
        for layer in convolutions.layers:
            layer.weight.mul_(0.4)
        convolutions.mix.add_(0.1 * torch.arange(len(convolutions.mix)))
    return convolutions.requires_grad_(False)


def chosen(convolutions: MergeConvolutions, folder: Path, **changes: Any) -> Policy:
    return policy("lococo", gates=str(save(convolutions, folder)), **changes)


def merger_of(found: Policy) -> Merger:
    assert found.merge is not None
    return found.merge


def oracle_of(convolutions: MergeConvolutions, layer: int = 0) -> Oracle:
    state = {k: x.double().numpy() for k, x in convolutions.state_dict().items()}
    weight, bias = state[f"layers.{layer}.weight"], state[f"layers.{layer}.bias"]
    share, rate = float(state["mix"][layer]), convolutions.config.keep_rate

    def run(row: Row, kept: list[set[int]], noise: list[np.ndarray]) -> None:
        for head, entries in zip(row.heads, kept, strict=True):
            head.keys, head.values = om.convolution_merge(
                head.keys, head.values, head.mass, entries, weight, bias, share, rate
            )

    return run


@pytest.mark.parametrize(("lengths", "group", "block"), SHAPES, ids=str)
@pytest.mark.parametrize(
    "changes",
    [{}, {"kernel_size": 1, "keep_rate": 0.25}, {"kernel_size": 7, "slots": 1, "keep_rate": 0.9}],
    ids=str,
)
def test_merged_entries_agree_with_the_oracle_over_several_cuts(
    changes: dict[str, Any],
    lengths: tuple[int, ...],
    group: int,
    block: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if block is not None:  # a few heads at a time
        monkeypatch.setattr("kvbench_policies.gates.convolutions._BLOCK", block)
    convolutions = made(info(3, group), **changes)
    merger = merger_of(chosen(convolutions, tmp_path))
    for plan in (
        ["half", "half", "half", "half"],
        ["ragged", "all", "ragged", "ragged", "one"],
        ["all", "one", "ragged", "half"],
    ):
        rng = np.random.default_rng(len(plan) + group)
        cache = Cache(list(lengths), heads=3, group=group, rng=rng)
        for turn, how in enumerate(plan):
            v = cache.view("decode" if turn else "context", [1] * len(lengths))
            keep = random_keep(v, how, rng)
            assert cache.cut(v, keep, merger, oracle_of(convolutions)) < 1e-5
            cache.append([(7 * turn + 3 * r) % 11 + 1 for r in range(len(lengths))])


@pytest.mark.parametrize(("lengths", "group"), [((63,), 1), ((57, 41, 7), 2), ((45,), 4)], ids=str)
def test_the_policy_agrees_with_its_oracle_over_cuts(lengths: tuple[int, ...], group: int, tmp_path: Path) -> None:
    convolutions = made(info(2, group, layers=2))
    found = chosen(convolutions, tmp_path)
    for b in (1, 2, 10, 41, max(lengths)):
        budget = [min(b, t) for t in lengths]
        rng = np.random.default_rng(b)
        caches = [Cache(list(lengths), 2, group, rng, layer=i, layers=2) for i in range(2)]
        for turn in range(3):
            views = [cache.view("decode" if turn else "context", budget) for cache in caches]
            kept = decide(found, views, budget)
            for i, cache in enumerate(caches):
                for r, row in enumerate(cache.rows):
                    for h, head in enumerate(row.heads):
                        count = len(head.positions)
                        at = cache.place(views[i].shape[2], count)
                        order = sorted(range(count), key=lambda e: (head.mass[e], e), reverse=True)
                        got = set(kept[i][r, h, at].nonzero()[:, 0].tolist())
                        assert got == set(order[: budget[r]])
                oracle = oracle_of(convolutions, i)
                assert cache.cut(views[i], kept[i], merger_of(found), oracle) < 1e-5
                cache.append([4] * len(lengths))


def test_heavy_hitters_and_heads_that_evict_nothing_do_not_change(tmp_path: Path) -> None:
    merger = merger_of(chosen(made(info(2)), tmp_path))
    cache = Cache([30], heads=2, group=1, rng=np.random.default_rng(2))
    v = cache.view("context", [1])
    keep = v.valid.clone()
    keep[0, 1, ::3] = False
    key, value = merger.merge(v, keep, {})
    changed = (key != v.key).any(-1)
    assert torch.equal(changed, (value != v.value).any(-1))
    assert not bool(changed[0, 0].any())
    least = v.obs[AttentionMass()][0, 1].masked_fill(~keep[0, 1], math.inf).argsort()[:10]
    assert changed[0, 1].nonzero()[:, 0].tolist() == sorted(least.tolist())


def test_a_convolution_of_no_weight_takes_the_mean(tmp_path: Path) -> None:
    convolutions = made(info(1), mix=1.0)
    with torch.no_grad():
        for p in convolutions.layers.parameters():
            p.zero_()
    merger = merger_of(chosen(convolutions, tmp_path))
    cache = Cache([20], heads=1, group=1, rng=np.random.default_rng(2))
    v = cache.view("context", [1])
    order = v.obs[AttentionMass()][0, 0].argsort(descending=True)
    keep = torch.zeros_like(v.valid)
    keep[0, 0, order[:6]] = True
    key, value = merger.merge(v, keep, {})
    for mine, x in ((key, v.key), (value, v.value)):
        mean = x[0, 0, order[3:]].mean(0)
        torch.testing.assert_close(mine[0, 0, order[3:6]], mean.expand(3, -1))


def test_any_score_takes_the_merger(tmp_path: Path) -> None:
    gates = str(save(made(info(2)), tmp_path))
    cache = Cache([40, 21], heads=2, group=1, rng=np.random.default_rng(1))
    for spec in ("knorm:merge=convolution", "streaming_llm:sinks=2:merge=convolution"):
        found = policy(spec, gates=gates)
        v = cache.view("context", [9, 9])
        (keep,) = decide(found, [v], [9, 9])
        key, _ = merger_of(found).merge(v, keep, {})
        assert int((key != v.key).any(-1)[v.valid].sum()) == 2 * 2 * 4


# --- training -------------------------------------------------------------------------------------


def rows_of(cache: Cache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, attention and validity of a cache, as the training holds them."""
    v = cache.view("context", [1] * len(cache.lengths))
    return v.key.nan_to_num(), v.value.nan_to_num(), v.grouped(v.obs[AttentionMass()]), v.valid


@pytest.mark.parametrize(("lengths", "group"), [((31,), 2), ((40, 17, 3), 1)], ids=str)
@pytest.mark.parametrize("budget", [1, 8, 60])
def test_training_cuts_as_the_policy_does(lengths: tuple[int, ...], group: int, budget: int, tmp_path: Path) -> None:
    convolutions = made(info(2, group))
    found = chosen(convolutions, tmp_path)
    cache = Cache(list(lengths), heads=2, group=group, rng=np.random.default_rng(3))
    key, value, mass, valid = compress(convolutions, 0, *rows_of(cache), budget)
    v = cache.view("context", [1])
    each = [min(budget, t) for t in lengths]
    (keep,) = decide(found, [v], each)
    policys = merger_of(found).merge(v, keep, {})
    for r in range(len(lengths)):
        for h in range(2):
            rows = keep[r, h]
            assert int(valid[r, h].sum()) == each[r]
            assert torch.equal(mass[r, h, : each[r]], v.grouped(v.obs[AttentionMass()])[r, h, rows])
            for mine, theirs in zip((key, value), policys, strict=True):
                torch.testing.assert_close(mine[r, h, : each[r]], theirs[r, h, rows])


def test_gradients_reach_every_parameter() -> None:
    convolutions = made(info(2)).requires_grad_(True)
    cache = Cache([40, 3], heads=2, group=1, rng=np.random.default_rng(3))
    key, value, _, valid = compress(convolutions, 0, *rows_of(cache), 12)
    ((key**2 + value**2) * valid[..., None]).sum().backward()
    for name, p in convolutions.named_parameters():
        assert p.grad is not None, name
        assert bool(p.grad.isfinite().all()), name
        assert bool((p.grad != 0).any()), name


# --- files ----------------------------------------------------------------------------------------


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    model = info(2, 2, layers=3)
    convolutions = made(model, training={"steps": 3}, base_revision="abc")
    again = load(save(convolutions, tmp_path / "whole"), model)
    assert isinstance(again, MergeConvolutions)
    assert again.config == convolutions.config
    for name, x in convolutions.state_dict().items():
        assert torch.equal(again.state_dict()[name], x)
    half = load(save(convolutions, tmp_path / "half", half=True), model)
    sizes = [(tmp_path / n / "gates.safetensors").stat().st_size for n in ("whole", "half")]
    assert sizes[1] < 0.7 * sizes[0]
    assert torch.equal(half.state_dict()["mix"], convolutions.mix)


def test_the_authors_sizes() -> None:
    convolutions = MergeConvolutions(ConvolutionConfig.of(info(2)))
    shapes = {name: tuple(x.shape) for name, x in convolutions.state_dict().items()}
    assert shapes == {
        "mix": (1,),
        "layers.0.weight": (256, 2 * DIM, 21),
        "layers.0.bias": (256,),
    }
    assert convolutions.mix.item() == 0.5
    assert float(convolutions.layers[0].weight.detach().std()) == pytest.approx(1.0, abs=0.02)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel_size": 4}, "kernel_size=4 is even; use an odd number"),
        ({"slots": 0}, "slots=0 is invalid; use a whole number, 1 or more"),
        ({"keep_rate": 1.5}, "keep_rate=1.5 is invalid; use a number from 0 to 1"),
        ({"mix": True}, "mix=True is invalid; use a number from 0 to 1"),
        ({"kind": "trimkv"}, "unknown kind=trimkv; use lococo"),
    ],
    ids=str,
)
def test_bad_configurations_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ConvolutionConfig.of(info(2), **changes)


def test_convolutions_are_looked_for_like_gates(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`kvbench train gates --model made/up --policy lococo`"):
        files.find("made/up", "lococo")
    own = save(made(info(2)), files.GATES.user_path("made/up", "lococo"))
    assert files.find("made/up", "lococo") == own
    print_of = policy("lococo").fingerprint("made/up")
    assert len(print_of) == 16
    save(made(info(2)), own)
    assert policy("lococo").fingerprint("made/up") != print_of


def test_gates_do_not_serve_as_convolutions(tmp_path: Path) -> None:
    from kvbench.engine.models import model_info

    model = llama(2)
    gates = policy("trimkv").stand_in(model_info(model), tmp_path)
    assert gates.score is not None
    wrong = policy("lococo", gates=gates.score.parameters()["gates"])
    with pytest.raises(UserError, match="are for trimkv; use gates trained for lococo"):
        kvbench.kept(model, torch.arange(9)[None], wrong, "4")
