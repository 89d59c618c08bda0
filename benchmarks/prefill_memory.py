"""How much memory does a prefill that evicts take at its peak? Held against the full cache.

    python -m benchmarks.prefill_memory [--length 4096] [--layers 16] [--budget 0.1] [--markdown]

A Llama of random weights prefills a prompt inside `kvbench.attach`. Of every policy two peaks are
taken:

- K/V: bytes that all layers hold together, room and bookkeeping counted, looked at after every
  layer's attention, before and after its compression;
- working memory: all that torch's allocator gave out at once during the forward, less the same
  forward without a cache (in which one layer's new K and V are alive as well). What scoring and
  packing need for themselves is in it.

A policy with a budget for every head compresses each layer when it is done, so at its peak it
should hold its budget and one layer; one with a budget over all layers needs all of them first.
Gates of the learned policies are random: what they say changes which entries stay, not how many.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import torch
from torch import Tensor

import kvbench
from benchmarks.memory import MIB, allocated
from benchmarks.wrong_input import refused
from kvbench.engine.attachment import Forward, Step
from kvbench.engine.driver import Driver
from kvbench.engine.layer import RaggedLayer
from kvbench.engine.models import model_info
from kvbench.engine.session import AttachedCache
from kvbench_policies.gates.loaded import random_gates

if TYPE_CHECKING:
    from transformers import LlamaModel

POLICIES = ("full", "trimkv", "snapkv", "dbtrimkv")
HEADS, DIM, HIDDEN = 8, 64, 256


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak of one prefill.

    Attributes:
        held: Of K/V in all layers.
        working: Of the allocator, less the forward without a cache.
        left: Of K/V when the prefill is over.
    """

    held: int
    working: int
    left: int


def llama(layers: int, length: int, device: torch.device) -> LlamaModel:
    """A model whose K/V are large beside its activations: 8 KV heads of 64, hidden size 256."""
    # kvbench must be imported before: `kvbench.engine.torchvision_build`.
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        max_position_embeddings=length,
    )
    return LlamaModel(config).eval().to(device)


def measure(model: LlamaModel, ids: Tensor, policy: str, budget: str, bare: int) -> Peak:
    """The peaks of one policy's prefill; `bare` is what the forward takes without a cache."""
    found = {"held": 0, "left": 0}

    def prefill() -> None:
        with kvbench.attach(model, policy, budget) as cache:
            with _watched(cache, found):
                model(input_ids=ids, past_key_values=cache, use_cache=True)
            found["held"] = max(found["held"], cache.allocated_bytes())
            found["left"] = cache.allocated_bytes()

    working = allocated(prefill, ids.device) - bare
    return Peak(found["held"], working, found["left"])


@contextmanager
def _watched(cache: AttachedCache, found: dict[str, int]) -> Iterator[None]:
    """Note the most bytes held after a layer's attention, before and after its compression."""
    finish_layer = Driver._on_layer

    def look() -> None:
        found["held"] = max(found["held"], cache.allocated_bytes())

    def watched(driver: Driver, forward: Forward, layer: RaggedLayer, step: Step) -> None:
        look()
        finish_layer(driver, forward, layer, step)
        look()

    with mock.patch.object(Driver, "_on_layer", watched):
        yield


@refused()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--budget", default="0.1")
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--markdown", action="store_true")
    given = parser.parse_args()
    device = torch.device(given.device)
    model = llama(given.layers, given.length, device)
    ids = torch.randint(256, (1, given.length), device=device)
    layer = 2 * HEADS * DIM * given.length * next(model.parameters()).element_size()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        model(input_ids=ids[:, :8])  # what is made once is not measured
        bare = allocated(lambda: model(input_ids=ids, use_cache=False) and None, device)
        print(
            f"{given.layers} layers of {HEADS} KV heads of {DIM}, {given.length} tokens, float32, "
            f"{device.type}; budget {given.budget}; K/V of one layer: {layer / MIB:.1f} MiB; the "
            f"forward without a cache: {bare / MIB:.1f} MiB\n"
        )
        print(HEAD if given.markdown else HEAD.replace("|", " ").split("\n")[0])
        for policy in given.policy:
            spelled = policy
            if policy in ("trimkv", "dbtrimkv"):
                spelled += f":gates={random_gates(policy, model_info(model), Path(folder))}"
            peak = measure(model, ids, spelled, given.budget, bare)
            print(_row(policy, peak, layer, given.layers, given.markdown))


HEAD = """\
| policy | K/V at the peak | in layers | share of full | left | working memory | in layers |
| --- | --: | --: | --: | --: | --: | --: |"""


def _row(policy: str, peak: Peak, layer: int, layers: int, markdown: bool) -> str:
    cells = [
        f"`{policy}`" if markdown else policy,
        f"{peak.held / MIB:.1f} MiB",
        f"{peak.held / layer:.2f}",
        f"{100 * peak.held / layer / layers:.1f}%",
        f"{peak.left / layer:.2f} layers",
        f"{peak.working / MIB:.1f} MiB",
        f"{peak.working / layer:.2f}",
    ]
    return f"| {' | '.join(cells)} |" if markdown else "  ".join(c.rjust(12) for c in cells)


if __name__ == "__main__":
    main()
