"""Do kvbench and kvpress prune the same channels of keys? `python -m benchmarks.kvpress_channels`.

`ThinKPress(key_channel_compression_ratio=r)` zeroes channels of all keys of a prompt; kvbench
stores the other channels: `key_channels=1-r`. Both get the same weights and tokens (see
`benchmarks.kvpress_agreement`, which says how to install kvpress). What is compared: the channels
that stay, head by head, and the logits of the tokens behind the prompt. The press keeps no recent
keys whole, so `residual=0` here. With SnapKV, both evict first and prune the keys that stay.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kvpress_cases import cases, random_models
from benchmarks.two_sides import KVPRESS, both_sides, cases_of

SHARES = ("0.75", "0.6", "0.5")
"""Shares of channels that stay."""
TAIL = 8
"""Tokens behind the prompt."""
EVICTION = (None, 0.4)
"""No eviction, and SnapKV at this share."""


def prepared(folder: Path) -> list[dict[str, Any]]:
    """Every model with a prompt of every length."""
    models = random_models(folder)
    return cases(models, {name: {} for name in models}, [])


def evictions(case: dict[str, Any]) -> list[int]:
    """The budgets of a case in tokens; 0 for no eviction."""
    length = len(case["ids"]) - TAIL
    return [0 if s is None else max(2 * case["window"], int(s * length)) for s in EVICTION]


@torch.no_grad()
def kvpress_side(folder: Path) -> None:
    """Write the channels that kvpress keeps, bool `[L, H, d]`, and logits, to `kvpress.npz`."""
    import kvpress
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    logging.disable_progress_bar()
    out: dict[str, Any] = {}
    for number, case in enumerate(cases_of(folder)):
        model = AutoModelForCausalLM.from_pretrained(case["folder"], dtype=torch.float32).eval()
        ids = torch.tensor([case["ids"]])
        length = ids.shape[1] - TAIL
        for share in SHARES:
            for budget in evictions(case):
                press: Any = kvpress.ThinKPress(key_channel_compression_ratio=1 - float(share))
                if budget:
                    snap = kvpress.SnapKVPress(
                        compression_ratio=1 - (budget + 0.5) / length,
                        window_size=case["window"],
                        kernel_size=case["kernel"],
                    )
                    press = kvpress.ComposedPress([snap, press])
                cache = DynamicCache()
                with press(model):
                    model(ids[:, :length], past_key_values=cache)
                places = torch.arange(length, length + TAIL)[None]
                tail = ids[:, length:]
                logits = model(tail, past_key_values=cache, position_ids=places).logits
                stays = [(layer.keys[0, :, :-TAIL] != 0).any(1).numpy() for layer in cache.layers]
                out[f"{number}/{share}/{budget}/channels"] = np.stack(stays)
                out[f"{number}/{share}/{budget}/logits"] = logits[0].numpy()
    np.savez(folder / "kvpress.npz", **out)


@torch.no_grad()
def compare(folder: Path) -> int:
    """Print the table; 1 if other channels stay, or logits differ by more than rounding."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    import kvbench

    logging.disable_progress_bar()
    theirs = np.load(folder / "kvpress.npz", allow_pickle=False)
    print(f"{'model':<11}{'T':>4} {'budget':>7} {'share':>6} {'channels':>9} {'other':>6}  d(logits)")
    cells = wrong = 0
    for number, case in enumerate(cases_of(folder)):
        model = AutoModelForCausalLM.from_pretrained(case["folder"], dtype=torch.float32).eval()
        ids = torch.tensor([case["ids"]])
        length = ids.shape[1] - TAIL
        for share in SHARES:
            for budget in evictions(case):
                spec = "full" if not budget else "snapkv:pool=avg:window={window}:kernel={kernel}"
                spec = f"{spec.format(**case)}:key_channels={share}:residual=0"
                with kvbench.attach(model, spec, budget or "full") as cache:
                    model(ids[:, :length], past_key_values=cache)
                    width = [layer.coding.width(layer.dim) for layer in cache.ragged if layer.coding]
                    logits = model(ids[:, length:], past_key_values=cache).logits[0]
                    orders = [layer.order[0] for layer in cache.ragged if layer.order is not None]
                stays = np.stack(
                    [
                        torch.zeros(order.shape).scatter(1, order.long()[:, :w], 1).numpy() > 0
                        for order, w in zip(orders, width, strict=True)
                    ]
                )
                right = theirs[f"{number}/{share}/{budget}/channels"]
                other = int((stays & ~right).sum())
                expected = theirs[f"{number}/{share}/{budget}/logits"]
                error = float(np.abs(logits.numpy() - expected).max() / np.abs(expected).max())
                wrong += other > 0 or right.sum() != stays.sum() or error > 1e-4
                print(
                    f"{case['model']:<11}{length:>4} {budget or 'full':>7} {share:>6} "
                    f"{right.sum():>9} {other:>6}  {error:.0e}"
                )
                cells += 1
    print(f"\n{cells} cells, {wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    name = "benchmarks.kvpress_channels"
    about = "Compare the key channels that kvbench and kvpress keep, and the logits behind them."
    sys.exit(both_sides(name, about, KVPRESS, prepared, kvpress_side, compare))
