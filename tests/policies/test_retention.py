"""Learned gates: what they keep, entry by entry, and what the engine keeps beside the entries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import engine, forward
from kvbench.engine.models import model_info
from kvbench.engine.prefix import Compression, Prefix
from kvbench.plugin import ModelInfo, Policy, View
from kvbench.spelling import policy
from kvbench_policies.gates import load
from kvbench_policies.gates.learned import GateOutput, Learned
from tests.sweeps import slow

from . import oracles_retention as o
from .drawing import HEADS, LAYERS, llama, padded, tokens
from .views import decide

WORTH: dict[str, o.Worth] = {
    "trimkv": o.retention,
    "trimkv:variant=release": partial(o.retention, release=True),
    "trimkv:score=lookahead:horizon=1": partial(o.look_ahead, horizon=1),
    "dbtrimkv": partial(o.look_ahead, horizon=2),
    "dbtrimkv:allocate=uniform": partial(o.look_ahead, horizon=2),
    "dbtrimkv:horizon=7": partial(o.look_ahead, horizon=7),
    "dbtrimkv:horizon=200": partial(o.look_ahead, horizon=200),
    "dbtrimkv:horizon=0": partial(o.look_ahead, horizon=0),
    "trimkv:allocate=global": o.retention,
}


def info(layers: int, heads: int, group: int = 2) -> ModelInfo:
    return ModelInfo("made", layers, heads, heads * group, 8, 16, lambda layer: torch.empty(0))


def views(
    chosen: Policy,
    learned: Tensor,
    lengths: Sequence[int],
    budget: Sequence[int],
    *,
    moment: Any = "context",
    position: Tensor | None = None,
    seen: Sequence[int] | None = None,
    final: bool = True,
) -> list[View]:
    """Layers whose gates said `learned` `[L, B, H, n]`; rows are padded on the left."""
    layers, batch, heads, n = learned.shape
    valid = torch.arange(n) >= n - torch.tensor(lengths)[:, None]
    if position is None:
        position = (valid.long().cumsum(-1) - 1)[:, None].expand(-1, heads, -1).expand(layers, -1, -1, -1)
    assert isinstance(chosen.score, Learned)
    return [
        View(
            layer=i,
            moment=moment,
            length=torch.tensor(seen or lengths),
            col=torch.arange(n).expand(batch, heads, n),
            position=position[i],
            valid=valid[:, None].expand(-1, heads, -1),
            key=torch.zeros(batch, heads, n, 8),
            value=torch.zeros(batch, heads, n, 8),
            obs={chosen.score._need: learned[i].masked_fill(~valid[:, None], float("nan"))},
            extras={},
            model=info(layers, heads),
            scale=1.0,
            seed=torch.zeros(batch, dtype=torch.long),
            budget=torch.tensor(budget),
            final=final,
        )
        for i in range(layers)
    ]


def entries(made: Sequence[View], row: int) -> tuple[list[o.Entry], o.Learned]:
    """What a row holds and what the gates said of it, for the oracle."""
    found: o.Learned = {}
    for v in made:
        (said,) = v.obs.values()
        for h in range(v.shape[1]):
            for j in v.valid[row, h].nonzero()[:, 0].tolist():
                found[o.Entry(v.layer, h, int(v.position[row, h, j]))] = float(said[row, h, j])
    return list(found), found


def kept(made: Sequence[View], keep: Sequence[Tensor], row: int) -> set[o.Entry]:
    return {
        o.Entry(v.layer, h, int(p))
        for v, k in zip(made, keep, strict=True)
        for h in range(v.shape[1])
        for p in v.position[row, h][k[row, h]]
    }


def spread(shape: Sequence[int], low: float, high: float, seed: int) -> Tensor:
    """`log beta` from `-low` to `-high`, even in its logarithm."""
    g = torch.Generator().manual_seed(seed)
    exponent = torch.rand(*shape, generator=g, dtype=torch.float64)
    return -(low * (high / low) ** exponent).float()


RANGES = {"all": (1e-9, 20.0), "bias 18": (1e-9, 1e-7), "near the switch": (1e-4, 1e-2)}


@pytest.mark.parametrize("which", RANGES)
@pytest.mark.parametrize("spec", WORTH)
@pytest.mark.parametrize("lengths", [slow((1,)), slow((2,)), slow((33,)), (33, 20, 3)])
def test_a_context_is_cut_to_the_entry(spec: str, lengths: tuple[int, ...], which: str) -> None:
    chosen, worth = policy(spec), WORTH[spec]
    everywhere = chosen.allocate.name == "global"
    assert chosen.score is not None
    chosen_by = chosen.score.parameters()
    learned = spread((2, len(lengths), 3, max(lengths)), *RANGES[which], seed=sum(lengths))
    at_once = views(chosen, learned, lengths, [1] * len(lengths))
    of_rows = [entries(at_once, row) for row in range(len(lengths))]
    orders = [o.ranked(*of_rows[r], t - 1, worth) for r, t in enumerate(lengths)]
    values = [
        {e: worth(said[e], t - 1 - e.position) for e in held} for (held, said), t in zip(of_rows, lengths, strict=True)
    ]
    for b in range(1, max(lengths) + 1):
        budget = [min(b, t) for t in lengths]
        made = views(chosen, learned, lengths, budget)
        found = decide(chosen, made, budget)
        for row, m in enumerate(budget):
            got = kept(made, found, row)
            if everywhere:
                want = set(orders[row][: 6 * m])
            else:
                want = {e for mine in o.heads_of(orders[row]).values() for e in mine[:m]}
            slack = 4.2e-8 if which == "near the switch" and "horizon" in chosen_by else 0.0
            if slack or chosen_by.get("horizon") == 0:
                close(got, want, values[row], everywhere, slack)
            else:
                assert got == want, (m, row)


def close(
    got: set[o.Entry],
    want: set[o.Entry],
    values: dict[o.Entry, o.Number],
    everywhere: bool,
    slack: float,
) -> None:
    """What differs is as near to the border as float32, or a series, can tell."""
    for head in [None] if everywhere else list(o.heads_of(list(want))):
        mine, theirs = ({e for e in x if head in (None, e[:2])} for x in (got, want))
        assert len(mine) == len(theirs)
        border = float(min(values[e] for e in theirs))
        for e in mine ^ theirs:
            off = abs(float(values[e]) - border)
            assert off <= 2 * slack + 2.0**-23 * (abs(border) + 5.4), (e, off)


@pytest.mark.parametrize("spec", WORTH)
def test_of_equal_gates_the_most_recent_stay(spec: str) -> None:
    chosen = policy(spec)
    for keep in decide(chosen, views(chosen, torch.full((2, 1, 3, 21), -1e-9), [21], [4]), [4]):
        assert keep[0].nonzero()[:, 1].tolist() == [17, 18, 19, 20] * 3


@pytest.mark.parametrize("log_beta", [-1e-30, -1e-9, -1e-8, -3e-5, -1e-3, -0.7, -20.0, -1e4, -0.0])
@pytest.mark.parametrize("horizon", [0, 1, 2, 1000, 1 << 20])
def test_look_ahead_is_finite_and_falls_with_age(log_beta: float, horizon: int) -> None:
    chosen = policy("dbtrimkv", horizon=horizon)
    assert chosen.score is not None
    (v,) = views(chosen, torch.full((1, 1, 1, 65), log_beta), [65], [3])
    value = chosen.score.score(v)
    assert isinstance(value, Tensor)
    assert bool(value.isfinite().all())
    assert bool((value.diff() >= 0).all())
    if log_beta < -1e-3 or (horizon and log_beta < -1e-29):
        assert bool((value.diff() > 0).all()), "recency is not lost"


def test_of_two_gates_near_one_the_order_is_that_of_the_sums() -> None:
    """Where the plain form is 0 / 0 and log tau would swamp what is left."""
    chosen = policy("dbtrimkv")
    learned = torch.tensor([[[[-2.0e-9, -1.0e-9, -1.5e-9, -1.0e-9]]]])
    made = views(chosen, learned, [4], [1])
    held, said = entries(made, 0)
    for b in (1, 2, 3):
        (keep,) = decide(chosen, views(chosen, learned, [4], [b]), [b])
        order = o.ranked(held, said, 3, WORTH["dbtrimkv"])[:b]
        assert keep[0, 0].nonzero()[:, 0].tolist() == sorted(e.position for e in order)


@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("lengths", [(40,), (40, 23, 5)])
def test_locret_protects_the_newest_entries(final: bool, lengths: tuple[int, ...]) -> None:
    chosen = policy("locret:stabilizers=11:local=4")
    g = torch.Generator().manual_seed(3)
    learned = torch.randn(2, len(lengths), 3, max(lengths), generator=g)
    # Positions with gaps, other ones in every head: what an earlier cut leaves.
    gaps = torch.randint(1, 4, learned.shape, generator=g)
    position = gaps.cumsum(-1)
    newest = position[..., -1].amax((0, 2))
    position = position + (newest[:, None] - position[..., -1])[..., None]
    position[..., -1] = newest[:, None]
    for b in (1, 3, 4, 5, 11, 12, 30):
        budget = [min(b, t) for t in lengths]
        seen = (newest + 1).tolist()
        made = views(
            chosen, learned, lengths, budget, moment="chunked", position=position, seen=seen,
            final=final,
        )  # fmt: skip
        found = decide(chosen, made, budget)
        for row, m in enumerate(budget):
            held, said = entries(made, row)
            if final:  # local counts tokens: no entry older than that is protected
                want: set[o.Entry] = set()
                for mine in o.heads_of(held).values():
                    near = [e for e in mine if seen[row] - 1 - e.position < 4]
                    want |= set(o.predicted(mine, said, m, newest_entries=len(near)))
            else:
                want = set(o.predicted(held, said, m, newest_entries=11))
            assert kept(made, found, row) == want


# --- through the real engine ----------------------------------------------------------------------


class Record:
    """What the gates said of every token that entered the cache, `[B, H, tokens]` by layer."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.said: dict[int, list[Tensor]] = {}
        plain = GateOutput.measure

        def measure(need: GateOutput, layer: int, *rest: Any) -> Tensor:
            found = plain(need, layer, *rest)
            self.said.setdefault(layer, []).append(found)
            return found

        patch.setattr(GateOutput, "measure", measure)

    def learned(self, row: int, first: int) -> o.Learned:
        """By entry; `first` columns of the row are padding."""
        return {
            o.Entry(layer, h, column - first): float(said[h, column])
            for layer, parts in self.said.items()
            for said in [torch.cat(parts, -1)[row]]
            for h in range(said.shape[0])
            for column in range(first, said.shape[1])
        }


def held_by(cache: RaggedCache, row: int, first: int) -> set[o.Entry]:
    return {
        o.Entry(i, h, c - first)
        for i, layer in enumerate(cache.ragged)
        for h in range(HEADS)
        for s in [row * HEADS + h]
        for c in layer.col[layer.start[s] : layer.start[s] + layer.length[s]].tolist()
    }


@pytest.mark.parametrize("buffer", [0, 3])
@pytest.mark.parametrize("group", [slow(1), 2, slow(4)])
@pytest.mark.parametrize("spec", ["trimkv", "trimkv:variant=release", "dbtrimkv"])
@torch.no_grad()
def test_decode_is_cut_to_the_entry(
    spec: str, group: int, buffer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, budget, lengths = llama(group), 7, [23, 14, 5]
    chosen = policy(f"{spec}:buffer={buffer}").stand_in(model_info(model), tmp_path)
    everywhere, worth, heads = spec == "dbtrimkv", WORTH[spec], LAYERS * HEADS
    ids, mask = padded(tokens(lengths))
    first = [ids.shape[1] - n for n in lengths]
    record = Record(monkeypatch)
    held: list[list[o.Entry]] = [[] for _ in lengths]
    with kvbench.attach(model, chosen, budget, moment="decode") as cache:
        seen = 0
        for n in (ids.shape[1], *[1] * 9, 3, 1, 1):
            if seen:
                ids = torch.arange(n)[None].expand(3, -1) + seen
                mask = torch.cat([mask, torch.ones(3, n, dtype=torch.bool)], 1)
            model(ids, attention_mask=mask.long(), past_key_values=cache)
            seen += n
            for row in range(3):
                learned = record.learned(row, first[row])
                new = {e for e in learned if e.position >= max(0, seen - n - first[row])}
                held[row] += sorted(new)
                if len(held[row]) >= heads * (budget + max(1, buffer)):
                    newest = seen - first[row] - 1
                    rest = (learned, newest, worth, budget)
                    before = held[row]
                    held[row] = o.cut(before, *rest, everywhere=everywhere, heads=heads)
                    if not everywhere:
                        assert set(o.one_at_a_time(before, *rest)) == set(held[row])
                assert held_by(cache, row, first[row]) == set(held[row]), (row, seen)
        need = chosen.score._need  # type: ignore[union-attr]
        for row in range(3):
            learned = record.learned(row, first[row])
            for i, layer in enumerate(cache.ragged):
                for h in range(HEADS):
                    at = layer.start[row * HEADS + h]
                    own = slice(at, at + layer.length[row * HEADS + h])
                    for c, x in zip(layer.col[own], layer.extras[need][own], strict=True):
                        assert learned[o.Entry(i, h, int(c) - first[row])] == float(x)


@torch.no_grad()
def test_locret_is_told_which_cut_is_the_last(tmp_path: Path) -> None:
    model = llama(2)
    chosen = policy("locret:stabilizers=5:local=2").stand_in(model_info(model), tmp_path)
    (ids,) = tokens([45])
    cell = Compression(chosen, Budget.parse("8"), "chunked", 0, 45)
    with engine(model):
        prefix = Prefix(model, chosen.needs)
        prefix.extend(ids[None, :20])
        cache = prefix.compress([cell])[0]
        seen = 20
        for n in (20, 5):
            protected = [seen - 1 - j for j in range(5)]
            held = held_by(cache, 0, 0)
            assert all(o.Entry(i, h, p) in held for i in range(LAYERS) for h in range(HEADS) for p in protected)
            assert cache.eviction_state is not None
            cache.eviction_state.final = seen + n >= 45
            forward(model, cache, ids[None, seen : seen + n])
            seen += n
        held = held_by(cache, 0, 0)
        assert len(held) == LAYERS * HEADS * 8
        newest = [{p for i, h, p in held if (i, h) == (j, k)} for j in range(2) for k in range(2)]
        assert all({43, 44} <= mine for mine in newest)
        assert any(not {40, 41, 42} <= mine for mine in newest), "no stabilizers at the last cut"


@pytest.mark.parametrize("group", [slow(1), 2, slow(4)])
@pytest.mark.parametrize("spec", ["trimkv", "dbtrimkv", "locret"])
@torch.no_grad()
def test_what_stays_beside_an_entry_is_the_gate_on_the_hidden_state(spec: str, group: int, tmp_path: Path) -> None:
    """Nothing is evicted: it is what a loop over the gate's weights gives for the full run."""
    model, lengths = llama(group), [19, 12, 11]
    chosen = policy(spec).stand_in(model_info(model), tmp_path)
    assert isinstance(chosen.score, Learned)
    ids, mask = padded(tokens(lengths))
    gates = load(str(chosen.score.gates), model_info(model))
    weights = {name: x.numpy() for name, x in gates.state_dict().items()}
    shown: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: shown.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]),
            with_kwargs=True,
        )
        for layer in model.model.layers
    ]
    position = (mask.long().cumsum(-1) - 1).clamp(min=0)
    model(ids, attention_mask=mask.long(), position_ids=position)
    for hook in hooks:
        hook.remove()
    with kvbench.attach(model, chosen, 64, moment="decode") as cache:
        at = 0
        for n in (9, 1, 1, 8):  # in pieces
            model(
                ids[:, at : at + n],
                attention_mask=mask[:, : at + n].long(),
                past_key_values=cache,
            )
            at += n
    for i, (layer, hidden) in enumerate(zip(cache.ragged, shown, strict=True)):
        attention = model.model.layers[i].self_attn
        said = layer.extras[chosen.score._need]
        for row, n in enumerate(lengths):
            for t in range(n):
                x = hidden[row, 19 - n + t]
                if spec == "locret":
                    x = torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)])
                    want = list(o.gate(x.double().numpy(), weights, i))
                elif spec == "trimkv":
                    want = [o.log_sigmoid(z) for z in o.gate(x.double().numpy(), weights, i)]
                else:
                    logits = o.tied_gate(x.double().numpy(), weights, i, HEADS)
                    want = [o.log_sigmoid(z) for z in logits]
                for h in range(HEADS):
                    segment = row * HEADS + h
                    assert layer.length[segment] == n
                    got = float(said[layer.start[segment] + t])
                    assert got == pytest.approx(want[h], abs=2e-4, rel=2e-4)
