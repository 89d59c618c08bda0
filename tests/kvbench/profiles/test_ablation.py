"""Losses without heads agree with a slow forward whose attention is masked head by head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvbench.engine.driver import engine
from kvbench.engine.loading import load_model
from kvbench.engine.prefix import Prefix
from kvbench.errors import UserError
from kvbench.harness.protocol import Request
from kvbench.profiles import ablation
from kvbench.profiles.ablation import (
    SINKS,
    WINDOW,
    Evidence,
    Head,
    Mean,
    head_losses,
    losses,
    orders,
    top_heads,
    verify,
)
from kvbench.profiles.command import check, per_kv_head, significant
from kvbench.profiles.needle_attention import NeedleAnswer, NeedleAttention
from kvbench.profiles.needles import Needle
from kvbench.progress import Silent
from kvbench.runs.prompts import Prompt

VOCABULARY, LAYERS, HEADS = 11, 2, 2
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": HEADS,
    "initializer_range": 0.3,
    "eos_token_id": None,
}
EVERY = [(i, h) for i in range(LAYERS) for h in range(HEADS)]


@pytest.fixture(scope="module", params=["llama G=1", "llama G=2", "qwen3 G=4"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    heads = HEADS * int(request.param[-1])
    with torch.random.fork_rng():
        torch.manual_seed(heads)
        if "llama" in request.param:
            return LlamaForCausalLM(LlamaConfig(num_attention_heads=heads, **SHAPE)).eval()
        config = Qwen3Config(num_attention_heads=heads, head_dim=8, **SHAPE)
        return Qwen3ForCausalLM(config).eval()


def answer(model: nn.Module, context: int, question: int, tokens: int, seed: int = 0) -> NeedleAnswer:
    """A random prompt with the model's own answer."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCABULARY, context + question).tolist()
    for _ in range(tokens):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    request = Request("t", "0", 0, 0, "c", "", "", (), tokens, ("?",))
    prompt = Prompt(request, tuple(ids[:context]), tuple(ids[context : context + question]))
    return NeedleAnswer(Needle(prompt, 3, 9), tuple(ids[context + question :]), True)


def slow(model: nn.Module, given: NeedleAnswer, ablated: Sequence[Head]) -> float:
    """Mean log-likelihood of the answer, no token less likely than by chance.

    One forward of everything: from the question on, ablated heads do not see what is neither among
    the first nor among the last tokens of the context.
    """
    prompt = given.needle.prompt
    ids = [*prompt.context_ids, *prompt.question_ids, *given.tokens]
    context = min(len(prompt.context_ids), len(ids) - len(given.tokens) - 1)

    def masked(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        group = q.shape[1] // k.shape[1]
        out = torch.zeros_like(q)
        for g in range(q.shape[1]):
            for t in range(q.shape[2]):
                seen = [*range(t + 1)]
                if (module.layer_idx, g // group) in ablated and t >= context:
                    gone = range(SINKS, context - WINDOW)
                    seen = [i for i in seen if i not in gone]
                weights = torch.softmax(q[0, g, t] @ k[0, g // group, seen].T * scaling, -1)
                out[0, g, t] = weights @ v[0, g // group, seen]
        return out.transpose(1, 2), None

    AttentionInterface.register("masked", masked)
    model.set_attn_implementation("masked")  # type: ignore[operator]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    first = len(ids) - len(given.tokens)
    likely = [float(logits[first + n - 1, token]) for n, token in enumerate(given.tokens)]
    return sum(max(x, -math.log(VOCABULARY)) for x in likely) / len(likely)


@pytest.mark.parametrize("shape", [(61, 7, 3), (50, 1, 1), (80, 0, 2), (20, 5, 2)])
def test_losses_agree_with_attention_masked_by_head(
    model: nn.Module, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = answer(model, *shape)
    sets: list[list[Head]] = [[], [(0, 0)], [(1, 1)], [(0, 1), (1, 0)], EVERY]
    full = slow(model, given, [])
    expected = [full - slow(model, given, gone) for gone in sets]
    for held in (1 << 30, 1):  # all caches at once, or one by one
        monkeypatch.setattr(ablation, "_BYTES", held)
        with torch.no_grad(), engine(model):
            found = losses(model, given, sets)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)
    if shape[0] > SINKS + WINDOW:
        assert max(map(abs, expected)) > 0.01  # else the test says nothing
    else:
        assert expected == [0.0] * len(sets)


@pytest.mark.slow
def test_a_heads_share_is_the_mean_of_its_steps_in_two_orders(model: nn.Module) -> None:
    given = [answer(model, 60, 5, 2, seed) for seed in range(2)]
    found = head_losses(model, given, 3, Silent())
    for n, one in enumerate(given):
        lost = {
            frozenset(gone): slow(model, one, []) - slow(model, one, gone)
            for size in range(len(EVERY) + 1)
            for gone in itertools.combinations(EVERY, size)
        }
        pair = orders(EVERY, 3, n)
        assert pair[0] == pair[1][::-1]
        for i, h in EVERY:
            steps = []
            for order in pair:
                before = frozenset(order[: order.index((i, h))])
                steps.append(lost[before | {(i, h)}] - lost[before])
            assert float(found[n, i, h]) == pytest.approx(sum(steps) / 2, abs=1e-4)
        assert float(found[n].sum()) == pytest.approx(lost[frozenset(EVERY)], abs=1e-4)


def test_the_prefilled_cache_is_not_changed(model: nn.Module) -> None:
    with torch.no_grad(), engine(model):
        prefix = Prefix(model, ())
        prefix.extend(torch.randint(VOCABULARY, (1, 60)))
        before = [layer.key.clone() for layer in prefix.cache.ragged if layer.key is not None]
        copy = ablation.ablate(prefix.cache, [(0, 1)], 4)
        assert copy.ragged[0].length == [60, SINKS + WINDOW]
        assert copy.ragged[1].length == [60, 60]
        for layer, key in zip(prefix.cache.ragged, before, strict=True):
            assert layer.key is not None
            assert torch.equal(layer.key, key)


@pytest.mark.parametrize("count", [2, 3, 7, 40])
def test_a_mean_has_students_interval(count: int) -> None:
    samples = torch.from_numpy(np.random.default_rng(count).normal(1, 2, (count, 3)))
    found = Mean.of(samples)
    error = scipy.stats.sem(samples.numpy())
    quantile = scipy.stats.t.ppf(0.975, count - 1) if count < 11 else scipy.stats.norm.ppf(0.975)
    np.testing.assert_allclose(found.mean.numpy(), samples.numpy().mean(0))
    np.testing.assert_allclose(found.margin.numpy(), quantile * error, rtol=1e-4)


def test_the_top_heads_are_the_fewest_that_hold_half() -> None:
    scores = torch.tensor([[0.1, 0.3], [0.4, 0.2]])
    assert top_heads(scores) == [(1, 0), (0, 1)]
    assert top_heads(scores * 7) == top_heads(scores)
    assert top_heads(torch.tensor([[0.5, 0.25], [0.25, 0.0]])) == [(0, 0)]
    assert top_heads(torch.ones(2, 2)) == [(0, 0), (0, 1)]
    assert top_heads(torch.tensor([[0.0, 1.0]])) == [(0, 1)]


# --- what is noise --------------------------------------------------------------------------------


def test_heads_that_cannot_be_told_from_zero_count_nothing() -> None:
    g = torch.Generator().manual_seed(0)
    noise = torch.randn(30, 2, 3, generator=g, dtype=torch.float64)
    with pytest.raises(UserError, match="no KV head of m is needed") as error:
        significant(noise - noise.mean(0), "m")
    assert "--task" in str(error.value)
    assert "\n" not in str(error.value)
    signal = noise - noise.mean(0)
    signal[:, 1, 2] += 5.0
    scores = significant(signal, "m")
    assert scores.nonzero().tolist() == [[1, 2]]
    assert float(scores[1, 2]) == pytest.approx(5.0)


def test_attention_scores_are_summed_over_the_query_heads_of_a_kv_head() -> None:
    scores = torch.tensor([[1.0, 2.0, 0.0, 1.0], [0.0, 0.0, 3.0, 1.0]], dtype=torch.float64)
    found = NeedleAttention({"reason": scores, "copy": scores * 0}, ())
    assert per_kv_head(found, "reason", 2, "m").tolist() == [[3.0, 1.0], [0.0, 4.0]]
    assert per_kv_head(found, "reason", 4, "m")[1].tolist() == [0.0, 0.0, 3.0, 1.0]
    with pytest.raises(UserError, match=r"no head .* copy profile .*--kind ablation") as error:
        per_kv_head(found, "copy", 2, "m")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "way"), [("reason", "--kind ablation"), ("ablation", "--samples")])
def test_a_profile_whose_heads_do_not_matter_is_refused(kind: str, way: str) -> None:
    check(Evidence(2, 8, 3.0, 0.1, holds=True), kind, "m")
    with pytest.raises(UserError, match=rf"does not tell which heads matter.* 2 of 8 .*{way}") as e:
        check(Evidence(2, 8, 0.0002, 1.2, holds=False), kind, "m")
    assert "\n" not in str(e.value)


@pytest.mark.slow
def test_the_reference_models_last_layer_is_what_matters() -> None:
    """What attention says (layers 1 and 2) does not hold; what ablation says (layer 3) does."""
    from kvbench.profiles.needle_attention import measure
    from kvbench.profiles.needles import find_needles
    from kvbench.runs.grid import Grid
    from kvbench.runs.planning import plan

    given = {"tasks": "niah_single_2", "lengths": [512], "samples": 8, "device": "cpu"}
    (stage,) = plan(Grid.from_dict({**given, "models": "reference", "policies": "full"}), print).stages
    network = load_model("reference", None, torch.device("cpu"), torch.float32)
    needles = find_needles(stage.tokenizer, stage.jobs[0].prompts)
    measured = measure(network, stage.tokenizer, needles, Silent())
    answers = [a for a in measured.answers if a.correct]
    assert len(answers) >= 6
    attention = per_kv_head(measured, "reason", 2, "reference")
    assert int(attention.sum(1).argmax()) < 3
    assert not verify(network, answers, attention, 0, Silent()).holds
    shares = significant(head_losses(network, answers, 0, Silent()), "reference")
    assert float(shares[3].sum() / shares.sum()) > 0.9
    found = verify(network, answers, shares, 0, Silent())
    assert found.holds
    assert found.top > 10 * found.others
