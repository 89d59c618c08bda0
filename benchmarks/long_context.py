"""What a long context takes, by the planner's own arithmetic: `python -m benchmarks.long_context --help`.

The model exists without weights, so that its size does not matter. A run prefills a context once, and keeps that cache
whole, in the model's own precision, until its last cell is compressed. `kvbench.runs.batching` plans the rows of a
batch for what is left of a GPU's memory beside the weights, as a run does.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import nn

from benchmarks.wrong_input import refused
from kvbench.runs.batching import GPU_SHARE, Batching
from kvbench.runs.values import memory as parse_memory
from kvbench.tables.numbers import NumberFormat, size
from kvbench.tables.outputs import markdown, terminal
from kvbench.tables.table import Column, Table, TableRow

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""Shapes of Llama 3.2 1B and Llama 3.1 8B, and of a model for trials."""
ANSWER = 128
"""Tokens of question and answer."""


def llama_config(name: str) -> Any:
    """Return the configuration of a Llama with one of the `SHAPES`."""
    from transformers import LlamaConfig  # kvbench must be imported before: `kvbench.engine.torchvision_build`

    is_tiny = name == "tiny"
    return LlamaConfig(
        **SHAPES[name],
        num_key_value_heads=2 if is_tiny else 8,
        vocab_size=256 if is_tiny else 128256,
        max_position_embeddings=131072,
        tie_word_embeddings=name == "1B",
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )


def llama(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a Llama of random weights."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(llama_config(name), dtype=dtype).eval()


@functools.cache
def without_weights(name: str) -> Any:
    """Return a Llama in bfloat16 that takes no memory."""
    return llama(name, torch.device("meta"), torch.bfloat16)


@dataclass(frozen=True)
class ContextMemory:
    """Bytes of a model and of one context on it.

    Attributes:
        weights: Of all parameters.
        full_cache: Of the full cache, with question and answer.
        rows: Full caches that the planner decodes in one batch if each is a copy; 0 if not even one fits.
        sharing_rows: The same if they read the prefill of their context.
    """

    weights: int
    full_cache: int
    rows: int
    sharing_rows: int


def context_memory(model: nn.Module, length: int, memory_bytes: int) -> ContextMemory:
    """Plan a context of `length` tokens on a GPU with this memory."""
    parameters = list(model.parameters())
    weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    for_caches = int(GPU_SHARE * (memory_bytes - weights))
    batching = Batching(model, "auto", max(1, for_caches))
    full_cache = batching.token_bytes * (length + ANSWER)
    rows = []
    for batching.shares in (False, True):
        batching.fit(length + ANSWER, [], own_tokens=ANSWER)
        rows.append(batching.rows if for_caches > full_cache else 0)
    return ContextMemory(weights, full_cache, *rows)


@refused()
def main() -> None:
    """Print a table over memories and lengths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=list(SHAPES), default="8B")
    parser.add_argument("--length", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--memory", nargs="+", default=["24GB", "40GB", "80GB", "141GB"], help="of a GPU")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    model = without_weights(options.model)
    rows = []
    for length in options.length:
        for memory in options.memory:
            plan = context_memory(model, length, parse_memory(memory, "--memory"))
            rows.append(
                TableRow((length, memory, plan.full_cache, 0.2 * plan.full_cache, plan.rows, plan.sharing_rows))
            )
    columns = (
        Column("context", NumberFormat.COUNT, merged=True),
        Column("GPU", align="right"),
        Column("full cache", NumberFormat.BYTES),
        Column("at budget 0.2", NumberFormat.BYTES),
        Column("rows that are copies", NumberFormat.COUNT),
        Column("rows that share", NumberFormat.COUNT),
    )
    title = f"Llama {options.model} in bfloat16, weights of {size(plan.weights)}"
    table = Table(title, columns, tuple(rows))
    if options.markdown:
        print(markdown(table))
    else:
        Console().print(terminal(table))


if __name__ == "__main__":
    main()
