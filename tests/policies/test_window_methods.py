"""ChunkKV, PyramidInfer, Scissorhands and FINCH keep what loops over their equations keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from kvbench.budget import Budget
from kvbench.engine.driver import engine
from kvbench.engine.prefix import Compression, Prefix
from kvbench.errors import UserError
from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, Score, View
from kvbench.spelling import policy
from kvbench_policies.finch import EveryChunk, QuestionAttention
from tests.sweeps import slow_but

from . import oracles as o
from . import oracles_windows as windows
from .drawing import llama
from .views import Case, decide, random_case

Kept = list[list[list[int]]]
BUDGET = Budget.parse("3")


def select_chunks(score: Callable[..., o.Ranked], joint: bool) -> Callable[..., Kept]:
    def run(layers: list[o.Layer], b: int) -> Kept:
        return [windows.chunked(score(x), [b] * x.heads, 7, joint) for x in layers]

    return run


def every_chunk(score: Callable[..., o.Ranked], chunk_length: int) -> Callable[..., Kept]:
    def run(layers: list[o.Layer], b: int) -> Kept:
        return [windows.every_chunk(score(x), [b] * x.heads, chunk_length) for x in layers]

    return run


ORACLES: dict[str, Callable[..., Kept]] = {
    "chunkkv": windows.chunkkv,
    "chunkkv:chunk_length=4:window=5": partial(windows.chunkkv, window=5, chunk_length=4),
    "chunkkv:chunk_length=20:joint=false:window=3": partial(windows.chunkkv, window=3, chunk_length=20, joint=False),
    "chunkkv:chunk_length=1:joint=false:window=8": partial(windows.chunkkv, window=8, chunk_length=1, joint=False),
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
    "scissorhands:history=9:window=0:group=max": partial(windows.scissorhands, history=9, window=0, group="max"),
    "finch": windows.finch,
    "finch:variant=release:window=8": partial(windows.finch, question=8, release=True),
    "finch:window=40:longest=5:chunk_length=6": partial(windows.finch, question=5, longest=5, chunk_length=6),
    "knorm:select=every_chunk:chunk_length=11": every_chunk(o.knorm_score, 11),
}

SHAPES = [((63,), 1), ((45, 40, 17), 4), ((50, 7, 1), 2)]


@pytest.fixture(scope="module", params=slow_but(SHAPES, SHAPES[1], SHAPES[-1]), ids=lambda s: f"T{s[0]}-G{s[1]}")
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


@pytest.mark.parametrize("spec", ["finch", "finch:longest=4:chunk_length=9"])
def test_finch_observes_the_question_where_the_cache_holds_one(spec: str) -> None:
    case, chosen, asked = random_case((47, 31), group=2, seed=9), policy(spec), 7
    assert isinstance(chosen.score, QuestionAttention)
    assert isinstance(chosen.select, EveryChunk)
    how = {"question": asked, "longest": chosen.score.longest}
    for b in (3, 9, 20):
        views = case.views(chosen, [b, b])
        for view in views:
            view.asked = asked
        kept = decide(chosen, views, [b, b])
        for r, t in enumerate(case.lengths):
            got = [[(h.nonzero()[:, 0] - 47 + t).tolist() for h in layer[r]] for layer in kept]
            length = chosen.select.chunk_length or 10**6
            assert got == windows.finch(case.row(r), b, chunk_length=length, **how)


def test_the_question_is_known_once_it_is_asked() -> None:
    seen = []

    @dataclass(frozen=True)
    class Watch(Score):
        def score(self, v: View) -> torch.Tensor:
            seen.append(v.asked)
            return v.position.float()

    model = llama(2)
    watching = Compression(Policy("watch", Watch(), Uniform(), TopK()), BUDGET, "question", 0)
    with engine(model):
        prefix = Prefix(model, ())
        prefix.extend(torch.arange(20)[None])
        prefix.compress([watching])
        longer = prefix.fork()
        longer.extend(torch.arange(6)[None], question=True)
        longer.compress([watching])
        longer.extend(torch.arange(1)[None])
        longer.compress([watching])
    assert seen == [0, 6, 0]


@pytest.mark.parametrize("budget", [9, 20, 41])
def test_no_chunk_is_left_out(budget: int) -> None:
    case = random_case((90,), heads=2, seed=3)
    for layer in case.kept_tokens(policy("knorm:select=every_chunk:chunk_length=10"), [budget], 0):
        for head in layer:
            counts = [sum(token // 10 == c for token in head) for c in range(9)]
            assert max(counts) - min(counts) <= 1


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
        ("finch:window=0", "window=0 is too small"),
        ("finch:chunk_length=0", "chunk_length=0 is too small"),
        ("scissorhands:history=0", "history=0 is too small"),
    ],
)
def test_parameters_out_of_range_are_refused(spec: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        policy(spec)
