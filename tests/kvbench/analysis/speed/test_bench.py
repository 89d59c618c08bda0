"""`kvbench bench`: what is measured, how it is compared, and what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvbench
from kvbench.analysis.speed import timing
from kvbench.analysis.speed.bench import write_bench
from kvbench.analysis.speed.ratios import summarize
from kvbench.analysis.speed.settings import Setting, SpeedSettings
from kvbench.budget import Budget
from kvbench.engine.driver import engine
from kvbench.errors import UserError
from kvbench.progress import Silent


def test_the_full_cache_stands_beside_every_size() -> None:
    bench = SpeedSettings("reference", ("snapkv", "full", "h2o"), ("0.2", "full"), (64, 128), (1, 2))
    settings = bench.settings()
    assert len(settings) == 2 * 2 * 3
    by_size: dict[Any, list[str]] = {}
    for setting in settings:
        by_size.setdefault(setting.size, []).append(f"{setting.policy} {setting.budget}")
    assert set(by_size) == {(c, b, 32, 0) for c in (64, 128) for b in (1, 2)}
    for names in by_size.values():
        assert names == ["full full", "snapkv 0.2", "h2o 0.2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contexts": (0,)}, "--context 0 is out of range"),
        ({"repeats": 0}, "--repeats 0"),
        ({"policies": ("fastv",)}, "prunes images"),
        ({"budgets": ("visual:3",)}, "needs images"),
        ({"contexts": (10**7,)}, "do not fit into the"),
        ({"moments": ("question",)}, "have no question and no turns"),
        ({"sizes": ("256",)}, "use 256\\+1024"),
        ({"sizes": ("0+8",)}, "--context 0 is out of range"),
        ({"batches": (None,)}, "needs a memory limit on this device"),
        ({"memory": 2**30}, "add --batch max"),
        ({"device_map": "auto", "device": "cpu"}, "exclude each other"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    bench = SpeedSettings(**{"model": "reference", "policies": ("snapkv",), **changes})
    with pytest.raises(UserError, match=message):
        write_bench(bench, tmp_path, Silent())


@torch.no_grad()
def test_bytes_are_those_of_the_budget(tiny_llama: Any) -> None:
    setting = Setting(kvbench.policy("knorm"), Budget.parse("0.25"), 40, 3, 4)
    with engine(tiny_llama):
        found = timing.measure(tiny_llama, setting, seed=0)
    config = tiny_llama.config
    head = config.hidden_size // config.num_attention_heads
    entry = 2 * head * 4 * config.num_key_value_heads * config.num_hidden_layers
    assert found.kv_bytes_full == 3 * 40 * entry
    assert found.kv_bytes_live == 3 * 10 * entry <= found.kv_bytes_allocated
    assert found.ttft_s >= found.prefill_s + found.compress_s > 0
    assert found.tokens_per_s == pytest.approx(3 / found.step_s)
    assert found.peak_bytes > found.kv_bytes_full


def test_ratios_are_paired_by_repeat() -> None:
    """A machine that becomes three times slower changes no ratio."""
    rows = []
    for repeat, slow in enumerate((1.0, 3.0, 9.0)):
        for policy, time in (("full", 2.0), ("snapkv", 1.0)):
            rows.append(
                {
                    "policy": policy, "budget": "0.2", "moment": "context", "model": "m", "context": 8,
                    "batch_setting": "max", "batch": 4 / time, "generate": 4, "chunk": 0,
                    "repeat": repeat, "ttft_s": time * slow, "step_s": time * slow, "decode_s": time * slow,
                    "tokens_per_s": 1 / (time * slow), "total_tokens_per_s": 1 / slow, "peak_bytes": 100.0,
                    "kv_bytes_live": 10.0 * time, "error": "",
                }
            )  # fmt: skip
    summary = summarize(pd.DataFrame(rows)).set_index("policy")
    assert summary.loc["snapkv", ["step_s_ratio", "step_s_ratio_lo"]].tolist() == [0.5, 0.5]
    assert summary.loc["snapkv", "tokens_per_s_ratio"] == 2.0
    assert summary.loc["snapkv", "kv_bytes_live_ratio"] == 0.5
    assert summary.loc["full", "ttft_s"] == 6.0
    assert summary.loc["full", "ttft_s_ratio"] == 1.0


def test_a_policy_that_fails_costs_only_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def broken(v):\n    raise ValueError('it is broken')\n")
    bench = SpeedSettings(
        "reference", ("knorm", f"{tmp_path}/mine.py:broken"), ("0.2", "0.5"), (48, 96), (1,), (2,),
        repeats=2,
    )  # fmt: skip
    done = write_bench(bench, tmp_path / "out", Silent())
    frame = pd.read_parquet(tmp_path / "out" / "bench.parquet")
    assert len(frame) == 2 * 2 * 5
    broken = frame["policy"].str.contains("broken")
    assert (frame.loc[broken, "error"].str.contains("it is broken")).all()
    assert frame.loc[~broken, "step_s"].gt(0).all() and frame.loc[broken, "step_s"].isna().all()
    assert len(done.failed) == 4 and any("it is broken" in note for note in done.notes)
    pictures = {p.name for p in done.files if p.suffix == ".png"}
    assert pictures == {"bench-context.png", "bench-share.png"}
    record = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert record["contexts"] == [48, 96] and record["versions"]["torch"]
    summary = pd.read_parquet(tmp_path / "out" / "summary.parquet")
    kept = summary[summary["policy"] == "knorm"]
    assert np.allclose(kept["kv_bytes_live_ratio"], [10 / 48, 0.5, 19 / 96, 0.5])
