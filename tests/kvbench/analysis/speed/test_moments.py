"""`kvbench bench` with eviction while decoding, chunked prefills, and the largest batch that fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import kvbench
from kvbench import native
from kvbench.analysis.speed import timing
from kvbench.analysis.speed.bench import write_bench
from kvbench.analysis.speed.capacity import largest_batch
from kvbench.analysis.speed.settings import Setting, SpeedSettings
from kvbench.budget import Budget
from kvbench.cli import call
from kvbench.engine.driver import engine
from kvbench.errors import UserError
from kvbench.moments import Timing
from kvbench.progress import Silent


def entry_bytes(model: Any) -> int:
    """Bytes of keys and values of a token in all layers and heads, in float32."""
    config = model.config
    head = config.hidden_size // config.num_attention_heads
    return int(2 * head * 4 * config.num_key_value_heads * config.num_hidden_layers)


@torch.no_grad()
def test_the_cache_stays_near_its_budget_while_decoding(tiny_llama: Any) -> None:
    """Count by hand: a budget of 10 and a buffer of 4, an answer of 12 after a prompt of 40, 3 sequences."""
    once = Setting(kvbench.policy("knorm:buffer=4"), Budget.parse(10), 40, 3, 12)
    during = replace(once, timing=Timing("decode"))
    full = replace(once, policy=kvbench.policy("full"), budget=Budget.parse("full"))
    with engine(tiny_llama):
        held = {setting: timing.measure(tiny_llama, setting, seed=0) for setting in (once, during, full)}
    entry = entry_bytes(tiny_llama)
    assert held[during].kv_bytes_live == held[once].kv_bytes_live == 3 * 10 * entry
    assert held[during].kv_bytes_peak == 3 * (10 + 4) * entry
    assert held[once].kv_bytes_peak == 3 * (10 + 12) * entry
    assert held[full].kv_bytes_peak == 3 * (40 + 12) * entry
    assert held[during].decode_s > held[during].evict_s > 0 == held[once].evict_s
    for measured in held.values():
        assert measured.total_s == pytest.approx(measured.ttft_s + 12 * measured.step_s)
        assert measured.prompt_share == pytest.approx(measured.ttft_s / measured.total_s)
        assert measured.total_tokens_per_s == pytest.approx(3 * 12 / measured.total_s)


@torch.no_grad()
@pytest.mark.parametrize("spelling", ["full", "knorm", "snapkv:window=4"])
def test_a_batch_is_prefilled_in_chunks_as_each_sequence_alone(tiny_llama: Any, spelling: str) -> None:
    budget = Budget.parse("full" if spelling == "full" else "0.25")
    setting = Setting(kvbench.policy(spelling), budget, 41, 3, 2, Timing("chunked", 16))
    token_ids = timing._prompts(tiny_llama, setting, seed=0)
    with engine(tiny_llama):
        together, logits, _ = timing._prefill(tiny_llama, setting, token_ids, seed=0)
        for row in range(3):
            alone, row_logits, _ = timing._prefill(tiny_llama, setting, token_ids[row : row + 1], seed=0)
            assert torch.allclose(logits[row], row_logits[0], atol=1e-5)
            assert together.live_entries(row) == alone.live_entries(0)
        if spelling == "full":
            assert torch.allclose(logits, tiny_llama(token_ids).logits[:, -1], atol=1e-5)
        measured = timing.measure(tiny_llama, setting, seed=0)
    kept = 41 if spelling == "full" else 10  # a quarter of the prompt, rounded
    assert measured.kv_bytes_live == 3 * kept * entry_bytes(tiny_llama)
    assert measured.kv_bytes_peak == 3 * (kept + 2) * entry_bytes(tiny_llama)
    assert measured.prefill_s > 0 and (measured.compress_s > 0 or spelling == "full")


@pytest.mark.parametrize("per_sequence", [1.0, 3.7, 40.0])
@pytest.mark.parametrize("limit", [10.0, 99.9, 100.0, 1234.0])
@pytest.mark.parametrize("rounding", [1.0, 16.0])
def test_the_largest_batch_is_that_of_trying_all(per_sequence: float, limit: float, rounding: float) -> None:
    tried: list[int] = []

    def peak_of(batch: int) -> float:
        """A peak that grows in steps, as memory comes in pages, and runs out at 8000."""
        tried.append(batch)
        bytes_ = 60 + rounding * (per_sequence * batch // rounding)
        return bytes_ if bytes_ < 8000 else float("inf")

    expected = max((batch for batch in range(1, 1300) if peak_of(batch) <= limit), default=0)
    tried.clear()
    assert largest_batch(peak_of, limit) == expected
    assert len(tried) == len(set(tried)) <= 24


def test_prompts_are_paired_with_answers_and_a_budget_is_the_prompt() -> None:
    bench = SpeedSettings(
        "reference", ("h2o",), ("prompt", "0.5"), batches=(None,), moments=("context", "decode", "chunked:8"),
        sizes=("16+64", "32+128"),
    )  # fmt: skip
    settings = bench.settings()
    assert {(s.context, s.generate) for s in settings} == {(16, 64), (32, 128)}
    assert {s.budget.tokens for s in settings if s.budget_name == "prompt"} == {16, 32}
    full = [(s.context, str(s.timing)) for s in settings if s.policy.is_full]
    assert full == [(c, t) for c in (16, 32) for t in ("context", "chunked:8")], "once per chunk size"
    assert len(settings) == 2 * (2 + 3 * 2)


def test_the_largest_batches_are_compared_with_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full cache takes 8 MB a sequence and the other 2: of 25 MB beside the model's 9, two and eight fit."""

    def measure(model: Any, setting: Setting, seed: int) -> timing.SettingTiming:
        assert setting.batch is not None
        megabytes = 9 + setting.batch * (8 if setting.policy.is_full else 2)
        speed = {"tokens_per_s": 10.0 * setting.batch, "total_tokens_per_s": 5.0 * setting.batch}
        return timing.SettingTiming(
            0.1, 0.1, 0.2, 1.0, 0.1, 0.1, **speed, total_s=1.2, prompt_share=1 / 6, peak_bytes=megabytes * 2.0**20,
            kv_bytes_live=1.0, kv_bytes_peak=2.0,
        )  # fmt: skip

    monkeypatch.setattr(timing, "measure", measure)
    bench = SpeedSettings(
        "reference", ("h2o",), ("prompt",), batches=(None,), moments=("decode",), sizes=("16+8", "32+16"),
        repeats=2, memory=25 * 2**20,
    )  # fmt: skip
    done = write_bench(bench, tmp_path / "out", Silent())
    frame = pd.read_parquet(tmp_path / "out" / "bench.parquet")
    assert dict(zip(frame["policy"], frame["batch"], strict=True)) == {"full": 2, "h2o": 8}
    summary = pd.read_parquet(tmp_path / "out" / "summary.parquet")
    assert summary.loc[summary["policy"] == "h2o", "tokens_per_s_ratio"].tolist() == [4.0, 4.0]
    assert {path.name for path in done.files if path.suffix == ".png"} == {"bench-context.png"}
    text = (tmp_path / "out" / "summary.md").read_text()
    for shown in ("16&#43;8", "16.7%", "stays within 25.0 MiB"):
        assert shown in text, text
    small = replace(bench, memory=12 * 2**20)
    failed = write_bench(small, tmp_path / "small", Silent()).failed
    assert list(failed.values()) == ["not even a batch of 1 fits into 12.0 MiB"] * 2


@pytest.mark.slow
def test_one_sequence_more_than_the_largest_batch_exceeds_the_limit(tmp_path: Path) -> None:
    """The peak of a process is measured for real, with sequences that are large beside its noise."""
    bench = SpeedSettings("reference", ("knorm",), ("64",), (512,), (8,), (4,), 1)
    write_bench(bench, tmp_path / "eight", Silent())
    eight = pd.read_parquet(tmp_path / "eight" / "bench.parquet")["peak_bytes"].max()
    asked = replace(bench, batches=(None,), memory=int(eight))
    write_bench(asked, tmp_path / "max", Silent())
    found = pd.read_parquet(tmp_path / "max" / "bench.parquet")
    assert found["batch"].between(4, 16).all()


def test_settings_are_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "implementation", lambda: "torch")
    out = tmp_path / "out"
    bench = SpeedSettings("reference", ("knorm",), sizes=("64+2",), repeats=1, device="cpu")
    write_bench(bench, out, Silent())
    record = json.loads((out / "settings.json").read_text())
    assert record["sizes"] == ["64+2"] and not {"contexts", "generates"} & set(record)
    assert record["cpu_code"] == "torch"
    with pytest.raises(UserError, match="holds a benchmark, not a run; read its summary"):
        kvbench.load(out)


def test_sizes_replace_contexts(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["bench", "--size", "8+8", "--context", "16"]) == 2
    assert "--size replaces --context and --generate" in capsys.readouterr().err
    assert call(["bench", "--batch", "max", "--memory", "lots"]) == 2
    assert "--memory must be a size such as 40GB" in capsys.readouterr().err


def test_speed_ups_of_chunks_are_laid_out_as_published(tmp_path: Path) -> None:
    arguments = ["--policy", "knorm", "--budget", "0.5", "--moment", "chunked:16,chunked:32", "--context", "48"]
    out = tmp_path / "out"
    assert call(["bench", *arguments, "--generate", "1", "--repeats", "1", "--out", str(out)]) == 0
    text = (out / "summary.md").read_text()
    summary = pd.read_parquet(out / "summary.parquet").set_index(["policy", "chunk"])
    for chunk in (16, 32):
        speed_up = summary.loc[("full", chunk), "ttft_s"] / summary.loc[("knorm", chunk), "ttft_s"]
        (line,) = [row for row in text.splitlines() if row.count("|") == 8 and f"| {chunk} |" in row]
        assert f"{speed_up:.2f}×" in line
