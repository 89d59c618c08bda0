"""Attention that kvbench does not implement is refused in one line, wherever a model is used."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention

import kvbench
from kvbench.engine.contract import check_attention, check_keywords, check_mask
from kvbench.engine.driver import check_supported
from kvbench.engine.loading import load_model
from kvbench.engine.models import attention_modules, decoder_of, head_of, model_info
from kvbench.errors import UserError

from .conftest import FAMILIES, SIZE, build

MOE: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
BY_EAGER: dict[str, dict[str, Any]] = {
    "gpt_oss": {**MOE, **SLIDING, "head_dim": 16},
    "granite_swa": SLIDING,
    "flint": {},
    "gemma2": {**SLIDING, "attn_logit_softcapping": 2.0},
}
"""Families with sinks or soft caps, which transformers does not build with SDPA, and what their configuration needs."""
NOT_YET = {
    "doge": ({}, "doge attention makes an attention mask or bias of its own, which kvbench does"),
    "diffllama": ({}, "diffllama attention changes keys or values between cache and attention, w"),
    "jetmoe": ({}, "jetmoe attention changes keys or values between cache and attention, which kv"),
    "minimax": ({**MOE, "layer_types": HYBRID}, "minimax needs a cache class of its own, which kvbench"),
    "recurrent_gemma": ({}, "RecurrentGemmaForCausalLM has only sliding-window layers: there is no"),
}
"""By family: what its configuration needs, and how the refusal begins."""


def random_model(family: str, **more: Any) -> Any:
    size = {k: v for k, v in SIZE.items() if k != "attn_implementation"}
    config = AutoConfig.for_model(family, **{**size, **more})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


IDS = torch.arange(3, 43)[None]


@pytest.mark.parametrize("policy", ["full", "criticalkv:window=4"])
@pytest.mark.parametrize("family", list(NOT_YET))
@torch.no_grad()
def test_an_attachment_refuses_what_it_would_compute_wrongly(family: str, policy: str) -> None:
    more, begins = NOT_YET[family]
    model = random_model(family, **more)
    with pytest.raises(UserError) as refused, kvbench.attach(model, policy, 0.5) as cache:
        model(IDS, past_key_values=cache)
    assert str(refused.value).startswith(begins) and len(str(refused.value)) < 120
    with pytest.raises(UserError):
        kvbench.kept(model, IDS, "snapkv:window=4", 0.5)


@pytest.mark.parametrize("family", sorted(BY_EAGER))
def test_a_model_without_sdpa_is_loaded_with_eager_attention(family: str, tmp_path: Path) -> None:
    random_model(family, **BY_EAGER[family]).save_pretrained(tmp_path)
    model: Any = load_model(str(tmp_path), None, torch.device("cpu"), torch.float32)
    assert model.config._attn_implementation == "eager"
    check_supported(model)


@torch.no_grad()
def test_a_policy_that_reads_projections_of_other_names_is_refused() -> None:
    model = random_model("gpt_neox")
    kvbench.kept(model, IDS, "criticalkv:window=4", 0.5)
    with pytest.raises(UserError, match="GPTNeoXForCausalLM has no q_proj, k_proj and v_proj, which"):
        model_info(model).project(0, torch.zeros(1, 1, 128))
    falcon = random_model("falcon")
    with pytest.raises(UserError, match="FalconForCausalLM does not use transformers' attention interface"):
        kvbench.kept(falcon, IDS, "snapkv:window=4", 0.5)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("cohere", {"logit_scale": 3.0}),
        ("granite", {"logits_scaling": 3.0}),
        ("hyperclovax", {"logits_scaling": 3.0}),
        ("gemma3_text", {"final_logit_softcapping": 2.0, "head_dim": 16}),
        ("modernbert-decoder", {"bos_token_id": 1, "eos_token_id": 2}),
    ],
)
@torch.no_grad()
def test_the_head_gives_the_models_own_logits(family: str, more: dict[str, Any]) -> None:
    model = random_model(family, **more)
    hidden = decoder_of(model)(IDS).last_hidden_state
    torch.testing.assert_close(head_of(model)(hidden), model(IDS).logits)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "mistral_sliding"])
def test_supported_families_keep_the_contract(family: str) -> None:
    check_supported(build(family))
    model_info(build(family)).output_weight(0)


@pytest.mark.parametrize("family", sorted(BY_EAGER))
@torch.no_grad()
def test_a_forward_without_our_cache_keeps_sinks_and_caps(family: str) -> None:
    """SDPA drops both without a word."""
    model = random_model(family, **BY_EAGER[family])
    for name, parameter in model.named_parameters():
        if "sink" in name:
            parameter.normal_(std=2.0)
    model.set_attn_implementation("eager")
    expected = model(IDS).logits
    with kvbench.attach(model, "full", "full"):
        actual = model(IDS, past_key_values=DynamicCache(config=model.config)).logits
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    for _, module in attention_modules(model):
        module.config.attn_logit_softcapping, module.sinks = None, None
        module.attn_logit_softcapping = None
    with kvbench.attach(model, "full", "full"):
        assert (model(IDS).logits - expected).abs().max() > 1e-2


@torch.no_grad()
def test_a_bias_of_the_user_is_refused() -> None:
    model = build("llama")
    with (
        pytest.raises(UserError, match=r"^llama attention passes position_bias \(a position b"),
        kvbench.attach(model, "full", "full") as cache,
    ):
        model(IDS, past_key_values=cache, position_bias=torch.zeros(1))


@torch.no_grad()
def test_attention_past_the_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden_states: Any, **more: Any) -> Any:
        split = hidden_states.shape[:-1], (-1, self.head_dim)
        key, value = (p(hidden_states).view(*split[0], *split[1]).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        more["past_key_values"].update(key, value, self.layer_idx)
        return hidden_states, None

    with monkeypatch.context() as patch:
        patch.setattr(LlamaAttention, "forward", forward)
        with pytest.raises(UserError, match=r"^layer 0 of LlamaForCausalLM has 0 modules with transformers' attention"):
            check_supported(build("llama"))
    check_supported(build("llama"))  # the refusal left nothing behind


# --- the contract itself --------------------------------------------------------------------------


def module(**more: Any) -> Any:
    found = nn.Module()
    found.config = SimpleNamespace(model_type="odd")
    for name, value in more.items():
        setattr(found, name, value)
    return found


def test_keywords_are_known_by_a_list_of_what_is_allowed() -> None:
    check_keywords(module(), {"position_ids": IDS, "use_cache": True, "sinks": None, "new": False})
    check_keywords(module(), {"is_causal": True})
    for keywords in ({"never_seen": 1.0}, {"indices": IDS}, {"cu_seq_lens_q": IDS}):
        with pytest.raises(UserError, match=f"^odd attention passes {next(iter(keywords))}"):
            check_keywords(module(), keywords)
    for odd, keywords in ((module(), {"is_causal": False}), (module(is_causal=False), {})):
        with pytest.raises(UserError, match=r"^odd attention is not causal, which kvbench does not"):
            check_keywords(odd, keywords)


def test_keys_values_masks_and_windows_must_be_those_of_the_cache() -> None:
    key, value = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    check_attention(module(), key, value, None, {"sliding_window": None}, (key, value))
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((key.clone(), value, None, {}, (key, value)), "changes keys or values"),
        ((key, value * 1, None, {}, (key, value)), "changes keys or values"),
        ((key, value, None, {}, None), "changes keys or values"),
        ((key, value, torch.zeros(1, 1, 3, 3), {}, (key, value)), "mask or bias of its own"),
        ((key, value, None, {"sliding_window": 8}, (key, value)), "sliding window in a layer"),
        ((key, value[..., :2], None, {}, (key, value)), "changes keys or values"),
    ]
    for arguments, told in wrong:
        with pytest.raises(UserError, match=told):
            check_attention(module(), *arguments)
    narrow = value[..., :2]
    check_attention(module(), key, narrow, None, {}, (key, narrow))
    check_attention(module(), key.clone(), value, None, {}, (key, value), is_latent=True)


def test_a_mask_that_is_not_causal_is_refused() -> None:
    from transformers.masking_utils import causal_mask_function, or_masks

    config = SimpleNamespace(model_type="odd")
    check_mask(config, causal_mask_function)
    with pytest.raises(UserError, match=r"^odd attention uses a mask that is not causal"):
        check_mask(config, or_masks(causal_mask_function, causal_mask_function))
