"""ChunkKV, PyramidInfer and Scissorhands keep what loops over their equations keep."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from kvbench.errors import UserError
from kvbench.spelling import policy

from . import oracles as o
from . import oracles_windows as windows
from .views import Case, random_case

Kept = list[list[list[int]]]


def select_chunks(score: Callable[..., o.Ranked], joint: bool) -> Callable[..., Kept]:
    def run(layers: list[o.Layer], b: int) -> Kept:
        return [windows.chunked(score(x), [b] * x.heads, 7, joint) for x in layers]

    return run


ORACLES: dict[str, Callable[..., Kept]] = {
    "chunkkv": windows.chunkkv,
    "chunkkv:chunk_length=4:window=5": partial(windows.chunkkv, window=5, chunk_length=4),
    "chunkkv:chunk_length=20:joint=false:window=3": partial(
        windows.chunkkv, window=3, chunk_length=20, joint=False
    ),
    "chunkkv:chunk_length=1:joint=false:window=8": partial(
        windows.chunkkv, window=8, chunk_length=1, joint=False
    ),
    "knorm:select=chunk:chunk_length=7": select_chunks(o.knorm_score, joint=True),
    "keydiff:select=chunk:chunk_length=7:joint=false": select_chunks(o.keydiff_score, joint=False),
    "pyramidinfer": windows.pyramidinfer,
    "pyramidinfer:window=5": partial(windows.pyramidinfer, window=5),
    "pyramidinfer:window=9:sinks=0:distance_weight=3:decay_ratio=0.3": partial(
        windows.pyramidinfer, window=9, sinks=0, distance_weight=3, decay_ratio=0.3
    ),
    "pyramidinfer:window=1:sinks=6": partial(windows.pyramidinfer, window=1, sinks=6),
    "scissorhands": windows.scissorhands,
    "scissorhands:history=16:window=3": partial(windows.scissorhands, history=16, window=3),
    "scissorhands:history=9:window=0:group=max": partial(
        windows.scissorhands, history=9, window=0, group="max"
    ),
}

SHAPES = [((63,), 1), ((45, 40, 17), 4), ((50, 7, 1), 2)]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda s: f"T{s[0]}-G{s[1]}")
def case(request: pytest.FixtureRequest) -> tuple[Case, list[list[o.Layer]]]:
    lengths, group = request.param
    made = random_case(lengths, group=group, layers=3, seed=5 * len(lengths) + group)
    return made, [made.row(r) for r in range(len(lengths))]


@pytest.mark.parametrize("spec", ORACLES)
def test_kept_sets_agree_with_the_oracle(spec: str, case: tuple[Case, list[list[o.Layer]]]) -> None:
    layers, rows = case
    for b in (1, 6, 23, 100):
        budget = [min(b, t) for t in layers.lengths]
        for r, row in enumerate(rows):
            got = layers.kept_tokens(policy(spec), budget, r)
            assert got == ORACLES[spec](row, budget[r]), (budget, r)


def test_chunkkv_keeps_whole_chunks_and_heads_agree() -> None:
    case = random_case((101, 90), heads=3, seed=4)
    for r, t in enumerate(case.lengths):
        for layer in case.kept_tokens(policy("chunkkv:window=1:chunk_length=6"), [31, 31], r):
            assert layer[0] == layer[1] == layer[2]
            chunks = {token // 6 for token in layer[0] if token < t - 1}
            whole = {c for c in chunks if {*range(6 * c, min(6 * c + 6, t - 1))} <= {*layer[0]}}
            assert len(chunks - whole) <= 1


def test_allocators_see_the_scores_of_chunks() -> None:
    case = random_case((60,), heads=2, seed=3)
    for allocate in ("head_adaptive", "global"):
        chosen = policy(f"snapkv:window=2:select=chunk:allocate={allocate}:joint=false")
        for layer in case.kept_tokens(chosen, [22], 0):
            for head in layer:
                chunks = [token // 10 for token in head if token < 58]
                assert sum(chunks.count(c) not in (10, 8) for c in set(chunks)) <= 1


def test_pyramidinfer_narrows_from_layer_to_layer() -> None:
    model = random_case((200,), layers=30).info
    chosen = policy("pyramidinfer:window=8")
    shares = chosen.allocate.shares(model, torch.tensor([200, 60]), torch.tensor([60, 60]))
    first, whole = shares.tolist()
    assert first == sorted(first, reverse=True)
    assert first[0] > 3 * first[-1]
    assert whole == [2 * 60] * 30


def test_scissorhands_evicts_what_no_query_looks_at() -> None:
    case = random_case((40,), layers=1, heads=1, group=1)
    case.q[0] = case.q[0].mean(2, keepdim=True).expand_as(case.q[0])
    case.k[0][:, :, 1] = -90 * case.q[0][:, :, 0]
    assert 1 not in case.kept_tokens(policy("scissorhands"), [39], 0)[0][0]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("chunkkv:chunk_length=0", "chunk_length=0 is too small"),
        ("pyramidinfer:decay_ratio=0", "decay_ratio=0.0 is out of range"),
        ("pyramidinfer:decay_ratio=1.5", "decay_ratio=1.5 is out of range"),
        ("pyramidinfer:sinks=-1", "sinks=-1 is too small"),
        ("scissorhands:history=0", "history=0 is too small"),
    ],
)
def test_parameters_out_of_range_are_refused(spec: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        policy(spec)
