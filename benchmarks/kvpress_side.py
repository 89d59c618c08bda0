"""kvpress' side of `benchmarks/kvpress_agreement.py`: runs in its environment, knows no kvbench.

    python kvpress_side.py FOLDER

reads `cases.json` from the folder and writes what every press keeps to `kvpress.npz`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

CHUNKS = 8
"""Chunks of non-causal attention are this many windows long."""
NEEDS_WEIGHTS = ("observed_attention",)
"""Presses that read the attention weights, which only eager attention returns."""


def press_of(name: str, case: dict[str, Any], dim: int) -> tuple[Any, Any]:
    """The press of a policy, and the one in it that scores."""
    import kvpress

    window, kernel = case["window"], case["kernel"]
    chunk = {"chunk_size": CHUNKS * window}
    plain = {
        "streaming_llm": lambda: kvpress.StreamingLLMPress(),
        "knorm": lambda: kvpress.KnormPress(),
        "keydiff": lambda: kvpress.KeyDiffPress(),
        "lagkv": lambda: kvpress.LagKVPress(lag_size=window),
        "expected_attention": lambda: kvpress.ExpectedAttentionPress(),
        "expected_attention measured": lambda: with_statistics(
            kvpress.ExpectedAttentionStatsPress(), case["statistics"]
        ),
        "observed_attention": lambda: kvpress.ObservedAttentionPress(),
        "tova": lambda: kvpress.TOVAPress(),
        "curdkv": lambda: kvpress.CURPress(),
        "leverage": lambda: kvpress.LeverageScorePress(sketch_dimension=dim),
        "non_causal": lambda: kvpress.NonCausalAttnPress(**chunk),
        "compactor": lambda: kvpress.CompactorPress(blending=0.35, sketch_dimension=dim, **chunk),
        "qfilters": lambda: with_filters(kvpress.QFilterPress(), case["filters"]),
    }
    if name in plain:
        press = plain[name]()
        return press, press
    inner = kvpress.SnapKVPress(window_size=window, kernel_size=kernel)
    outer = {
        "snapkv": lambda p: p,
        "adakv": kvpress.AdaKVPress,
        "critical_snapkv": kvpress.CriticalKVPress,
        "criticalkv": kvpress.CriticalAdaKVPress,
        "criticalkv floor": lambda p: kvpress.CriticalAdaKVPress(
            p, alpha_safeguard=0.5, first_stage_ratio=0.25
        ),
    }
    return outer[name](inner), inner


def with_filters(press: Any, folder: str) -> Any:
    """Give a press Q-filters from a folder instead of the hub."""
    from safetensors.torch import load_file

    press.q_filters = load_file(Path(folder) / "model.safetensors")["q_filters"]
    press.post_init_from_model = lambda model: None
    return press


def with_statistics(press: Any, folder: str) -> Any:
    """Give a press mean and covariance of queries from a folder instead of the hub."""
    from safetensors.torch import load_file

    held = load_file(Path(folder) / "model.safetensors")
    press.mu, press.cov = held["query_mean"], held["query_cov"]
    return press


def identity(*shape: int, **options: Any) -> torch.Tensor:
    """Stand-in for `torch.randn` by which a projection `[..., d, d]` projects nothing."""
    square = torch.eye(shape[-2], shape[-1]) * shape[-1] ** 0.5
    return square.expand(shape).to(options.get("dtype"))


def which(full: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Which rows of `[H, T, d]` the rows of `[H, n, d]` are, bool `[H, T]`; each must be one."""
    same = (held[:, :, None] == full[:, None]).all(-1)
    if not bool((same.sum(-1) == 1).all()):
        raise RuntimeError("an entry that kvpress holds is not exactly one of the full cache")
    return same.any(1)


@torch.no_grad()
def kvpress_side(folder: Path) -> None:
    """Write what kvpress keeps, bool `[L, H, T]`, and its scores, to `kvpress.npz`."""
    from importlib.metadata import version

    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    logging.disable_progress_bar()
    out: dict[str, Any] = {
        "versions": np.array([f"{p} {version(p)}" for p in ("kvpress", "transformers", "torch")])
    }
    models: dict[str, Any] = {}
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        if case["folder"] not in models:
            models[case["folder"]] = AutoModelForCausalLM.from_pretrained(
                case["folder"], dtype=torch.float32, attn_implementation="sdpa"
            ).eval()
        model = models[case["folder"]]
        ids = torch.tensor([case["ids"]])
        for name in case["presses"]:
            model.set_attn_implementation("eager" if name in NEEDS_WEIGHTS else "sdpa")
            for budget in case["budgets"]:
                press, inner = press_of(name, case, model.model.layers[0].self_attn.head_dim)
                inner.compression_ratio = 1 - (budget + 0.5) / ids.shape[1]
                with mock.patch("torch.randn", identity):
                    kept, scores = watched(press, inner, model, ids, DynamicCache())
                out[f"{number}/{name}/{budget}/kept"] = kept
                out[f"{number}/{name}/{budget}/scores"] = scores
    np.savez(folder / "kvpress.npz", **out)


def watched(press: Any, inner: Any, model: Any, ids: torch.Tensor, cache: Any) -> tuple[Any, Any]:
    """Run a press; give what it kept, bool `[L, H, T]`, and its scores, float32 `[L, H, T]`."""
    compress, score = press.compress, inner.score
    kept: list[np.ndarray] = []
    scores: list[np.ndarray] = []

    def scoring(*arguments: Any) -> torch.Tensor:
        found: torch.Tensor = score(*arguments)
        scores.append(found[0].float().numpy().copy())  # AdaKV writes into them afterwards
        return found

    def compressing(module: Any, hidden: Any, key: Any, value: Any, *rest: Any) -> Any:
        module.masked_key_indices = None
        left = compress(module, hidden, key, value, *rest)
        if module.masked_key_indices is None:
            kept.append(which(torch.cat([key, value], -1)[0], torch.cat(left, -1)[0]).numpy())
        else:
            _, head, token = module.masked_key_indices
            stays = torch.ones(key.shape[1:3], dtype=torch.bool)
            stays[head, token] = False
            kept.append(stays.numpy())
        return left

    press.compress, inner.score = compressing, scoring
    with press(model):
        model(ids, past_key_values=cache, logits_to_keep=1)
    return np.stack(kept), np.stack(scores)


if __name__ == "__main__":
    kvpress_side(Path(sys.argv[1]))
