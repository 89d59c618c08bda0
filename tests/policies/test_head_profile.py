"""HeadKV and DuoAttention keep what independent loops over the profile keep."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import kvbench
from kvbench.errors import UserError
from kvbench.plugin import Policy, Scored, Scores
from kvbench.profiles.allocators import Profiled
from kvbench.spelling import policy
from tests.sweeps import slow_but

from . import oracles as o
from . import oracles_profile as op
from .views import Case, decide, random_case

pytestmark = pytest.mark.filterwarnings("ignore:duo_attention")
LAYERS, HEADS = 3, 2
PROFILES: dict[str, op.Profile] = {
    "mixed": [[0.05, 0.21], [0.4, 0.013], [0.197, 0.13]],
    "one head": [[0.01, 0.01], [0.01, 0.01], [0.01, 0.95]],  # over the cap at almost any budget
    "zeros": [[0.0, 0.6], [0.0, 0.0], [0.4, 0.0]],  # what is over goes to heads of weight 0
    "ties": [[0.125, 0.25], [0.125, 0.125], [0.25, 0.125]],
}
SHAPES = [((63,), 1), ((63, 40, 20), 4), ((100, 99, 33), 2)]
Allocate = Callable[[op.Profile, int, int], list[list[int]]]
window = partial(o.window_score, window=8)
duo = partial(op.retrieval, sinks=5, recent=9)

CASES: dict[str, tuple[Callable[[o.Layer], o.Ranked], Allocate, Callable[..., list[list[int]]]]] = {
    "headkv": (o.window_score, op.head_profile, o.top_k),
    "headkv:window=8": (window, partial(op.head_profile, window=8), o.top_k),
    "headkv:window=8:pool_share=2.5:temp=2": (
        window,
        partial(op.head_profile, window=8, beta="2.5", temp=2),
        o.top_k,
    ),
    "headkv:window=8:pool_share=0.4:temp=0": (
        window,
        partial(op.head_profile, window=8, beta="2.5", temp=0),
        o.top_k,
    ),
    "headkv:window=1:pool_share=10": (
        partial(o.window_score, window=1),
        partial(op.head_profile, window=1, beta="10"),
        o.top_k,
    ),
    "critical_headkv:window=8": (window, partial(op.head_profile, window=8), o.two_stage),
    "knorm:allocate=head_profile:window=3": (
        o.knorm_score,
        partial(op.head_profile, window=3),
        o.top_k,
    ),
    "duo_attention": (
        o.recency_score,
        op.retrieval,
        partial(op.sinks_and_recent, sinks=64),
    ),
    "duo_attention:sinks=5:recent=9": (
        o.recency_score,
        duo,
        partial(op.sinks_and_recent, sinks=5),
    ),
    "snapkv:window=8:allocate=retrieval:sinks=5:recent=9": (window, duo, o.top_k),
}


def write(path: Path, p: op.Profile, **other: object) -> Path:
    content = {
        "model": "test",
        "revision": "",
        "kind": "reason",
        "layers": len(p),
        "kv_heads": len(p[0]),
        "query_heads": 4 * len(p[0]),
        "scores": p,
    }
    path.write_text(json.dumps({**content, **other}))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("profiles")
    return {name: write(folder / f"{i}.json", p) for i, (name, p) in enumerate(PROFILES.items())}


@pytest.fixture(scope="module", params=slow_but(SHAPES, SHAPES[1]), ids=lambda s: f"T{s[0]}-G{s[1]}")
def case(request: pytest.FixtureRequest) -> tuple[Case, list[list[o.Layer]]]:
    lengths, group = request.param
    made = random_case(lengths, heads=HEADS, layers=LAYERS, group=group, seed=group)
    return made, [made.row(r) for r in range(len(lengths))]


def budgets(lengths: list[int]) -> list[list[int]]:
    """One entry, fewer than the window, a fifth, most, all."""
    return [
        [1] * len(lengths),
        [min(6, t) for t in lengths],
        [max(1, round(0.2 * t)) for t in lengths],
        [round(0.47 * t) for t in lengths],
        [t - 1 for t in lengths],
        list(lengths),
    ]


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("spec", CASES)
def test_kept_sets_agree_with_the_oracle(
    spec: str, name: str, case: tuple[Case, list[list[o.Layer]]], files: dict[str, Path]
) -> None:
    layers, rows = case
    score, allocate, select = CASES[spec]
    chosen = policy(spec, profile=str(files[name]))
    ranked = [[score(layer) for layer in row] for row in rows]
    for budget in budgets(layers.lengths):
        kept = decide(chosen, layers.views(chosen, budget), budget)
        for r, row in enumerate(rows):
            tokens = layers.lengths[r]
            shares = allocate(PROFILES[name], budget[r], tokens)
            got = [[(head.nonzero()[:, 0] - (max(layers.lengths) - tokens)).tolist() for head in k[r]] for k in kept]
            assert [[len(head) for head in layer] for layer in got] == shares
            expected = [select(*known) for known in zip(row, ranked[r], shares, strict=True)]
            assert got == expected, (budget, r)


@pytest.mark.parametrize("spec", ["headkv:window=4", "duo_attention:sinks=2:recent=4"])
def test_random_profiles_of_many_heads_are_spread_as_the_oracle_spreads(spec: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    for trial in range(30):
        layers, heads = rng.randint(1, 9), rng.randint(1, 5)
        p = [[rng.random() ** 6 for _ in range(heads)] for _ in range(layers)]
        chosen = policy(spec, profile=str(write(tmp_path / f"{trial}.json", p_of(p))))
        tokens = rng.randint(1, 60)
        b = rng.randint(1, tokens)
        model = random_case((1,), heads=heads, layers=layers).info
        of_layer = chosen.allocate.shares(model, torch.tensor([tokens]), torch.tensor([b]))
        oracle = (
            op.head_profile(p_of(p), b, tokens, window=4)
            if spec.startswith("headkv")
            else op.retrieval(p_of(p), b, tokens, sinks=2, recent=4)
        )
        assert of_layer.tolist() == [[sum(row) for row in oracle]]


def p_of(p: op.Profile) -> op.Profile:
    total = sum(map(sum, p))
    return [[x / total for x in row] for row in p]


def layer_of(case: Case, chosen: Policy, budget: list[int], layer: int) -> Scored:
    view = case.views(chosen, budget)[layer]
    assert chosen.score is not None
    scores = chosen.score.score(view)
    assert isinstance(scores, Scores)
    return Scored(view, scores)


@pytest.mark.parametrize("spec", ["headkv:window=4", "duo_attention:sinks=2:recent=4"])
@pytest.mark.parametrize("name", PROFILES)
def test_any_total_is_spread_exactly_within_what_the_heads_hold(spec: str, name: str, files: dict[str, Path]) -> None:
    case = random_case((50, 31), heads=HEADS, layers=LAYERS, seed=3)
    chosen = policy(spec, profile=str(files[name]))
    budget = [11, 7]
    for index in range(LAYERS):
        layer = layer_of(case, chosen, budget, index)
        held = layer.view.valid.sum(-1)
        for total in ([0, 0], [1, 5], [2, 3], [33, 10], [99, 61], [100, 62]):
            got = chosen.allocate.allocate([layer], torch.tensor(total))
            assert got.shape == (2, 1, HEADS)
            assert got.sum((1, 2)).tolist() == total
            assert bool((got[:, 0] <= held).all())
            assert bool((got >= 0).all())


def test_a_head_that_holds_less_than_its_share_gives_to_the_others(files: dict[str, Path]) -> None:
    case = random_case((40,), heads=HEADS, layers=LAYERS)
    for spec in ("headkv:window=4", "duo_attention:sinks=2:recent=4"):
        chosen = policy(spec, profile=str(files["one head"]))
        layer = layer_of(case, chosen, [12], 2)
        layer.view.valid = layer.view.valid.clone()
        layer.view.valid[0, 1, :30] = False  # an earlier cut has left the best head 10 entries
        got = chosen.allocate.allocate([layer], torch.tensor([25]))
        assert got.tolist() == [[[15, 10]]], spec


def test_a_budget_that_sinks_and_window_fill_is_told_once(files: dict[str, Path]) -> None:
    case = random_case((40, 31), heads=HEADS, layers=LAYERS)
    chosen = policy("duo_attention:sinks=4:recent=8", profile=str(files["mixed"]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        case.keep(chosen, [40, 31])  # all is kept
        case.keep(chosen, [13, 13])
        assert not told
        case.keep(chosen, [13, 12])
        case.keep(chosen, [7, 7])
    (one,) = told
    assert "4 sinks and 8 recent tokens fill the budget" in str(one.message)
    assert "use a larger --budget" in str(one.message)
    assert "\n" not in str(one.message)


def test_a_profile_is_found_read_and_fingerprinted(tmp_path: Path, files: dict[str, Path]) -> None:
    for spec in ("headkv", "critical_headkv", "duo_attention"):
        chosen = policy(f"{spec}:profile={files['mixed']}")
        assert policy(str(chosen)) == chosen
        assert isinstance(chosen.allocate, Profiled)
        one = chosen.allocate.fingerprint("any/model")
        other = policy(spec, profile=str(files["ties"])).allocate.fingerprint("any/model")
        assert len(one) == 16
        assert one != other
        again = tmp_path / "again.json"
        again.write_bytes(files["mixed"].read_bytes())
        assert policy(spec, profile=str(again)).allocate.fingerprint("any/model") == one


def test_without_a_profile_one_line_says_which_command_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    case, chosen = random_case((9,), layers=1), policy("headkv")
    acts = (lambda: case.keep(chosen, [3]), lambda: chosen.allocate.fingerprint("test"))
    for act in acts:
        with pytest.raises(UserError, match="kvbench profile heads --model test") as error:
            act()
        assert "\n" not in str(error.value)


def test_a_profile_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.json", [[0.5, 0.5]])
    with pytest.raises(UserError, match="1 layers by 2 KV heads, but model test has 3 by 2"):
        random_case((9,), layers=3).keep(policy("headkv", profile=str(path)), [3])


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("headkv:pool_share=0", "pool_share=0.0"),
        ("headkv:pool_share=inf", "pool_share=inf"),
        ("headkv:temp=-1", "temp=-1.0"),
        ("headkv:kind=retrieval", "ablation, reason, copy"),
        ("duo_attention:sinks=-1", "sinks=-1"),
        ("duo_attention:recent=0", "recent=0"),
    ],
)
def test_bad_parameters_are_said_in_one_line(spec: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        policy(spec)
    assert "\n" not in str(error.value)


def test_the_reference_model_has_its_profile() -> None:
    from transformers import AutoModelForCausalLM

    from kvbench import reference

    model = AutoModelForCausalLM.from_pretrained(reference.path())
    ids = torch.randint(8, 500, (1, 90), generator=torch.Generator().manual_seed(0))
    for spec in (
        "headkv:window=8",
        "critical_headkv:kind=ablation:window=8",
        "duo_attention:sinks=4:recent=8",
    ):
        kept = [k for k in kvbench.kept(model, ids, spec, 20) if k is not None]
        counts = torch.stack(kept).sum(-1).flatten()
        assert int(counts.sum()) == len(counts) * 20
        assert len(counts.unique()) > 1


@pytest.mark.parametrize("spec", ["headkv:window=3", "critical_headkv:window=3", "duo_attention"])
def test_a_model_without_a_profile_can_be_given_a_stand_in(spec: str, tmp_path: Path) -> None:
    case = random_case((30, 17), heads=HEADS, layers=LAYERS)
    chosen = policy(spec).stand_in(case.info, tmp_path)
    kept = torch.stack(case.keep(chosen, [9, 5])).sum(-1)
    assert kept.sum((0, 2)).tolist() == [6 * 9, 6 * 5]
    assert policy("snapkv").stand_in(case.info, tmp_path) == policy("snapkv")
