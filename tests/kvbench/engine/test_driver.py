"""What a forward observes does not depend on the code that computes its attention."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench import native
from kvbench.engine import dense
from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import engine, forward, start_observers
from kvbench.engine.models import model_info
from kvbench.engine.observers import MassObserver, QueryObserver
from kvbench.view import AttentionMass, Need, Queries
from tests.kvbench.engine.conftest import SIZE

NEEDS = frozenset({AttentionMass(), AttentionMass(None, 2), AttentionMass(8)})
TOKENS = 63


@pytest.mark.skipif(native.library() is None, reason="no C compiler, or native code is turned off")
@pytest.mark.parametrize("stops", [(TOKENS,), (40, TOKENS)], ids=["once", "chunks"])
def test_attention_sums_what_an_observer_of_all_queries_would(
    stops: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZE | {"head_dim": 32})).eval()
    layers = int(model.config.num_hidden_layers)
    ids = torch.randint(1, 128, (2, TOKENS))
    updated: list[int | None] = []
    update = MassObserver.update

    def counted(self: MassObserver, *observed: Any) -> None:
        updated.append(self.observe)
        update(self, *observed)

    monkeypatch.setattr(MassObserver, "update", counted)

    def observed() -> dict[tuple[Need, int], Tensor]:
        """Observe a prefill in chunks that end at `stops`."""
        updated.clear()
        cache = RaggedCache(model.config)
        start_observers(cache, NEEDS, model_info(model))
        with torch.inference_mode(), engine(model):
            for start, stop in itertools.pairwise((0, *stops)):
                forward(model, cache, ids[:, start:stop])
        return {
            (need, layer): observer.read(layer) for need, observer in cache.observers.items() for layer in range(layers)
        }

    by_native = observed()
    assert updated.count(8) == layers * len(stops)
    assert updated.count(None) == 2 * layers * (len(stops) - 1), "the first chunk's attention sums for two observers"
    monkeypatch.setattr(native, "can_attend_causally", lambda *tensors: False)
    monkeypatch.setattr(dense, "_fits_blocks", lambda *tensors: True)
    in_blocks = observed()
    assert updated.count(None) == 2 * layers * (len(stops) - 1)
    monkeypatch.setattr(dense, "_fits_blocks", lambda *tensors: False)
    expected = observed()
    assert updated.count(None) == 2 * layers * len(stops)
    for found in (by_native, in_blocks):
        assert found.keys() == expected.keys() and len(found) == 3 * layers
        for at, received in found.items():
            assert received.shape == (2, 8, TOKENS)
            torch.testing.assert_close(received, expected[at], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(native.library() is None, reason="no C compiler, or native code is turned off")
@pytest.mark.parametrize("next_tokens", [1, 3])
@pytest.mark.parametrize("power", [None, 1, 2])
def test_window_attention_comes_with_the_sums_of_all_queries_until_more_tokens_come(
    power: int | None, next_tokens: int
) -> None:
    torch.manual_seed(3)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZE | {"head_dim": 32})).eval()
    ids = torch.randint(1, 128, (2, TOKENS))
    needs: set[Need] = {Queries(native.WINDOW), Queries(5)} | ({AttentionMass(None, power)} if power else set())
    cache = RaggedCache(model.config)
    start_observers(cache, frozenset(needs), model_info(model))
    observer, shorter = cache.observers[Queries(native.WINDOW)], cache.observers[Queries(5)]
    assert isinstance(observer, QueryObserver) and isinstance(shorter, QueryObserver)
    with torch.inference_mode(), engine(model):
        forward(model, cache, ids)
        for index, layer in enumerate(cache.ragged):
            assert shorter.last(index).window_sums is None
            sums = observer.last(index).window_sums
            if power != 1:
                assert sums is None
                continue
            assert sums is not None and layer.key is not None
            assert torch.equal(sums, native.window_attention_sum(observer.read(index), layer.key, layer.scale))
            assert observer.fork().last(index).window_sums is sums
            assert observer.sequence(0, TOKENS).last(index).window_sums is None
        forward(model, cache, ids[:, :next_tokens])
    held = [part for index in range(len(cache.ragged)) for part in observer._held[index]]
    assert all(part.window_sums is None for part in held), "other queries are the last ones now"
