"""Families with sinks, recurrent layers, latents or shared keys and values: over devices, placed and quantised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvbench
from benchmarks.family_models import FAMILIES
from kvbench.engine import quantization
from kvbench.engine.latent import expansion, is_latent
from kvbench.engine.loading import load_model
from kvbench.engine.models import attention_modules
from kvbench.errors import UserError
from tests.devices import Devices, spread
from tests.sweeps import slow

from .conftest import batch

BY_NAME = {family.name: family for family in FAMILIES}
NEWER = ("gpt_oss", "qwen3_5_text", "deepseek_v3", "gemma4_text+shared")
CPU = torch.device("cpu")
IDS = torch.arange(3, 43)[None]

# Multiples of the block sizes of bitsandbytes.
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
WIDER: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 64},
    "qwen3_5_text": {"head_dim": 64, "linear_num_value_heads": 32, "linear_num_key_heads": 16},
    "deepseek_v3": {
        **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 64)
    },
    "gemma4_text+shared": {"head_dim": 64, "global_head_dim": 64, "hidden_size_per_layer_input": 64},
}
REFUSED = {
    ("deepseek_v3", "bnb-8bit"): "transformers itself cannot run it",
}
"""Quantised families that bitsandbytes cannot run on a CPU."""


def built(family: str, **settings: Any) -> Any:
    found = BY_NAME[family]
    if not found.exists:
        pytest.skip(f"this transformers has no {family}")
    model = replace(found, settings={**found.settings, **settings}).build()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("policy", ["criticalkv:window=4", slow("h2o")])
@pytest.mark.parametrize("family", NEWER)
@torch.no_grad()
def test_over_three_devices_the_same_entries_and_answers(family: str, policy: str) -> None:
    ids, mask = batch(2, 40, (0, 7))
    results: list[list[Tensor | None]] = []
    for devices in (["xpu:0"], ["xpu:0", "xpu:1", "xpu:2"]):
        model = built(family)
        model.set_experts_implementation("eager")  # grouped matrix products have no such device
        spread(model, devices)
        with Devices():
            inputs, token_mask = ids.to(devices[0]), mask.to(devices[0])
            kept = kvbench.kept(model, inputs, policy, 0.4, token_mask)
            with kvbench.attach(model, policy, 0.4) as cache:
                answers = model.generate(
                    inputs, attention_mask=token_mask, past_key_values=cache, max_new_tokens=4, do_sample=False
                )
        results.append([*kept, answers])
    for one, three in zip(*results, strict=True):
        assert (one is None) == (three is None)
        assert one is None or three is None or torch.equal(one, three)


@pytest.mark.parametrize("family", NEWER)
@torch.no_grad()
def test_a_device_map_changes_nothing_or_is_refused(family: str, tmp_path: Path) -> None:
    model = built(family)
    model.save_pretrained(tmp_path)
    placed: Any = load_model(str(tmp_path), None, CPU, torch.float32, device_map="auto")
    torch.testing.assert_close(placed(IDS).logits.cpu(), model(IDS).logits)
    with pytest.raises(UserError, match=r"^model \S+ (does not fit into the memory|cannot be loaded: )") as refused:
        load_model(str(tmp_path), None, CPU, torch.float32, device_map={"": "disk"})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("scheme", list(quantization.PACKAGES))
@pytest.mark.parametrize("family", NEWER)
@torch.no_grad()
def test_a_scheme_quantises_and_policies_run(family: str, scheme: str, tmp_path: Path) -> None:
    pytest.importorskip(quantization.PACKAGES[scheme])
    model = built(family, **WIDE, **WIDER[family])
    model.save_pretrained(tmp_path)
    if (family, scheme) in REFUSED:
        with pytest.raises(UserError, match=REFUSED[family, scheme]):
            load_model(str(tmp_path), None, CPU, torch.float32, quantization=scheme)
        return
    quantised: Any = load_model(str(tmp_path), None, CPU, torch.float32, quantization=scheme)  # and its self-test
    assert not torch.equal(quantised(IDS).logits, model(IDS).logits)
    limit = 0.2 if "4bit" in scheme else 0.02
    for (_, module), (_, original) in zip(attention_modules(quantised), attention_modules(model), strict=True):
        pairs = [(quantization.plain_weight(module.o_proj, original.o_proj.in_features, torch.float32),
                  original.o_proj.weight)]  # fmt: skip
        if is_latent(module):
            pairs += zip(expansion(module), expansion(original), strict=True)
        for weight, expected in pairs:
            assert (weight - expected).abs().max() < limit * expected.abs().max()
    for policy in ("criticalkv:window=4", "h2o"):
        expected_kept = kvbench.kept(model, IDS, policy, 0.4)
        kept = kvbench.kept(quantised, IDS, policy, 0.4)
        counts = [[int(layer.sum()) for layer in layers if layer is not None] for layers in (kept, expected_kept)]
        assert counts[0] == counts[1]
