"""The student: what it computes, and that only its gates learn."""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from benchmarks.family_models import FAMILIES
from kvbench.engine.implementations import EAGER, choose_attention
from kvbench.engine.models import decoder_of, model_info
from kvbench.errors import UserError
from kvbench.registry import TRAINERS, get
from kvbench.training.student import Student

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

BY_NAME = {family.name: family for family in FAMILIES}
SETTINGS: dict[str, Any] = {
    "capacity": 10,
    "capacity_weight": 1.0,
    "capacity_reduce": "mean",
    "kl": True,
    "ntp": True,
    "with_capacity": True,
    "reverse_kl": False,
    "gating": "additive",
    "checkpointing": False,
    "hidden_dim": 16,
    "gate_dim": 8,
    "block": 4,
}


def _student(model: nn.Module, policy: str = "trimkv", **changes: Any) -> Student:
    method = get(TRAINERS, policy)
    network = copy.deepcopy(model)
    settings = {**method.defaults, **SETTINGS, **changes}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        gates = method.build(model_info(network), decoder_of(network).config, settings)
    return Student(network, gates, method, settings)


def _batch(rows: int = 1, length: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 500, (rows, length), generator=generator)
    supervised = torch.zeros(rows, length, dtype=torch.bool)
    supervised[:, 25:-1] = True
    return ids, supervised


@pytest.mark.parametrize("policy", ["trimkv", "dbtrimkv", "locret", "seerattn_r"])
def test_only_gates_take_a_gradient(tiny_llama: nn.Module, policy: str) -> None:
    student = _student(tiny_llama, policy)
    before = {k: v.clone() for k, v in student.base.state_dict().items()}
    student(*_batch())["loss"].backward()
    assert all(p.grad is None for p in student.base.parameters())
    grads = [p.grad for p in student.gates.parameters()]
    assert all(g is not None and bool(g.isfinite().all()) for g in grads)
    assert sum(bool(g.ne(0).any()) for g in grads if g is not None) >= len(grads) - 1
    assert all(torch.equal(v, before[k]) for k, v in student.base.state_dict().items())


def test_gates_that_forget_nothing_leave_the_teacher(tiny_llama: nn.Module) -> None:
    student = _student(tiny_llama, bias=60.0)
    result = student(*_batch())
    assert float(result["kl"]) == pytest.approx(0.0, abs=1e-6)
    assert float(result["retained"]) == pytest.approx(1.0)


def test_the_model_can_use_eager_attention(tiny_llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = modeling_llama.eager_attention_forward

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(1)
        return original(*arguments, **keywords)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", counted)
    expected = _student(tiny_llama, bias=1.0)(*_batch())["loss"]
    assert not calls
    network = copy.deepcopy(tiny_llama)
    choose_attention(network, EAGER)
    loss = _student(network, bias=1.0)(*_batch())["loss"]
    assert calls
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gating", ["additive", "multiplicative"])
def test_gated_attention_follows_the_equation(tiny_llama: nn.Module, gating: str) -> None:
    """Compare one layer of the module with a loop in float64."""
    student = _student(tiny_llama, bias=1.0, gating=gating)
    seen: dict[str, Tensor] = {}
    attention = decoder_of(student.base).layers[0].self_attn
    method = student.method
    assert method.attention is not None
    inner = method.attention

    def watch(q: Tensor, k: Tensor, v: Tensor, log_beta: Tensor, **kwargs: Any) -> Tensor:
        out = inner(q, k, v, log_beta, **kwargs)
        if not seen:
            seen.update(q=q, k=k, v=v, log_beta=log_beta, out=out)
        return out

    object.__setattr__(student, "method", dataclasses.replace(method, attention=watch))
    student(*_batch(length=20))
    q, k, v = (seen[n][0].double() for n in ("q", "k", "v"))
    for h in range(q.shape[0]):
        for t in range(20):
            logits = []
            for i in range(t + 1):
                z = float(q[h, t] @ k[h // 2, i]) * attention.head_dim**-0.5
                decay = (t - i) * float(seen["log_beta"][0, h // 2, i].detach())
                logits.append(z + decay if gating == "additive" else z * 2.718281828459045**decay)
            weight = torch.softmax(torch.tensor(logits, dtype=torch.float64), 0)
            expected = weight @ v[h // 2, : t + 1]
            torch.testing.assert_close(seen["out"][0, h, t].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", ["trimkv", "dbtrimkv", "locret", "seerattn_r"])
def test_left_padding_changes_nothing(tiny_llama: nn.Module, policy: str) -> None:
    student = _student(tiny_llama, policy, bias=2.0)
    ids, supervised = _batch()
    alone = student(ids, supervised)
    pad = torch.zeros(1, 7, dtype=torch.int64)
    valid = torch.arange(47)[None] >= 7
    padded = student(torch.cat([pad, ids], 1), torch.cat([pad.bool(), supervised], 1), valid)
    assert set(alone) == set(padded)
    for name, value in alone.items():
        torch.testing.assert_close(padded[name], value, rtol=1e-4, atol=1e-5)


def test_checkpointing_changes_no_gradient(tiny_llama: nn.Module) -> None:
    gradients = []
    for checkpointing in (False, True):
        student = _student(tiny_llama, bias=2.0, checkpointing=checkpointing)
        assert student.checkpointed is checkpointing
        student(*_batch())["loss"].backward()
        gradients.append([p.grad for p in student.gates.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


def test_gates_of_blocks_learn_where_attention_goes(tiny_llama: nn.Module) -> None:
    student = _student(tiny_llama, "seerattn_r")
    optimizer = torch.optim.AdamW(student.gates.parameters(), lr=0.02)
    values = []
    for _ in range(30):
        loss = student(*_batch(2))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    assert values[-1] < 0.5 * values[0]


def test_sequences_of_one_block_teach_nothing(tiny_llama: nn.Module) -> None:
    student = _student(tiny_llama, "seerattn_r", block=64)
    loss = student(*_batch())["loss"]
    loss.backward()
    assert float(loss) == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in student.gates.parameters())


def test_terms_of_the_loss_can_be_left_out(tiny_llama: nn.Module) -> None:
    batch = _batch()
    whole = _student(tiny_llama)(*batch)
    parts = whole["kl"] + whole["ntp"] + whole["capacity"]
    torch.testing.assert_close(whole["loss"].detach(), parts)
    for off, name in (("kl", "kl"), ("ntp", "ntp"), ("with_capacity", "capacity")):
        result = _student(tiny_llama, **{off: False})(*batch)
        assert name not in result
        torch.testing.assert_close(result["loss"].detach(), parts - whole[name])


@pytest.mark.parametrize(
    "changes",
    [{"gate": "linear"}, {"input": "kv"}, {"tied": True}, {"gating": "multiplicative"}],
)
def test_ablations_train(tiny_llama: nn.Module, changes: dict[str, Any]) -> None:
    student = _student(tiny_llama, **changes)
    assert all(getattr(student.gates.config, k) == v for k, v in changes.items())  # type: ignore[union-attr]
    student(*_batch())["loss"].backward()
    assert any(bool(p.grad.ne(0).any()) for p in student.gates.parameters() if p.grad is not None)


@pytest.mark.parametrize("policy", ["trimkv", "locret", "seerattn_r"])
@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("doge", "doge attention makes an attention mask or bias of its own"),
        ("diffllama", "diffllama attention changes keys or values"),
    ],
)
def test_attention_that_is_not_implemented_is_not_trained_for(
    tiny_llama: LlamaForCausalLM, family: str, told: str, policy: str
) -> None:
    like = tiny_llama.config
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "pad_token_id")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(family, **{k: getattr(like, k) for k in sizes}, **heads)
    with pytest.raises(UserError, match=f"^{told}"):
        _student(AutoModelForCausalLM.from_config(config).eval(), policy)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2"])
@pytest.mark.parametrize("policy", ["dbtrimkv", "seerattn_r"])
def test_gates_learn_under_sinks_and_soft_caps(family: str, policy: str) -> None:
    """The model without gates is the stock one; with them, each layer has its own sinks."""
    model = BY_NAME[family].build()
    ids, supervised = _batch()
    student = _student(model, policy, bias=60.0 if policy == "dbtrimkv" else 0.0)
    ids = ids % model.config.vocab_size
    loss = student(ids, supervised)
    if policy == "dbtrimkv":
        logits = model(input_ids=ids).logits[:, :-1][supervised[:, :-1]]
        expected = nn.functional.cross_entropy(logits, ids[:, 1:][supervised[:, :-1]])
        assert float(loss["ntp"]) == pytest.approx(float(expected.detach()), rel=1e-5)
        return
    loss["loss"].backward()
    assert all(p.grad is not None and bool(p.grad.ne(0).any()) for p in student.gates.parameters())


@pytest.mark.parametrize(
    ("family", "policy", "changes", "trait"),
    [
        ("deepseek_v3", "seerattn_r", {}, "latents"),
        ("deepseek_v3", "trimkv", {"input": "kv"}, "latents"),
        ("mimo_v2_flash", "trimkv", {"input": "kv"}, "values of another size than its keys"),
    ],
)
def test_gates_of_keys_are_refused_where_keys_are_not_what_is_cached(
    family: str, policy: str, changes: dict[str, Any], trait: str
) -> None:
    with pytest.raises(UserError, match=f"^{policy} cannot be trained for {family}, whose attention has {trait}; cho"):
        _student(BY_NAME[family].build(), policy, **changes)
