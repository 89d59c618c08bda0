"""Tiny random models of the decoder families of transformers, for `benchmarks/families.py`.

Whatever a family adds to plain softmax attention must show in the logits: sinks, biases and Doge's decay get weights,
soft caps are low, and windows are shorter than the contexts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

Settings = Mapping[str, Any]

DEFAULT = object()
"""Leaves a size of `SIZE` to the family's configuration."""

VOCABULARY = 128
WINDOW = 16
"""Size of sliding windows, and of the chunks of chunked attention."""

SIZE: Settings = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.12,  # with the usual 0.02, attention is nearly uniform, and eviction changes little
}
EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS: Settings = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED_EXPERTS: Settings = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
SHARED_EXPERT: Settings = {**EXPERTS, "shared_expert_intermediate_size": 32}
SLIDING: Settings = {
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
LATENT: Settings = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "head_dim": DEFAULT,
}
INDEXED: Settings = {**LATENT, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 4}
HYBRID: Settings = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
CONVOLUTION: Settings = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
DELTA_NET: Settings = {
    **HYBRID,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA: Settings = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
GPT: Settings = {"num_key_value_heads": DEFAULT, "head_dim": DEFAULT}
"""Without the sizes of grouped heads, which these configurations take but do not use."""
GPT2: Settings = {**GPT, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512, "n_inner": 96}
ALTERNATING: Settings = {
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
READERS: Settings = {
    **ALTERNATING,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
}
VISION: Settings = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Family:
    """A family of models, as a tiny random one.

    Attributes:
        name: Row of the table; the model type of transformers, with a suffix for variants.
        kind: What its attention adds to plain causal softmax attention over grouped heads.
        settings: Configuration beyond `SIZE`.
    """

    name: str
    kind: str
    settings: Settings = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """Return the model type of transformers."""
        return self.name.partition("+")[0]

    @property
    def exists(self) -> bool:
        """Return whether the installed transformers has the family."""
        return self.model_type in CONFIG_MAPPING

    def config(self) -> Any:
        """Return the configuration."""
        settings = {key: value for key, value in {**SIZE, **self.settings}.items() if value is not DEFAULT}
        return AutoConfig.for_model(self.model_type, **settings)

    def build(self) -> Any:
        """Return the model in float32, the same at every call."""
        config = self.config()
        loader = AutoModelForImageTextToText if self.kind == IMAGES else AutoModelForCausalLM
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = loader.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
            for name, parameter in model.named_parameters():
                last_name = name.rpartition(".")[2]
                if "sink" in last_name:
                    parameter.normal_(std=2.0)
                elif last_name == "A":  # Doge's decay, whose zeros would make its bias constant
                    parameter.normal_()
                elif "bias" in last_name and last_name != "dt_bias":
                    parameter.normal_(std=0.1)
        return model


PLAIN = "plain"
MOE = "mixture of experts"
WINDOWS = "sliding windows"
SINKS = "attention sinks"
CAPS = "soft caps"
VALUE_SIZE = "values of another size"
LAYER_SIZES = "layers of different sizes"
GPT_LIKE = "GPT-like modules"
HYBRIDS = "hybrid"
LATENTS = "latents (MLA)"
SHARED = "layers that share K/V"
IMAGES = "images, text only here"
OTHER = "other"


def _families(kind: str, names: str, settings: Settings | None = None) -> list[Family]:
    """Return several families of one kind with the same settings."""
    return [Family(name, kind, settings or {}) for name in names.split()]


def _text(settings: Settings | None = None) -> Settings:
    """Return the size of a text model inside a model with images."""
    return {**SIZE, **(settings or {})}


FAMILIES: tuple[Family, ...] = (
    *_families(
        PLAIN,
        "llama qwen2 qwen3 smollm3 glm glm4 starcoder2 phi3 ernie4_5 hunyuan_v1_dense seed_oss nemotron arcee "
        "bitnet apertus helium olmo olmo2 gemma internlm3 iquestcoder jais2 nanochat ministral3 "
        "exaone apertus1p5_text",
    ),
    Family("mistral", PLAIN, {"sliding_window": None}),
    Family("cohere", PLAIN, {"logit_scale": 2.0}),
    *_families(PLAIN, "granite hyperclovax", {"attention_multiplier": 0.3, "logits_scaling": 0.5}),
    Family("stablelm", PLAIN, {"use_qkv_bias": True}),
    *_families(MOE, "mixtral granitemoe minimax_m2 phimoe", LOCAL_EXPERTS),
    Family("granitemoeshared", MOE, {**LOCAL_EXPERTS, "shared_intermediate_size": 32}),
    *_families(MOE, "qwen3_moe olmoe flex_olmo", EXPERTS),
    Family("qwen2_moe", MOE, SHARED_EXPERT),
    *_families(MOE, "glm4_moe dots1 solar_open sarvam_moe", {**ROUTED_EXPERTS, "n_shared_experts": 1}),
    Family("hunyuan_v1_moe", MOE, {"num_experts": 4, "moe_topk": 2}),
    Family(
        "ernie4_5_moe",
        MOE,
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_end_index": 2},
    ),
    Family("hy_v3", MOE, EXPERTS),
    Family("aria_text", MOE, {"moe_num_experts": 4}),
    Family(
        "dbrx",
        MOE,
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
            **dict.fromkeys(
                (
                    "num_key_value_heads",
                    "head_dim",
                    "hidden_size",
                    "num_attention_heads",
                    "num_hidden_layers",
                    "max_position_embeddings",
                ),
                DEFAULT,
            ),
        },
    ),
    *_families(WINDOWS, "gemma3_text olmo3 exaone4 ministral cwm", SLIDING),
    Family("modernbert-decoder", WINDOWS, {**SLIDING, **GPT}),
    Family("cohere2", WINDOWS, {**SLIDING, "logit_scale": 2.0}),
    Family(
        "cohere_compass_text",
        WINDOWS,
        {
            **SLIDING,
            "rope_parameters": {
                layer_type: {"rope_type": "default", "rope_theta": 10000.0}
                for layer_type in ("full_attention", "sliding_attention")
            },
        },
    ),
    *_families(WINDOWS, "afmoe exaone_moe", {**SLIDING, **EXPERTS}),
    Family("mellum", WINDOWS, {**SLIDING, **LOCAL_EXPERTS}),
    Family("cohere2_moe", WINDOWS, {**SLIDING, **EXPERTS, "logit_scale": 2.0}),
    Family("laguna", WINDOWS, {**SLIDING, **SHARED_EXPERT}),
    Family("kolibri1", WINDOWS, {**SLIDING, **LOCAL_EXPERTS, "shared_expert_intermediate_size": 32}),
    Family("beam", WINDOWS, {**SLIDING, **EXPERTS, "n_group": 1, "topk_group": 1, "final_logit_softcapping": 2.0}),
    Family(
        "llama4_text",
        WINDOWS,
        {
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": WINDOW,
            "layer_types": ["full_attention", "chunked_attention", "full_attention"],
            "no_rope_layers": [0, 1, 0],
        },
    ),
    *_families(SINKS, "granite_swa", SLIDING),
    *_families(SINKS, "gpt_oss granitemoe_swa flint", {**SLIDING, **LOCAL_EXPERTS}),
    *_families(CAPS, "gemma2 vaultgemma", {**SLIDING, "attn_logit_softcapping": 2.0}),
    Family("mimo_v2_flash", VALUE_SIZE, {**SLIDING, **ROUTED_EXPERTS, "v_head_dim": 12}),
    *_families(GPT_LIKE, "gpt2 gpt_bigcode", GPT2),
    *_families(GPT_LIKE, "gpt_neox biogpt persimmon", GPT),
    Family("phi", GPT_LIKE),
    Family("ctrl", GPT_LIKE, {**GPT2, "dff": 96}),
    Family("opt", GPT_LIKE, {**GPT, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    *_families(HYBRIDS, "qwen3_next qwen3_5_text qwen3_5_moe_text", {**DELTA_NET, **SHARED_EXPERT}),
    Family("olmo_hybrid", HYBRIDS, DELTA_NET),
    Family("lfm2", HYBRIDS, CONVOLUTION),
    Family("lfm2_moe", HYBRIDS, {**CONVOLUTION, **EXPERTS, "num_dense_layers": 1}),
    Family(
        "lfm3",
        HYBRIDS,
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "sliding_attention", "full_attention"],
        },
    ),
    Family(
        "falcon_h1",
        HYBRIDS,
        {
            "key_multiplier": 1.5,
            "lm_head_multiplier": 0.5,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_expand": 1,
            "mamba_chunk_size": 16,
        },
    ),
    Family("bamba", HYBRIDS, {**MAMBA, "attn_layer_indices": [1, 3]}),
    Family(
        "jamba",
        HYBRIDS,
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    Family(
        "granitemoehybrid",
        HYBRIDS,
        {
            **MAMBA,
            **LOCAL_EXPERTS,
            "shared_intermediate_size": 32,
            "layer_types": ["mamba", "attention"] * 2,
        },
    ),
    Family(
        "nemotron_h",
        HYBRIDS,
        {
            **ROUTED_EXPERTS,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "moe", "attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 8,
            "chunk_size": 16,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    Family("lara_mini", HYBRIDS, {**DELTA_NET, **SHARED_EXPERT}),
    Family("zaya", HYBRIDS, {"moe_intermediate_size": 32, "num_experts": 4, "router_hidden_size": 16}),
    Family("minimax", HYBRIDS, {**HYBRID, **LOCAL_EXPERTS, "block_size": 16}),
    Family(
        "zamba2",
        HYBRIDS,
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "layer_types": DEFAULT,
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "kv_channels": 16,
            "chunk_size": 16,
            "use_mamba_kernels": False,
        },
    ),
    Family(
        "recurrent_gemma",
        HYBRIDS,
        {"lru_width": 64, "attention_window_size": WINDOW, "block_types": ["recurrent", "attention"]},
    ),
    *_families(LATENTS, "deepseek_v2 deepseek_v3", {**LATENT, **ROUTED_EXPERTS, "first_k_dense_replace": 1}),
    *_families(LATENTS, "glm4_moe_lite axk1", {**LATENT, **ROUTED_EXPERTS}),
    *_families(LATENTS, "minicpm3 youtu", LATENT),
    Family("sarvam_mla", LATENTS, {**LATENT, **ROUTED_EXPERTS, "q_lora_rank": None}),
    Family(
        "kimi_linear",
        LATENTS,
        {**LATENT, **ROUTED_EXPERTS, **HYBRID, "linear_num_heads": 4, "linear_head_dim": 8},
    ),
    Family(
        "bailing_hybrid",
        LATENTS,
        {
            **LATENT,
            **HYBRID,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_expert_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "mlp_layer_types": ["dense", "sparse"] * 2,
            "num_nextn_predict_layers": 0,
            "linear_num_heads": 4,
            "linear_head_dim": 8,
        },
    ),
    Family(
        "longcat_flash",
        LATENTS,
        {
            **LATENT,
            "head_dim": 8,
            "num_layers": 2,
            "num_hidden_layers": DEFAULT,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
        },
    ),
    Family("gemma4_text", LAYER_SIZES, {**ALTERNATING, "hidden_size_per_layer_input": 0, "global_head_dim": 32}),
    Family("gemma4_unified_text", LAYER_SIZES, {**ALTERNATING, "global_head_dim": 32}),
    Family("gemma4_text+shared", SHARED, {**READERS, "global_head_dim": 32}),
    Family("gemma3n_text", SHARED, {**READERS, "activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 8}),
    Family(
        "gemma3",
        IMAGES,
        {
            "text_config": _text(SLIDING),
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            **dict.fromkeys(SIZE, DEFAULT),
        },
    ),
    Family(
        "gemma4",
        IMAGES,
        {
            "text_config": _text({**ALTERNATING, "hidden_size_per_layer_input": 0}),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "position_embedding_size": 64,
            },
            "audio_config": None,
            **dict.fromkeys(SIZE, DEFAULT),
        },
    ),
    Family(
        "mistral3",
        IMAGES,
        {
            "text_config": {**_text({"sliding_window": None}), "model_type": "mistral"},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
            **dict.fromkeys(SIZE, DEFAULT),
        },
    ),
    Family(
        "qwen3_5",
        IMAGES,
        {
            "text_config": _text(
                {
                    **DELTA_NET,
                    "rope_parameters": {
                        "rope_type": "default",
                        "rope_theta": 10000.0,
                        "mrope_section": [2, 3, 3],
                        "partial_rotary_factor": 1.0,
                    },
                }
            ),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": 64,
            },
            **dict.fromkeys(SIZE, DEFAULT),
        },
    ),
    Family(
        "qwen3_vl",
        IMAGES,
        {
            "text_config": _text(
                {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
            ),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0],
            },
            **dict.fromkeys(SIZE, DEFAULT),
        },
    ),
    Family(
        "llama4",
        IMAGES,
        {
            "text_config": _text(
                {
                    "num_local_experts": 2,
                    "intermediate_size_mlp": 64,
                    "attention_chunk_size": WINDOW,
                    "layer_types": ["full_attention", "chunked_attention", "full_attention"],
                    "no_rope_layers": [0, 1, 0],
                }
            ),
            "vision_config": {**VISION, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
            **dict.fromkeys(SIZE, DEFAULT),
        },
    ),
    Family("doge", OTHER),
    Family("diffllama", OTHER),
    Family("jetmoe", OTHER, {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16, "head_dim": DEFAULT}),
    Family("hrm_text", OTHER, {"num_hidden_layers": 1}),
    Family("falcon", OTHER, {**GPT, "new_decoder_architecture": False}),
    Family("bloom", OTHER, {**GPT, "n_layer": 3, "n_head": 4}),
    Family("mpt", OTHER, {**GPT, "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512}),
    *_families(OTHER, "gptj codegen", {**GPT2, "rotary_dim": 8}),
    Family(
        "gpt_neo",
        OTHER,
        {
            **GPT,
            "num_layers": 2,
            "num_hidden_layers": DEFAULT,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    Family("gpt_neox_japanese", OTHER, GPT),
    Family("xglm", OTHER, {**GPT, "d_model": 64, "ffn_dim": 96, "num_layers": 3, "attention_heads": 4}),
    Family("deepseek_v32", OTHER, {**INDEXED, **ROUTED_EXPERTS, "first_k_dense_replace": 1}),
    Family("glm_moe_dsa", OTHER, {**INDEXED, **ROUTED_EXPERTS, "first_k_dense_replace": 1}),
    Family("axk2", OTHER, {**INDEXED, **ROUTED_EXPERTS, "num_key_value_heads": DEFAULT}),
    Family("hy_v4", OTHER, {**INDEXED, **ROUTED_EXPERTS}),
    Family(
        "dots3_note_text",
        OTHER,
        {
            **INDEXED,
            **ROUTED_EXPERTS,
            "num_attention_heads": 4,
            "layer_types": ["indexed_attention"] * 3,
            "shared_experts_intermediate_size": 32,
        },
    ),
    Family(
        "deepseek_v4",
        OTHER,
        {
            **ROUTED_EXPERTS,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 4,
            "index_head_dim": 16,
            "index_topk": 8,
        },
    ),
    Family(
        "minimax_m3_vl_text",
        OTHER,
        {
            **LOCAL_EXPERTS,
            "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
            "index_n_heads": 2,
            "index_head_dim": 16,
        },
    ),
    Family("inkling_text", OTHER, {**ROUTED_EXPERTS}),
    Family("inkling2_text", OTHER, {**ROUTED_EXPERTS}),
    Family(
        "inkling2_loop_text",
        OTHER,
        {
            **ROUTED_EXPERTS,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
            "loop_gate_rank": 8,
        },
    ),
    *(
        Family(
            f"dory{suffix}",
            OTHER,
            {**SLIDING, "n_input_layers": 1, "n_output_layers": 1, "recurrent_kv_cache_mode": mode},
        )
        for suffix, mode in (("", "per_loop"), ("+last_loop", "last_loop"))
    ),
    Family(
        "qwen4_exp_text",
        OTHER,
        {
            **DELTA_NET,
            **SHARED_EXPERT,
            "layer_types": ["linear_attention", "indexed_attention"] * 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        },
    ),
)
"""Decoders by kind; those of `OTHER` have attention of their own."""

NOT_TRIED: Mapping[str, str] = {
    "encoders and halves of encoder-decoders": (
        "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text "
        "electra ernie marian mbart megatron-bert musicgen musicgen_melody mvp pegasus plbart prophetnet rembert "
        "roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm-roberta xlm-roberta-xl xmod"
    ),
    "models without cached keys and values": ("falcon_mamba mamba mamba2 openai-gpt reformer rwkv xlm xlnet xlstm"),
    "models of images, audio or bytes whose configuration has no tiny text decoder": (
        "blt emu3 fuyu git got_ocr2 mllama moshi moss_transcribe_diarize phi4_multimodal"
    ),
    "drafting heads of another model": "gemma4_assistant gemma4_unified_assistant",
    "models whose text decoder has a row of its own": (
        "dots3_note gemma3n gemma4_unified gpt-sw3 qwen3_5_moe qwen4_exp"
    ),
    "models that transformers cannot build or continue in this size": "cpmant zamba",
}
"""Model types of `AutoModelForCausalLM` that have no row, by reason."""


def unknown_types() -> list[str]:
    """Return the model types of the installed transformers that have neither a row nor a reason for having none."""
    known_types = {family.model_type for family in FAMILIES}.union(*(names.split() for names in NOT_TRIED.values()))
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - known_types)
