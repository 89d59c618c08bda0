"""The methods that prune visual tokens, each against a slow loop from its paper or its code."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kvbench
from benchmarks.memory import allocated
from kvbench.errors import UserError
from kvbench.plugin import Pruned, VisualTokens
from kvbench_policies.pruning.cdpruner import greedy_map

SIZES = [(1, 1), (9, 1), (9, 4), (9, 9), (25, 8), (40, 17)]
"""Visual tokens, and how many stay: one, some and all; odd lengths."""


def tokens(count: int, keep: int, seed: int = 0, inside: bool = False) -> VisualTokens:
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    text = 7
    return VisualTokens(
        keep=keep,
        feature=draw(count, 12),
        text=draw(text, 12),
        image=torch.arange(count) // 4,
        salience=None if inside else draw(count).softmax(-1),
        patch_key=None if inside else draw(count, 10),
        head_key=None if inside else draw(count, 5),
        last_salience=None if inside else draw(count).softmax(-1),
        last_key=None if inside else draw(count, 10),
        attention=draw(count).softmax(-1) if inside else None,
        key=draw(count, 16) if inside else None,
        text_key=draw(text, 16) if inside else None,
        output=draw(count, 12) if inside else None,
        text_output=draw(text, 12) if inside else None,
        follows=torch.arange(text) >= 2 if inside else None,
    )


def prune(name: str, shown: VisualTokens) -> Pruned:
    score = kvbench.policy(name).score
    assert score is not None
    return score.prune(shown)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a.double() @ b.double()) / math.sqrt(float(a.double() @ a.double()) * float(b.double() @ b.double()))


def largest(values: list[float], count: int, among: list[int]) -> list[int]:
    return sorted(among, key=lambda i: (-values[i], i))[:count]


def fastv(t: VisualTokens) -> set[int]:
    assert t.attention is not None
    return set(largest(t.attention.tolist(), t.keep, list(range(len(t.feature)))))


def dart(t: VisualTokens) -> set[int]:
    """The authors' rule: what layer K-1 puts out, and text pivots behind the last image."""
    assert t.output is not None and t.text_output is not None and t.follows is not None
    behind = [i for i, after in enumerate(t.follows.tolist()) if after]
    return _dart(t, t.output, t.text_output, behind)


def dart_paper(t: VisualTokens) -> set[int]:
    return _dart(t, t.feature, t.text, list(range(len(t.text))))


def _dart(t: VisualTokens, feature: Tensor, text: Tensor, among: list[int]) -> set[int]:
    assert t.key is not None and t.text_key is not None
    everyone = list(range(len(t.feature)))
    norms = [float(k.abs().sum()) for k in t.key]
    words = [float(k.abs().sum()) for k in t.text_key]
    pivots = sorted(largest(norms, min(4, t.keep), everyone))
    chosen = set(pivots)
    rows = [feature[i] for i in pivots]
    rows += [text[i] for i in sorted(largest(words, 4, among))]
    left = t.keep - len(chosen)
    for number, row in enumerate(rows):
        share = left // len(rows) + (1 if number < left % len(rows) else 0)
        differs = [-cosine(row, one) for one in feature]
        chosen |= set(largest(differs, share, [i for i in everyone if i not in chosen]))
    return chosen


def divprune(t: VisualTokens) -> set[int]:
    count = len(t.feature)
    far = [[1 - cosine(a, b) for b in t.feature] for a in t.feature]
    chosen: list[int] = []
    while len(chosen) < t.keep:
        best, value = -1, -math.inf
        for i in range(count):
            if i in chosen:
                continue
            to = chosen or [j for j in range(count) if j != i]
            near = min((far[i][j] for j in to), default=math.inf)
            if near > value:
                best, value = i, near
        chosen.append(best)
    return set(chosen)


def cdpruner(t: VisualTokens, sign: int) -> set[int]:
    """Greedy by the determinants themselves."""
    relevance = [sign * sum(cosine(f, x) for x in t.text) / len(t.text) for f in t.feature]
    low, high = min(relevance), max(relevance)
    r = [(x - low) / max(high - low, 1e-6) + 1e-6 for x in relevance]
    kernel = torch.tensor(
        [[r[i] * cosine(a, b) * r[j] for j, b in enumerate(t.feature)] for i, a in enumerate(t.feature)],
        dtype=torch.float64,
    )
    chosen: list[int] = []
    while len(chosen) < t.keep:
        gains = {}
        for i in set(range(len(r))) - set(chosen):
            index = torch.tensor([*chosen, i])
            gains[i] = float(torch.linalg.slogdet(kernel[index][:, index])[1])
        chosen.append(max(gains, key=lambda i: gains[i]))
    return set(chosen)


@pytest.mark.parametrize(("count", "keep"), SIZES)
@pytest.mark.parametrize("oracle", [fastv, dart, dart_paper, divprune])
def test_a_method_keeps_what_its_paper_or_its_code_says(
    oracle: Callable[[VisualTokens], set[int]], count: int, keep: int
) -> None:
    for seed in range(3):
        shown = tokens(count, keep, seed, inside=oracle is not divprune)
        found = prune(oracle.__name__.replace("_", ":variant="), shown)
        assert set(found.keep.nonzero().flatten().tolist()) == oracle(shown)
        assert found.feature is None


@pytest.mark.parametrize(("count", "keep"), [(1, 1), (9, 1), (9, 4), (25, 8)])
def test_cdpruner_is_greedy_in_the_determinant(count: int, keep: int) -> None:
    """With fewer tokens than dimensions, so that no determinant is 0."""
    for seed in range(3):
        shown = tokens(count, keep, seed)
        for spelling, sign in (("cdpruner:relevant=similar", 1), ("cdpruner", -1)):
            found = prune(spelling, shown)
            assert set(found.keep.nonzero().flatten().tolist()) == cdpruner(shown, sign)


def test_greedy_map_finds_the_best_pair_of_an_easy_kernel() -> None:
    a = torch.tensor([[1.0, 0.0], [0.99, 0.1], [0.0, 1.0], [0.7, 0.7]])
    kernel = a @ a.T
    best = max(
        combinations(range(4), 2),
        key=lambda pair: float(torch.linalg.det(kernel[list(pair)][:, list(pair)])),
    )
    assert set(greedy_map(kernel, 2).nonzero().flatten().tolist()) == set(best)
    assert int(greedy_map(kernel, 4).sum()) == 4  # beyond the rank of the kernel


class Waits(TorchDispatchMode):
    """Counts reads of a tensor's number, for which a GPU would have to finish its work."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["divprune", "cdpruner"])
def test_no_step_waits_for_a_gpu(name: str) -> None:
    with Waits() as waits:
        assert int(prune(name, tokens(40, 17)).keep.sum()) == 17
        assert waits.count == 1  # that of the line above


def test_greedy_map_needs_no_kernel_in_float64() -> None:
    feature = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    kernel = feature @ feature.T
    bytes_used = allocated(partial(greedy_map, kernel, 20), kernel.device)
    assert bytes_used < 8 * kernel.numel() / 4
    assert torch.equal(greedy_map(kernel, 20), greedy_map(kernel.double(), 20))


def dominant_and_targets(t: VisualTokens) -> tuple[list[int], list[int], list[int]]:
    """VisionZip's dominant tokens, its contextual ones, and the others."""
    assert t.salience is not None
    extra = min(int(0.15625 * t.keep), t.keep - 1)
    dominant = largest(t.salience.tolist(), t.keep - extra, list(range(len(t.feature))))
    rest = [i for i in range(len(t.feature)) if i not in dominant]
    targets = rest[:: max(1, len(rest) // extra)][:extra] if extra and rest else []
    return dominant, targets, [i for i in rest if i not in targets]


@pytest.mark.parametrize("variant", ["release", "paper"])
@pytest.mark.parametrize(("count", "keep"), SIZES)
def test_visionzip_merges_what_is_not_dominant(count: int, keep: int, variant: str) -> None:
    for seed in range(3):
        t = tokens(count, keep, seed)
        found = prune(f"visionzip:variant={variant}", t)
        dominant, targets, others = dominant_and_targets(t)
        assert set(found.keep.nonzero().flatten().tolist()) == {*dominant, *targets}
        if not targets:
            assert found.feature is None
            continue
        key = t.head_key if variant == "release" else t.patch_key
        assert key is not None and found.feature is not None
        groups: dict[int, list[int]] = {i: [] for i in targets}
        for i in others:
            groups[max(targets, key=lambda j: cosine(key[i], key[j]))].append(i)
        for i in dominant:
            assert torch.equal(found.feature[i], t.feature[i])
        for i, group in groups.items():
            expected = t.feature[i]
            if variant == "paper":
                expected = t.feature[[i, *group]].mean(0)
            elif group:
                expected = t.feature[i] + t.feature[group].mean(0)
            assert torch.allclose(found.feature[i], expected, atol=1e-5)


@pytest.mark.parametrize(("count", "keep"), SIZES)
def test_prumerge_adds_neighbours_by_their_attention(count: int, keep: int) -> None:
    """As the authors' code: the neighbours of a token are kept ones too, and one token is extra."""
    for seed in range(3):
        t = tokens(count, keep, seed)
        assert t.last_salience is not None and t.last_key is not None
        found = prune("prumerge:neighbours=3", t)
        if keep == count:
            assert found.feature is None and bool(found.keep.all())
            continue
        weight = t.last_salience.tolist()
        best = largest(weight, max(1, keep - 1), list(range(count)))
        rest = [i for i in range(count) if i not in best]
        assert found.feature is not None
        for i in best:
            near = [cosine(t.last_key[i], t.last_key[j]) for j in range(count)]
            group = largest(near, 3, [j for j in range(count) if j != i])
            expected = t.feature[i] + sum(weight[j] * t.feature[j] for j in group)
            assert torch.allclose(found.feature[i], expected, atol=1e-5)
        extra = [rest[-1]] if keep > 1 else []
        assert set(found.keep.nonzero().flatten().tolist()) == {*best, *extra}
        for i in extra:
            expected = torch.stack([weight[j] * t.feature[j] for j in rest]).sum(0)
            assert torch.allclose(found.feature[i], expected, atol=1e-5)


@pytest.mark.parametrize(("count", "keep"), SIZES)
def test_prumerge_of_the_paper_averages_neighbours_by_their_attention(count: int, keep: int) -> None:
    for seed in range(3):
        t = tokens(count, keep, seed)
        assert t.salience is not None and t.patch_key is not None
        found = prune("prumerge:neighbours=3:variant=paper", t)
        kept = largest(t.salience.tolist(), keep, list(range(count)))
        assert set(found.keep.nonzero().flatten().tolist()) == set(kept)
        rest = [i for i in range(count) if i not in kept]
        for i in kept:
            near = [cosine(t.patch_key[i], t.patch_key[j]) for j in range(count)]
            group = [i, *largest(near, 3, rest)]
            weight = sum(float(t.salience[j]) for j in group)
            mean = sum(float(t.salience[j]) * t.feature[j] for j in group) / weight
            value = t.feature if found.feature is None else found.feature
            assert torch.allclose(value[i], torch.as_tensor(mean), atol=1e-5)


@pytest.mark.parametrize("spelling", ["fastv:layer=0", "dart:visual_pivots=0", "visionzip:contextual=1.5"])
def test_parameters_out_of_range_are_refused(spelling: str) -> None:
    with pytest.raises(UserError):
        kvbench.policy(spelling)
