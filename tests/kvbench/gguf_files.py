"""Writes GGUF files as llama.cpp's converter would, for a Llama with a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
CONTROL, NORMAL = 3, 1


def gguf_name(name: str) -> str:
    """`model.layers.1.mlp.up_proj.weight` -> `blk.1.ffn_up.weight`."""
    module = name.removesuffix(".weight")
    if module.startswith("model.layers."):
        layer, _, inner = module.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{NAMES[inner]}.weight"
    return f"{NAMES[module]}.weight"


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection in the order of ggml's rotary embedding.

    transformers rotates row i with row i + d/2; ggml rotates rows 2i and 2i + 1.
    """
    rows = []
    for head in weight.chunk(heads):
        half = len(head) // 2
        for i in range(half):
            rows += [head[i], head[half + i]]
    return torch.stack(rows)


def dequantised_q8_0(weight: Tensor) -> Tensor:
    """What is left of a weight in Q8_0: in each block of 32, whole multiples of one float16."""
    whole = np.empty_like(weight.numpy())
    for row, values in enumerate(weight.numpy()):
        for first in range(0, len(values), 32):
            block = values[first : first + 32]
            scale = np.float32(np.abs(block).max()) / np.float32(127)
            steps = np.array([_round_away(x / scale) if scale else 0 for x in block], np.float32)
            whole[row, first : first + 32] = steps * np.float32(np.float16(scale))
    return torch.from_numpy(whole)


def _round_away(x: float) -> float:
    """Round half away from zero, as C's roundf."""
    return float(np.sign(x) * np.floor(np.abs(x) + 0.5))


def write_llama(
    path: Path,
    model: Any,
    tokenizer: Any,
    *,
    quantised: bool = False,
    architecture: str = "llama",
    pre: str = "gpt-2",
    more: dict[str, str | int] | None = None,
    leave_out: str = "",
    extra: dict[str, NDArray[np.float32]] | None = None,
) -> Path:
    """Write a model and its tokenizer.

    Args:
        path: The file.
        model: A `LlamaForCausalLM`.
        tokenizer: A byte-level BPE tokenizer.
        quantised: Whether matrices are stored in Q8_0.
        architecture: `general.architecture`.
        pre: `tokenizer.ggml.pre`.
        more: Further metadata.
        leave_out: Part of the names of tensors that are not written.
        extra: Further tensors.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    for key, value in (more or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint16)(key, value)

    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(True)
    writer.add_chat_template(tokenizer.chat_template)

    for name, weight in model.state_dict().items():
        if leave_out and leave_out in name:
            continue
        if "q_proj" in name:
            weight = interleaved(weight, config.num_attention_heads)
        elif "k_proj" in name:
            weight = interleaved(weight, config.num_key_value_heads)
        data = weight.float().numpy()
        if quantised and weight.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), data)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
