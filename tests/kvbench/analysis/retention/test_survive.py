"""Survival, against loops over the attention weights that transformers' own code gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.analysis.retention import survive
from kvbench.analysis.retention.survive import InUse, InUseObserver, Survival, alive_at, horizons
from kvbench.engine.driver import engine
from kvbench.engine.prefix import Prefix
from kvbench.view.softmax import LogitScale
from tests.kvbench.analysis.retention import oracles

TOP, MASS = (1, 3, 9), (0.3, 0.9, 0.99)
CRITERIA = [("top", float(k)) for k in TOP] + [("mass", p) for p in MASS]


def rows_of(weights: torch.Tensor, kind: str, value: float) -> list[set[int]]:
    """What every query of a head selects, `weights` being `[T, T]`."""
    return [oracles.selected(weights[p, : p + 1].tolist(), kind, value) for p in range(len(weights))]


def test_it_is_what_the_attention_of_the_model_says(
    model: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survive, "_BLOCK", 700)  # some queries at a time
    need = InUse(TOP, MASS)
    with engine(model), torch.no_grad():
        prefix = Prefix(model, {need})
        prefix.extend(torch.tensor([ids[:40]]))
        for token in ids[40:]:  # an answer comes token by token
            prefix.extend(torch.tensor([[token]]))
        observer = prefix.cache.observers[need]
        last = [observer.read(i)[:, 0] for i in range(3)]
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = model.double()(torch.tensor([ids]), output_attentions=True)
    finally:
        model.float().set_attn_implementation("sdpa")
    at = [0, 1, 5, 30, 60]
    survival = Survival(at)
    survival.add(last)
    assert survival.alive is not None
    for criterion, (kind, value) in enumerate(CRITERIA):
        for layer, weights in enumerate(out.attentions):
            for head in range(4):
                rows = rows_of(weights[0, head], kind, value)
                newest = [[p for p in range(61) if i in rows[p]] or [-1] for i in range(61)]
                assert last[layer][criterion, head].tolist() == [max(n) for n in newest]
                for n, horizon in enumerate(at):
                    alive, could = oracles.alive(rows, horizon)
                    assert int(survival.alive[criterion, layer, head, n]) == alive
                    assert survival.tokens[n] == could


def test_shares_of_attention_have_the_models_soft_cap() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 19, 8), torch.randn(1, 2, 19, 8)
    counts = []
    for cap in (None, 0.8):
        observer = InUseObserver((), MASS)
        scale = LogitScale(0.4, cap, torch.tensor([3.0, -2.0, 0.0, 9.0]))
        observer.update(0, q, k, k, q, torch.ones(1, 19, dtype=torch.bool), scale)
        newest = observer.read(0)[:, 0]
        for head in range(4):
            logits = 0.4 * q[0, head].double() @ k[0, head // 2].double().T
            logits = logits if cap is None else cap * torch.tanh(logits / cap)
            weights = logits.masked_fill(torch.ones(19, 19).triu(1).bool(), -torch.inf).softmax(-1)
            for criterion, share in enumerate(MASS):
                rows = rows_of(weights, "mass", share)
                expected = [max([p for p in range(19) if i in rows[p]] or [-1]) for i in range(19)]
                assert newest[criterion, head].tolist() == expected
        counts.append(newest)
    assert not torch.equal(*counts)


def test_equal_logits_go_to_the_more_recent_token() -> None:
    observer = InUseObserver((2,), (0.5,))
    q, k = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)
    observer.update(0, q, k, k, q, torch.ones(1, 4, dtype=torch.bool), 1.0)
    top, mass = observer.read(0)[:, 0, 0].tolist()
    # Queries 0 to 3 select {0}, {0, 1}, {1, 2}, {2, 3}; of half the mass {0}, {1}, {1, 2}, {2, 3}.
    assert top == [1, 2, 3, 3]
    assert mass == [0, 2, 3, 3]


def test_counts_add_up_over_texts_of_any_length() -> None:
    survival = Survival([0, 2])
    survival.add([torch.tensor([[[2, -1, 2]]])])  # one head: token 0 lives 2, token 2 lives 0
    survival.add([torch.tensor([[[-1]]])])
    assert survival.alive is not None
    assert survival.alive.flatten().tolist() == [2, 1]
    assert survival.tokens == [4, 1]
    assert survival.shares().flatten().tolist() == [0.5, 1.0]


def test_a_token_that_nobody_selects_is_never_alive() -> None:
    assert alive_at(torch.tensor([-1, -1]), [0, 1, 5]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("most", [1, 2, 31, 4096])
def test_horizons_run_from_none_to_the_last(most: int) -> None:
    found = horizons(most)
    assert (found[0], found[1], found[-1]) == (0, 1, most)
    assert found == sorted(set(found))
    assert len(found) <= 34


def test_sequences_may_stand_side_by_side() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8)
    valid = torch.ones(2, 9, dtype=torch.bool)
    both = InUseObserver(TOP, MASS)
    both.update(0, q, k, k, q, valid, 0.3)
    alone = []
    for row in range(2):
        one = InUseObserver(TOP, MASS)
        one.update(0, q[row : row + 1], k[row : row + 1], k, q, valid[:1], 0.3)
        assert torch.equal(both.read(0)[:, [row]], one.read(0))
        alone.append(one)
    assert torch.equal(InUseObserver.stack(alone).read(0), both.read(0))
