"""Training behind cuts: attention over a memory, and the loss of a pass chunk by chunk."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from kvbench.errors import UserError
from kvbench.training.memory import TrainingMemory
from kvbench.view.softmax import LogitScale

from .test_student import _batch, _student

SMALL = {"capacity": 10, "chunk": 12, "kernel_size": 3, "kl": False, "with_capacity": False}


def keep_most(
    gates: Any,
    layer: int,
    key: Tensor,
    value: Tensor,
    mass: Tensor,
    valid: Tensor,
    budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut to the entries of most attention, in their order; what is missing comes last."""
    best = mass.masked_fill(~valid, -1.0).topk(budget, -1).indices
    best = best.masked_fill(~valid.gather(2, best), key.shape[2]).sort(-1).values
    valid = best < key.shape[2]
    best = best.clamp(max=key.shape[2] - 1)
    rows = best[..., None].expand(-1, -1, -1, key.shape[-1])
    return key.gather(2, rows), value.gather(2, rows), mass.gather(2, best), valid


@pytest.mark.parametrize(("group", "is_plain"), [(1, True), (2, True), (4, True), (2, False)])
@pytest.mark.parametrize("lengths", [(23,), (23, 9, 14)], ids=str)
def test_attention_over_a_memory_is_its_equation(group: int, is_plain: bool, lengths: tuple[int, ...]) -> None:
    """A loop in float64: attend, add up what was received, keep the most, chunk by chunk."""
    heads, dim, budget, longest = 2, 4, 5, max(lengths)
    rng = torch.Generator().manual_seed(group)
    q = torch.randn(len(lengths), heads * group, longest, dim, generator=rng)
    k, v = (torch.randn(len(lengths), heads, longest, dim, generator=rng) for _ in range(2))
    valid = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    for x in (q, k, v):
        x[~valid[:, None].expand(x.shape[:3])] = 50.0
    sinks = torch.linspace(-30.0, 2.0, heads * group)
    scale = 0.5 if is_plain else LogitScale(0.5, 1.5, sinks)
    memory = TrainingMemory(keep_most, nn.Identity(), budget)
    parts = [slice(s, s + 7) for s in range(0, longest, 7)]
    found = torch.cat([memory.attend(0, q[:, :, p], k[:, :, p], v[:, :, p], valid[:, p], scale) for p in parts], 2)
    for r, length in enumerate(lengths):
        for h in range(heads):
            held: list[int] = []
            mass: dict[int, float] = {}
            for part in parts:
                if len(held) > budget:
                    held = sorted(sorted(held, key=lambda i: mass[i], reverse=True)[:budget])
                new = [t for t in range(longest)[part] if t >= longest - length]
                held = held + new
                mass |= dict.fromkeys(new, 0.0)
                for g in range(group):
                    for t in new:
                        query = q[r, h * group + g, t].double().numpy()
                        seen = [i for i in held if i <= t]
                        logits = [0.5 * float(query @ k[r, h, i].double().numpy()) for i in seen]
                        if not is_plain:
                            logits = [1.5 * math.tanh(x / 1.5) for x in logits]
                        weights = [math.exp(x - max(logits)) for x in logits]
                        total = sum(weights)
                        if not is_plain:
                            total += math.exp(float(sinks[h * group + g]) - max(logits))
                        out = np.zeros(dim)
                        for i, w in zip(seen, weights, strict=True):
                            out = out + w / total * v[r, h, i].double().numpy()
                            mass[i] += w / total / group
                        mine = found[r, h * group + g, t].double().numpy()
                        assert mine == pytest.approx(out, abs=1e-5)


def test_without_a_cut_the_loss_is_the_models_own(tiny_llama: nn.Module) -> None:
    student = _student(tiny_llama, "lococo", **{**SMALL, "capacity": 40})
    ids, supervised = _batch()
    logits = tiny_llama(input_ids=ids).logits[:, :-1][supervised[:, :-1]]
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:][supervised[:, :-1]])
    result = student(ids, supervised)
    assert float(result["ntp"]) == pytest.approx(float(expected.detach()), rel=1e-5)
    result["loss"].backward()  # nothing was cut, so there is nothing to learn
    assert all(p.grad is not None and not bool(p.grad.any()) for p in student.gates.parameters())
    cut = _student(tiny_llama, "lococo", **SMALL)(ids, supervised)
    assert abs(float(cut["ntp"]) - float(expected.detach())) > 1e-4


def test_only_the_convolutions_take_a_gradient(tiny_llama: nn.Module) -> None:
    student = _student(tiny_llama, "lococo", **SMALL)
    before = {k: v.clone() for k, v in student.base.state_dict().items()}
    student(*_batch())["loss"].backward()
    assert all(p.grad is None for p in student.base.parameters())
    for name, p in student.gates.named_parameters():
        assert p.grad is not None and bool(p.grad.isfinite().all()), name
        assert bool(p.grad.any()), name
    assert all(torch.equal(v, before[k]) for k, v in student.base.state_dict().items())


def test_the_gradient_is_that_of_finite_differences(tiny_llama: nn.Module) -> None:
    """Only one cut is behind the learned tokens, so nothing of the gradient is cut off."""
    student = _student(tiny_llama, "lococo", **{**SMALL, "chunk": 25})
    batch = _batch()
    student(*batch)["loss"].backward()
    mix: Tensor = student.gates.mix  # type: ignore[assignment]
    assert mix.grad is not None
    for layer in range(len(mix)):
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                mix[layer] += sign * 1e-2
                losses.append(float(student(*batch)["loss"]))
                mix[layer] -= sign * 1e-2
        slope = (losses[0] - losses[1]) / 2e-2
        assert float(mix.grad[layer]) == pytest.approx(slope, rel=0.05, abs=2e-4)


def test_left_padding_changes_nothing_but_the_chunks(tiny_llama: nn.Module) -> None:
    """A pad as long as a chunk leaves the boundaries where they are."""
    student = _student(tiny_llama, "lococo", **SMALL)
    ids, supervised = _batch()
    alone = student(ids, supervised)
    pad = torch.zeros(1, 12, dtype=torch.int64)
    valid = torch.arange(52)[None] >= 12
    padded = student(torch.cat([pad, ids], 1), torch.cat([pad.bool(), supervised], 1), valid)
    torch.testing.assert_close(padded["ntp"], alone["ntp"], rtol=1e-4, atol=1e-5)


def test_a_model_with_sliding_windows_is_refused() -> None:
    config = Gemma3TextConfig(
        vocab_size=99,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )
    with pytest.raises(UserError, match="only 1 of its 3 layers have full attention"):
        _student(Gemma3ForCausalLM(config), "lococo", **SMALL)
