"""Timing of one setting: prefill, compression and decode steps on a batch of random prompts."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from kvbench.analysis.speed.settings import Setting, SpeedSettings
from kvbench.engine.driver import engine, forward
from kvbench.engine.loading import load_config, load_model, pick_device, pick_dtype
from kvbench.engine.prefix import Compression, Prefix
from kvbench.engine.threads import now, thread_budget
from kvbench.errors import PluginError, UserError, out_of_memory, plugin_call, reason_of
from kvbench.progress import Reporter
from kvbench.runs.planning import quiet_libraries

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class SettingTiming:
    """Measurements of one setting in one repetition.

    Attributes:
        prefill_s: Seconds of the prefill, including the policy's observations.
        compress_s: Seconds of the compression.
        ttft_s: Seconds to the first token: prefill, compression and token selection.
        step_s: Mean seconds per decode step.
        tokens_per_s: Tokens of all sequences per second while decoding.
        peak_bytes: Peak memory of the GPU or the process; NaN if unknown.
        kv_bytes_live: Bytes of the held entries after the compression.
        kv_bytes_allocated: Bytes allocated for them, with room for the answer.
        kv_bytes_full: Bytes of the full cache at the same time.
        error: Why there are no measurements, or "".
    """

    prefill_s: float = float("nan")
    compress_s: float = float("nan")
    ttft_s: float = float("nan")
    step_s: float = float("nan")
    tokens_per_s: float = float("nan")
    peak_bytes: float = float("nan")
    kv_bytes_live: float = float("nan")
    kv_bytes_allocated: float = float("nan")
    kv_bytes_full: float = float("nan")
    error: str = ""


def run_bench(bench: SpeedSettings, reporter: Reporter) -> pd.DataFrame:
    """Measure all settings `repeats` times, in a new order each time.

    Compared settings are measured within minutes of each other, so that a machine that slows down affects all of them.

    Returns:
        A row per setting and repeat, in the order of the settings: the setting, `repeat` and the fields of
            `SettingTiming`.

    Raises:
        UserError: The model cannot be loaded, or a prompt does not fit into it.
    """
    quiet_libraries()
    settings = bench.settings()
    config = load_config(bench.model, bench.revision).get_text_config()
    window = int(getattr(config, "max_position_embeddings", 0) or 0)
    longest = max(candidate.context + candidate.generate for candidate in settings)
    if window and longest > window:
        raise UserError(
            f"{longest} tokens do not fit into the {window} of model {bench.model}; use a smaller "
            "--context or --generate"
        )
    device = pick_device(bench.device)
    dtype = pick_dtype(bench.dtype, device)
    model = load_model(bench.model, bench.revision, device, dtype, attn=bench.attn)
    measured_rows: list[dict[str, Any]] = []
    with torch.no_grad(), thread_budget(model, reporter.message), engine(model):
        reporter.start(len(settings) * bench.repeats, bench.model)
        for setting in _warm_up_settings(settings):  # the first forward pass of a size is slower
            _measure_or_error(model, setting, bench.seed)
        for repeat in range(bench.repeats):
            shuffled = list(enumerate(settings))
            random.Random(f"{bench.seed}-{repeat}").shuffle(shuffled)
            for setting_index, setting in shuffled:
                measured = _measure_or_error(model, setting, bench.seed + repeat)
                measured_rows.append(
                    {
                        "place": setting_index,
                        **_setting_columns(setting),
                        "repeat": repeat,
                        **asdict(measured),
                    }
                )
                reporter.advance()
    frame = pd.DataFrame(measured_rows).sort_values(["place", "repeat"], ignore_index=True)
    frame = frame.drop(columns="place")
    return frame.assign(
        model=bench.model,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
    )


def _warm_up_settings(settings: list[Setting]) -> Iterator[Setting]:
    """Yield the first setting of every size and every policy."""
    seen: set[object] = set()
    for setting in settings:
        if {setting.size, setting.policy} - seen:
            seen |= {setting.size, setting.policy}
            yield setting


def _setting_columns(setting: Setting) -> dict[str, Any]:
    return {
        "policy": str(setting.policy),
        "budget": str(setting.budget),
        "context": setting.context,
        "batch": setting.batch,
        "generate": setting.generate,
    }


def _measure_or_error(model: nn.Module, setting: Setting, seed: int) -> SettingTiming:
    """Measure a setting; return the reason if it fails or runs out of memory."""
    try:
        with plugin_call():
            return measure(model, setting, seed)
    except PluginError as error:
        return SettingTiming(error=str(error))
    except Exception as error:
        if not out_of_memory(error):
            raise
        return SettingTiming(error=reason_of(error))


def measure(model: nn.Module, setting: Setting, seed: int) -> SettingTiming:
    """Measure one setting once.

    Args:
        model: The model, inside `engine`.
        setting: The setting to measure.
        seed: Seed of prompts and noise.
    """
    device = next(model.parameters()).device
    token_ids = _prompts(model, setting, seed).to(device)
    compression = Compression(setting.policy, setting.budget, "context", seed)
    gc.collect()
    start_peak(device)
    start_time = now(device)
    prefix = Prefix(model, setting.policy.needs)
    logits = prefix.extend(token_ids)
    prefill_end = now(device)
    (cache,) = prefix.compress([compression], reserve=setting.generate)
    del prefix
    compress_end = now(device)
    next_token = logits.argmax(-1, keepdim=True)
    token_end = now(device)
    live_bytes, allocated_bytes = cache.live_bytes(), cache.allocated_bytes()
    full_bytes = sum(cache.full_bytes(sequence) for sequence in range(setting.batch))
    decode_start = now(device)
    for _ in range(setting.generate):
        next_token = forward(model, cache, next_token).argmax(-1, keepdim=True)
    decode_seconds = now(device) - decode_start
    return SettingTiming(
        prefill_s=prefill_end - start_time,
        compress_s=compress_end - prefill_end,
        ttft_s=token_end - start_time,
        step_s=decode_seconds / setting.generate,
        tokens_per_s=setting.batch * setting.generate / decode_seconds,
        peak_bytes=peak(device),
        kv_bytes_live=live_bytes,
        kv_bytes_allocated=allocated_bytes,
        kv_bytes_full=full_bytes,
    )


def _prompts(model: nn.Module, setting: Setting, seed: int) -> Tensor:
    """Return random tokens `[batch, context]`; timing does not depend on their content."""
    vocab_size = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (setting.batch, setting.context), generator=generator)


def start_peak(device: torch.device) -> None:
    """Reset the peak memory counter."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        try:
            _CLEAR.write_text("5")  # Linux: resets the peak of the process
        except OSError:
            return


def peak(device: torch.device) -> float:
    """Return the peak memory since `start_peak` in bytes; NaN if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    if not _STATUS.exists():
        return float("nan")
    for status_line in _STATUS.read_text().splitlines():
        if status_line.startswith("VmHWM:"):
            return float(status_line.split()[1]) * 1024
    return float("nan")
