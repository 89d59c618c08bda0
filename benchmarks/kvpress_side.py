"""kvpress' side of `benchmarks/kvpress_agreement.py`: runs in its environment, knows no kvbench.

    python -m benchmarks.kvpress_side FOLDER

reads `cases.json` from the folder and writes what every press keeps to `kvpress.npz`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from kvpress import KeyRerotationPress
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.kvpress_presses import Run, run_of
from benchmarks.kvpress_rows import BASES, ROWS, Case, Row, budgets, forwards, presses_in

NEEDS_WEIGHTS = ("observed_attention", "cam")
"""Rows whose press reads the attention weights, which only eager attention returns."""


class Silent:
    """A tokenizer without words: KVzip then replays the context alone, as kvbench does."""

    chat_template = None

    @classmethod
    def from_pretrained(cls, name: str) -> Silent:
        """Stand in for `AutoTokenizer.from_pretrained`."""
        return cls()

    def encode(self, text: str, **options: Any) -> torch.Tensor:
        """Encode nothing, `[1, 0]`."""
        return torch.zeros(1, 0, dtype=torch.long)


class RecordingCache(DynamicCache):
    """A cache that remembers every key and value that it was ever given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.moved: dict[int, torch.Tensor] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *more: Any) -> Any:
        """Note what is added, and add it."""
        self.given.setdefault(layer_idx, []).append((key_states.clone(), value_states.clone()))
        return super().update(key_states, value_states, layer_idx, *more)

    def all_entries(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first tokens, `[H, T, d]` each."""
        key, value = zip(*self.given[layer], strict=True)
        return torch.cat(key, 2)[0, :, :tokens], torch.cat(value, 2)[0, :, :tokens]

    def moving(self) -> Callable[..., torch.Tensor]:
        """`KeyRerotationPress.rerotate_keys` that notes which keys it moves together."""
        original = KeyRerotationPress.rerotate_keys

        def rerotate_keys(module: Any, indices: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            self.moved[module.layer_idx] = indices
            return original(module, indices, keys)

        return staticmethod(rerotate_keys)


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


@contextmanager
def noted(run: Run) -> Iterator[list[np.ndarray]]:
    """Note the scores of a press, float32 `[H, T]` for every layer."""
    scores: list[np.ndarray] = []
    if run.scorer is None:
        yield scores
        return
    name = "compress_post" if hasattr(run.scorer, "compress_post") else "score"
    original = getattr(run.scorer, name)

    def watching(*arguments: Any) -> Any:
        if name == "compress_post":  # KVzip: all layers at once, before sinks are lifted
            scores.extend(run.scorer.score_val[:, 0].float().numpy().copy())
            return original(*arguments)
        found: torch.Tensor = original(*arguments)
        scores.append(found[0].float().numpy().copy())  # AdaKV writes into them afterwards
        return found

    setattr(run.scorer, name, watching)
    try:
        yield scores
    finally:
        setattr(run.scorer, name, original)


def watched(row: Row, run: Run, model: Any, case: Case, budget: float, whole: bool = True) -> dict[str, np.ndarray]:
    """Run a press; give what it kept, bool `[L, H, T]`, and its scores, float32 `[L, H, T]`.

    If the press says where what it holds belongs, also its keys and values behind the last cut,
    float32 `[L, H, T, 2 d]`, 0 elsewhere, and in which heads rounding decides (`close`, bool
    `[L, H]`). `whole`: chunks of a prompt are computed at once.
    """
    if run.settle is not None:
        with noted(run) as scores:
            forward(row, run, model, case, budget, whole)
        run.settle(np.stack(scores) if scores else None)
    with noted(run) as scores:
        cache = forward(row, run, model, case, budget, whole)
    tokens = forwards(row, case, budget)[-1][1] if row.moment != "chunked" else len(case["ids"])
    kept, merged = [], []
    places = getattr(run.press, "places", None)
    for index, layer in enumerate(model.model.layers):
        full, held = list(cache.all_entries(index, tokens)), cache.layers[index]
        left = [held.keys[0], held.values[0]]
        if places is not None:
            rows = torch.zeros(*full[0].shape[:2], 2 * full[0].shape[2])
            own = places[index]
            at, size = own[..., None].expand(-1, -1, rows.shape[-1]), own.shape[1]
            merged.append(rows.scatter(1, at, torch.cat(left, -1)[:, :size]).numpy())
            stays = torch.zeros(full[0].shape[:2], dtype=torch.bool)
            stays.scatter_(1, own, True)
            stays[:, tokens - (left[0].shape[1] - size) :] = True  # since the last cut
        elif row.match == "rotated":
            stays = torch.zeros(full[0].shape[:2], dtype=torch.bool)
            stays.scatter_(1, cache.moved[index][0], True)
        elif row.match == "keys":
            stays = which(full[0], left[0])
        else:
            stays = which(torch.cat(full, -1), torch.cat(left, -1))
        if layer.self_attn.masked_key_indices is not None:
            _, head, token = layer.self_attn.masked_key_indices
            stays[head, token] = False
        kept.append(stays.numpy())
    found = {"kept": np.stack(kept)}
    if row.match == "rotated":
        found["keys"] = np.stack([layer.keys[0].numpy() for layer in cache.layers])
    if merged:
        found["merged"] = np.stack(merged)
        close = np.zeros(found["kept"].shape[:2], bool)
        for layer, head in run.press.close:
            close[layer, head] = True
            if row.moment != "context":  # later layers feel it while tokens are decoded
                close[layer + 1 :] = True
        found["close"] = close
    if scores:
        found["scores"] = np.stack(scores)
    elif "KnormPress" in row.press:  # it scored what it held at the time; norms do not change
        keys = [cache.all_entries(index, tokens)[0] for index in range(len(kept))]
        found["norms"] = torch.stack(keys).norm(dim=-1).numpy()
    return found


def forward(row: Row, run: Run, model: Any, case: Case, budget: float, whole: bool) -> RecordingCache:
    """Feed the case's tokens to a model with a press."""
    torch.manual_seed(0)  # CaM draws which values it merges
    cache = RecordingCache()
    ids = torch.tensor([case["ids"]])
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    steps = forwards(row, case, budget)
    if row.moment == "chunked" and whole:  # kvpress computes the prompt at once
        steps = [(0, ids.shape[1])]
    with run.press(model), mock.patch.object(KeyRerotationPress, "rerotate_keys", cache.moving()):
        for start, end in steps:
            place = torch.arange(start, end)[None]
            part = ids[:, start:end]
            if row.moment == "question":
                part, place = delimited(part, case), None
            model(part, past_key_values=cache, position_ids=place, logits_to_keep=1)
    return cache


def delimited(ids: torch.Tensor, case: Case) -> torch.Tensor:
    """Put the delimiter before the question, which is as long as the case's window."""
    size = case["window"]
    between = torch.tensor([[case["delimiter"]]])
    return torch.cat([ids[:, :-size], between, ids[:, -size:]], 1)


@torch.no_grad()
def kvpress_side(folder: Path) -> None:
    """Write what kvpress keeps and its scores to `kvpress.npz`."""
    from importlib.metadata import version

    import kvpress
    from transformers.utils import logging

    logging.disable_progress_bar()
    getLogger("kvpress").setLevel(ERROR)  # KVzip says at every press that it takes long
    exported = sorted(presses_in(" ".join(kvpress.__all__)) - {*BASES})
    out: dict[str, Any] = {
        "versions": np.array([f"{p} {version(p)}" for p in ("kvpress", "transformers", "torch")]),
        "exported": np.array(exported),
    }
    models: dict[str, Any] = {}
    drawn = np.load(folder / "draws.npz", allow_pickle=False)
    for number, case in enumerate(json.loads((folder / "cases.json").read_text())):
        if case["folder"] not in models:
            models[case["folder"]] = AutoModelForCausalLM.from_pretrained(
                case["folder"], dtype=torch.float32, attn_implementation="sdpa"
            ).eval()
        model = models[case["folder"]]
        head_dim = model.model.layers[0].self_attn.head_dim
        for name in case["presses"]:
            row = ROWS[name]
            model.set_attn_implementation("eager" if name in NEEDS_WEIGHTS else "sdpa")
            for budget in budgets(row, case):
                with (
                    mock.patch("torch.randn", identity),
                    mock.patch("kvpress.presses.kvzip_press.AutoTokenizer", Silent),
                ):
                    prefix = f"{number}/{name}/{budget}/"
                    draws = {x.removeprefix(prefix): drawn[x] for x in drawn if prefix in x}
                    run = run_of(name, case, budget, head_dim, draws)
                    found = watched(row, run, model, case, budget)
                    if row.reason:
                        run = run_of(name, case, budget, head_dim, draws, mend=True)
                        again = watched(row, run, model, case, budget, whole=False)
                        found |= {f"mended/{what}": array for what, array in again.items()}
                for what, array in found.items():
                    out[prefix + what] = array
    np.savez(folder / "kvpress.npz", **out)


if __name__ == "__main__":
    kvpress_side(Path(sys.argv[1]))
