"""Head scores agree with a slow loop over the attentions that transformers itself gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvbench.harness.protocol import Request
from kvbench.profiles.needle_attention import NeedleAttention, measure
from kvbench.profiles.needles import Needle
from kvbench.progress import Silent
from kvbench.runs.worker import Prompt

VOCABULARY = 7
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "eos_token_id": None,
}


class Letters:
    """A tokenizer that spells every id as a letter."""

    def __init__(self, eos: int | None = None) -> None:
        self.eos_token_id = eos

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + int(i)) for i in ids)


@pytest.fixture(scope="module", params=["llama G=1", "llama G=2", "qwen3 G=4"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    heads = 2 * int(request.param[-1])
    with torch.random.fork_rng():
        torch.manual_seed(heads)
        if "llama" in request.param:
            return LlamaForCausalLM(LlamaConfig(num_attention_heads=heads, **SHAPE)).eval()
        config = Qwen3Config(num_attention_heads=heads, head_dim=8, **SHAPE)
        return Qwen3ForCausalLM(config).eval()


def needle(ids: list[int], start: int, stop: int, value: str = "?", limit: int = 11, until: str = "") -> Needle:
    request = Request("t", "0", 0, 0, "c", "", "", (until,), limit, (value,))
    cut = len(ids) - 3
    return Needle(Prompt(request, tuple(ids[:cut]), tuple(ids[cut:])), start, stop)


def prompts(count: int) -> list[Needle]:
    rng = np.random.default_rng(1)
    found = []
    for i in range(count):
        length = 31 + 4 * i
        ids = [1, *rng.integers(1, VOCABULARY, length - 1).tolist()]
        start = int(rng.integers(1, 9))
        found.append(needle(ids, start, start + 15 + 3 * i))
    return found


def slow(model: nn.Module, needles: list[Needle], eos: int | None = None) -> dict[str, np.ndarray]:
    """`copy` and `reason` from their definitions: a whole forward for every step of an answer."""
    model.set_attn_implementation("eager")  # type: ignore[operator]
    total: dict[str, Any] = {"copy": 0.0, "reason": 0.0}
    for given in needles:
        ids = [*given.prompt.context_ids, *given.prompt.question_ids]
        prompt = list(ids)
        request = given.prompt.request
        size = given.stop - given.start
        text = ""
        for _ in range(request.max_new_tokens):
            with torch.no_grad():
                out = model(torch.tensor([ids]), output_attentions=True)
            token = int(out.logits[0, -1].argmax())
            attention = [a[0, :, -1].double().numpy() for a in out.attentions]
            for kind in total:
                step = np.zeros((len(attention), len(attention[0])))
                for i, layer in enumerate(attention):
                    for h, row in enumerate(layer):
                        best = sorted(range(len(row)), key=lambda t: (row[t], t), reverse=True)
                        for rank, t in enumerate(best[:size]):
                            if not given.start <= t < given.stop:
                                continue
                            if kind == "reason":
                                step[i, h] += row[t] / size
                            elif rank == 0 and prompt[t] == token:
                                step[i, h] += 1 / size
                total[kind] = total[kind] + step
            ids.append(token)
            text += chr(97 + token)
            ends = [u for u in (*request.until, request.target[0]) if u]
            if token == eos or any(end in text for end in ends):
                break
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    return {kind: x / len(needles) for kind, x in total.items()}


def agree(found: NeedleAttention, expected: dict[str, np.ndarray]) -> None:
    for kind, scores in found.scores.items():
        np.testing.assert_allclose(scores.numpy(), expected[kind], rtol=1e-4, atol=1e-6)


def test_scores_agree_with_the_attentions_of_transformers(model: nn.Module) -> None:
    needles = prompts(6)
    expected = slow(model, needles)
    assert np.count_nonzero(expected["copy"]) > 3  # else the test says nothing
    agree(measure(model, Letters(), needles, Silent()), expected)


def test_scores_are_of_the_right_heads_and_the_mean_of_the_samples(model: nn.Module) -> None:
    needles = prompts(3)
    alone = [measure(model, Letters(), [n], Silent()).scores for n in needles]
    together = measure(model, Letters(), needles, Silent()).scores
    for kind, scores in together.items():
        mean = torch.stack([scores_of[kind] for scores_of in alone]).mean(0)
        torch.testing.assert_close(scores, mean)
        assert scores.shape == (3, model.config.num_attention_heads)  # type: ignore[union-attr]


def test_an_answer_ends_at_its_value_a_stop_string_and_the_limit(model: nn.Module) -> None:
    (plain,) = prompts(1)
    ids = [*plain.prompt.context_ids, *plain.prompt.question_ids]
    new: list[int] = []
    while len(new) < 6:
        out = model(torch.tensor([ids + new])).logits
        new.append(int(out[0, -1].argmax()))
    text = Letters().decode(new)
    for value, until, limit, answered in (
        (text[:2], "", 6, 1.0),  # the answer comes with its second token
        ("?", text[2], 6, 0.0),
        ("?", "", 4, 0.0),
        (text[:4], text[1], 6, float(text[:4] in text[:1])),
    ):
        given = needle(ids, plain.start, plain.stop, value, limit, until)
        found = measure(model, Letters(), [given], Silent())
        agree(found, slow(model, [given]))
        assert found.answered == answered
        assert found.answers[0].correct is bool(answered)
    given = needle(ids, plain.start, plain.stop)
    agree(measure(model, Letters(new[1]), [given], Silent()), slow(model, [given], new[1]))


def test_a_needle_at_the_very_start_or_of_one_token(model: nn.Module) -> None:
    ids = [1, *np.random.default_rng(5).integers(1, VOCABULARY, 39).tolist()]
    needles = [needle(ids, 0, 9), needle(ids, 20, 21)]
    agree(measure(model, Letters(), needles, Silent()), slow(model, needles))


def test_the_model_is_as_it_was_afterwards(
    tiny_llama: LlamaForCausalLM, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    before = tiny_llama.config._attn_implementation
    ids = list(range(5, 45))
    found = measure(tiny_llama, bpe_tokenizer, [needle(ids, 2, 9)], Silent())
    assert tiny_llama.config._attn_implementation == before
    assert not any(m._forward_pre_hooks for m in tiny_llama.modules())
    again = measure(tiny_llama, bpe_tokenizer, [needle(ids, 2, 9)], Silent())
    assert all(torch.equal(found.scores[kind], again.scores[kind]) for kind in found.scores)
