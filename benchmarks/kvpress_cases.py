"""Models, tokens and what else both sides of a comparison with kvpress are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.kvpress_rows import SINKS, Case, spread

LENGTHS = (63, 100, 257, 512)
WINDOWS = {63: (5, 5), 100: (8, 7), 257: (16, 7), 512: (32, 5)}
"""SnapKV's window and kernel at each length; twice the window fits the smallest budget."""
HIDDEN = 16
"""Width of the surrogates' hidden layer."""


def cases(folders: dict[str, str], more: dict[str, Case], presses: list[str]) -> list[Case]:
    """Every model with a context of every length: what both sides are told.

    Args:
        folders: The models.
        more: What every model's cases hold besides (see `artifacts`).
        presses: Names of the rows to run.
    """
    from kvbench.reference import samples
    from scripts.reference_model import evaluate

    rng = np.random.default_rng(0)
    made = []
    for model, folder in folders.items():
        for length in LENGTHS:
            if model == "reference":
                words = evaluate.case("multikey_1", max(length + 32, 512), rng).prompt[:length]
                ids = [samples.IDS[word] for word in words]
            else:
                ids = rng.permutation(997)[:length].tolist()
            window, kernel = WINDOWS[length]
            case: Case = {
                "model": model,
                "folder": folder,
                "ids": ids,
                "window": window,
                "kernel": kernel,
                "delimiter": min(set(range(length + 1)) - set(ids)),
                "sinks": SINKS,
                "presses": presses,
                **more[model],
            }
            case["recent"] = length - spread(case) - SINKS
            made.append(case)
    return made


def random_models(folder: Path) -> dict[str, str]:
    """Save a Llama and a Qwen3 of random weights as safetensors; give all models' folders."""
    from kvbench import reference  # before transformers: it copes with a torchvision of any build

    shape: dict[str, Any] = {
        "vocab_size": 997,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "initializer_range": 0.15,
    }
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    made: dict[str, Any] = {
        "llama": LlamaForCausalLM(LlamaConfig(**shape)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**shape)),
    }
    for name, model in made.items():
        for weight in model.parameters():
            if weight.dim() == 1:  # norms of weight 1 would make all of Qwen3's keys equally long
                weight.data += 0.3 * torch.randn_like(weight)
        for layer in model.model.layers:
            # Every KV head attends more sharply than the one before, so that shares differ and
            # floors bind (without effect where queries are normed, as in Qwen3).
            query = layer.self_attn.q_proj.weight
            query.data *= 2.0 ** torch.arange(4).repeat_interleave(len(query) // 4)[:, None]
        model.save_pretrained(folder / name)
    return {**{name: str(folder / name) for name in made}, "reference": str(reference.path())}


def artifacts(models: dict[str, str], folder: Path) -> dict[str, Case]:
    """Save what presses read beside a model, drawn at random; give every model's share of a case.

    Q-filters, statistics of queries, a head profile, and the surrogates of KVzap: as kvpress reads
    them (`...-source`), and converted by kvbench.
    """
    from transformers import AutoConfig

    from kvbench.profiles.files import KINDS, HeadProfile
    from kvbench.profiles.summaries import FILTERS, STATISTICS, SummaryNotes
    from kvbench_policies.gates.convert import convert_for
    from kvbench_policies.gates.files import save

    made: dict[str, Case] = {}
    for name, path in models.items():
        config = AutoConfig.from_pretrained(path)
        layers, dim = config.num_hidden_layers, config.head_dim
        heads, queries = config.num_key_value_heads, config.num_attention_heads
        draw = torch.Generator().manual_seed(0)
        place = {x: folder / f"{name}-{x}" for x in ("filters", "statistics", "mlp", "linear")}
        drawn = torch.randn(layers, heads, dim, generator=draw)
        FILTERS.save(place["filters"], {"q_filters": drawn}, SummaryNotes())
        mean = torch.randn(layers, queries, dim, generator=draw)
        root = torch.randn(layers, queries, dim, dim, generator=draw) / dim
        statistics = {"query_mean": mean, "query_cov": root @ root.mT}
        STATISTICS.save(place["statistics"], statistics, SummaryNotes())
        worth = torch.rand(layers, heads, generator=draw).double().round(decimals=4)
        profile = folder / f"{name}-profile.json"
        table = tuple(map(tuple, (worth / worth.sum()).tolist()))
        HeadProfile(path, "", KINDS[0], layers, heads, queries, table).save(profile)
        for kind in ("mlp", "linear"):
            source = f"{place[kind]}-source"
            surrogates(kind, layers, config.hidden_size, heads, Path(source), draw)
            save(convert_for(source, path), place[kind])
        made[name] = {x: str(y) for x, y in place.items()} | {
            "layers": layers,
            "kv_heads": heads,
            "worth": worth.tolist(),
            "profile": str(profile),
        }
    return made


def surrogates(kind: str, layers: int, width: int, heads: int, folder: Path, draw: torch.Generator) -> None:
    """Save random surrogates in the format that NVIDIA publishes."""
    folder.mkdir()
    shapes = {"0": (HIDDEN, width), "2": (heads, HIDDEN)} if kind == "mlp" else {"": (heads, width)}
    weights = {}
    for layer in range(layers):
        for part, (rows, columns) in shapes.items():
            prefix = ".".join(filter(None, ("layers", str(layer), part)))
            drawn = torch.randn(rows, columns, generator=draw)
            weights[f"{prefix}.weight"] = 4 * drawn / columns**0.5
            weights[f"{prefix}.bias"] = torch.randn(rows, generator=draw)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    hidden = HIDDEN if kind == "mlp" else None
    config = {"model_type": "kvzap", "input_dim": width, "output_dim": heads, "n_modules": layers}
    (folder / "config.json").write_text(json.dumps(config | {"hidden_dim": hidden}))
