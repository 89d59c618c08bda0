"""Timing of one setting: prefill, compression, decode steps and evictions on a batch of random prompts."""

from __future__ import annotations

import ctypes
import gc
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from kvbench.analysis.speed.capacity import largest_batch
from kvbench.analysis.speed.settings import LARGEST, Setting, SpeedSettings
from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import engine, forward
from kvbench.engine.evict import record_peaks
from kvbench.engine.eviction_state import tail_of
from kvbench.engine.loading import load_config, load_model, pick_device, pick_dtype
from kvbench.engine.models import devices_of
from kvbench.engine.prefix import Compression, Prefix
from kvbench.engine.threads import now, thread_budget
from kvbench.errors import PluginError, UserError, out_of_memory, plugin_call, reason_of
from kvbench.moments import LATER
from kvbench.progress import Reporter
from kvbench.runs.chunks import feed_chunks
from kvbench.runs.planning import quiet_libraries
from kvbench.tables.numbers import size

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class SettingTiming:
    """Measurements of one setting in one repetition.

    Attributes:
        prefill_s: Seconds of the prefill, including the policy's observations.
        compress_s: Seconds of the compression; of a chunked prefill, of all its eviction steps.
        ttft_s: Seconds to the first token: prefill, compression and token selection.
        decode_s: Seconds of all decode steps, including the eviction steps among them.
        evict_s: Seconds of the eviction steps while decoding.
        step_s: Mean seconds per decode step.
        tokens_per_s: Tokens of all sequences per second while decoding.
        total_s: Seconds of prompt and answer together.
        prompt_share: Fraction of `total_s` before the first token.
        total_tokens_per_s: Generated tokens of all sequences per second of `total_s`.
        peak_bytes: Peak memory of the GPUs or the process; NaN if unknown.
        kv_bytes_live: Bytes of the held entries after the compression.
        kv_bytes_allocated: Bytes allocated for them, with room for the answer.
        kv_bytes_full: Bytes of the full cache at the same time.
        kv_bytes_peak: Most bytes of held entries at the end of a decode step.
        error: Why there are no measurements, or "".
    """

    prefill_s: float = float("nan")
    compress_s: float = float("nan")
    ttft_s: float = float("nan")
    decode_s: float = float("nan")
    evict_s: float = float("nan")
    step_s: float = float("nan")
    tokens_per_s: float = float("nan")
    total_s: float = float("nan")
    prompt_share: float = float("nan")
    total_tokens_per_s: float = float("nan")
    peak_bytes: float = float("nan")
    kv_bytes_live: float = float("nan")
    kv_bytes_allocated: float = float("nan")
    kv_bytes_full: float = float("nan")
    kv_bytes_peak: float = float("nan")
    error: str = ""


def run_bench(bench: SpeedSettings, reporter: Reporter) -> pd.DataFrame:
    """Measure all settings of all models; see `_measure_model`.

    Returns:
        A row per model, setting and repeat, in the order of the settings: the setting, `repeat` and the fields of
            `SettingTiming`.

    Raises:
        UserError: A model cannot be loaded, a prompt does not fit into it, or a memory limit is missing.
    """
    quiet_libraries()
    if not bench.models:
        raise UserError("--model names nothing; use a named model, folder, GGUF file or hub id")
    frames = [_measure_model(replace(bench, model=name), reporter) for name in bench.models]
    return pd.concat(frames, ignore_index=True)


def _measure_model(bench: SpeedSettings, reporter: Reporter) -> pd.DataFrame:
    """Measure all settings of one model `repeats` times, in a new order each time.

    Compared settings are measured within minutes of each other, so that a machine that slows down affects all of them.
    """
    settings = bench.settings()
    if bench.device_map is not None and bench.device != "auto":
        raise UserError("--device and --device-map exclude each other; give only one")
    config = load_config(bench.model, bench.revision).get_text_config()
    window = int(getattr(config, "max_position_embeddings", 0) or 0)
    longest = max(candidate.context + candidate.generate for candidate in settings)
    if window and longest > window:
        raise UserError(
            f"{longest} tokens do not fit into the {window} of model {bench.model}; use a smaller "
            "--context or --generate"
        )
    device = pick_device(bench.device, bench.device_map)
    if bench.memory is None and device.type != "cuda" and any(setting.batch is None for setting in settings):
        raise UserError(f"--batch {LARGEST} needs a memory limit on this device, such as --memory 4GB")
    dtype = pick_dtype(bench.dtype, device)
    model = load_model(bench.model, bench.revision, device, dtype, attn=bench.attn, device_map=bench.device_map)
    return measure_model(model, bench, reporter)


def measure_model(model: nn.Module, bench: SpeedSettings, reporter: Reporter) -> pd.DataFrame:
    """Measure all settings on a model that is loaded already; see `run_bench`.

    Args:
        model: The model on its device, in its dtype.
        bench: Benchmark settings; `model` is a name for the table.
        reporter: Progress reporter.
    """
    settings, devices = bench.settings(), devices_of(model)
    measured_rows: list[dict[str, Any]] = []
    with torch.no_grad(), thread_budget(model, reporter.message), engine(model):
        for setting in _warm_up_settings(settings):  # the first forward pass of a size is slower
            _measure_or_error(model, setting, bench.seed)
        limit = _memory_limit(devices) if bench.memory is None else float(bench.memory)
        batches = [setting.batch or _largest_batch(model, setting, bench.seed, limit, reporter) for setting in settings]
        reporter.start(len(settings) * bench.repeats, bench.model)
        for repeat in range(bench.repeats):
            shuffled = list(enumerate(settings))
            random.Random(f"{bench.seed}-{repeat}").shuffle(shuffled)
            for setting_index, setting in shuffled:
                batch = batches[setting_index]
                measured = (
                    _measure_or_error(model, replace(setting, batch=batch), bench.seed + repeat)
                    if batch
                    else SettingTiming(error=f"not even a batch of 1 fits into {size(limit)}")
                )
                measured_rows.append(
                    {
                        "place": setting_index,
                        **_setting_columns(setting),
                        "batch": batch,
                        "repeat": repeat,
                        **asdict(measured),
                    }
                )
                reporter.advance()
        reporter.stop()
    is_gpu = devices[0].type == "cuda"
    frame = pd.DataFrame(measured_rows).sort_values(["place", "repeat"], ignore_index=True)
    frame = frame.drop(columns="place")
    return frame.assign(
        model=bench.model,
        device=", ".join(dict.fromkeys(map(torch.cuda.get_device_name, devices))) if is_gpu else "cpu",
        device_count=len(devices),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
    )


def _memory_limit(devices: Sequence[torch.device]) -> float:
    """Return the memory of the GPUs in bytes; infinity on a CPU, where a limit must be given."""
    if devices[0].type != "cuda":
        return float("inf")
    return float(sum(torch.cuda.get_device_properties(device).total_memory for device in devices))


def _largest_batch(model: nn.Module, setting: Setting, seed: int, limit: float, reporter: Reporter) -> int:
    """Return the largest batch that decodes to the end within the limit; 0 if not even one sequence does."""

    def peak_of(batch: int) -> float:
        measured = _measure_or_error(model, replace(setting, batch=batch), seed)
        peak_bytes = float("inf") if measured.error else measured.peak_bytes
        if math.isnan(peak_bytes):
            raise UserError(f"the peak memory of a process cannot be measured here, so --batch {LARGEST} needs a GPU")
        fit = "out of memory" if math.isinf(peak_bytes) else f"a peak of {size(peak_bytes)}"
        reporter.message(f"{setting.name}: {fit} with {batch}")
        return peak_bytes

    return largest_batch(peak_of, limit)


def _warm_up_settings(settings: list[Setting]) -> Iterator[Setting]:
    """Yield the first setting of every size and every policy."""
    seen: set[object] = set()
    for setting in settings:
        if {setting.size, setting.policy} - seen:
            seen |= {setting.size, setting.policy}
            yield replace(setting, batch=setting.batch or 1)


def _setting_columns(setting: Setting) -> dict[str, Any]:
    return {
        "policy": str(setting.policy),
        "budget": setting.budget_name or str(setting.budget),
        "moment": str(setting.timing),
        "context": setting.context,
        "batch_setting": LARGEST if setting.batch is None else str(setting.batch),
        "generate": setting.generate,
        "chunk": setting.timing.chunk,
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
        setting: The setting to measure, with its batch size.
        seed: Seed of prompts and noise.
    """
    devices = devices_of(model)
    device = next(model.parameters()).device
    token_ids = _prompts(model, setting, seed).to(device)
    gc.collect()
    start_peak(devices)
    start_time = now(device)
    cache, logits, compress_s = _prefill(model, setting, token_ids, seed)
    prefill_end = now(device)
    next_token = logits.argmax(-1, keepdim=True).to(device)
    ttft_s = now(device) - start_time
    live_bytes, allocated_bytes = cache.live_bytes(), cache.allocated_bytes()
    full_bytes = sum(cache.full_bytes(sequence) for sequence in range(len(token_ids)))
    decode_start = now(device)
    for _ in range(setting.generate):
        next_token = forward(model, cache, next_token).argmax(-1, keepdim=True).to(device)
    decode_s = now(device) - decode_start
    eviction_state = cache.eviction_state
    if eviction_state is not None:
        record_peaks(cache, range(cache.batch))
    token_count = len(token_ids) * setting.generate
    return SettingTiming(
        prefill_s=prefill_end - start_time - compress_s,
        compress_s=compress_s,
        ttft_s=ttft_s,
        decode_s=decode_s,
        evict_s=0.0 if eviction_state is None else eviction_state.seconds,
        step_s=decode_s / setting.generate,
        tokens_per_s=token_count / decode_s,
        total_s=ttft_s + decode_s,
        prompt_share=ttft_s / (ttft_s + decode_s),
        total_tokens_per_s=token_count / (ttft_s + decode_s),
        peak_bytes=peak(devices),
        kv_bytes_live=live_bytes,
        kv_bytes_allocated=allocated_bytes,
        kv_bytes_full=full_bytes,
        kv_bytes_peak=cache.live_bytes() if eviction_state is None else sum(eviction_state.live),
    )


def _prefill(model: nn.Module, setting: Setting, token_ids: Tensor, seed: int) -> tuple[RaggedCache, Tensor, float]:
    """Prefill and compress as `kvbench run` does; the full cache of a chunked prefill takes the same chunks.

    Returns:
        The cache, the logits after the prompt, and the seconds of all eviction steps.
    """
    policy, moment, chunk_size = setting.policy, setting.timing.moment, setting.timing.chunk
    length = token_ids.shape[1]
    prefix = Prefix(model, policy.needs)
    if not chunk_size or policy.is_full:
        for chunk in token_ids.split(chunk_size or length, 1):
            logits = prefix.extend(chunk)
        # At `decode` the segments grow with the cache, which stays near its budget.
        reserved_rows = None if moment in LATER and policy.evicts else setting.generate
        (cache,) = prefix.compress([Compression(policy, setting.budget, moment, seed)], reserved_rows)
        return cache, logits, cache.seconds
    trailing_tokens = tail_of(policy, setting.budget, length)
    logits = prefix.extend(token_ids[:, : min(chunk_size, length - trailing_tokens)])
    (cache,) = prefix.compress([Compression(policy, setting.budget, moment, seed, length, trailing_tokens)])
    del prefix  # the full K/V of the first chunk
    for chunk_logits in feed_chunks(model, token_ids, cache, chunk_size, trailing_tokens):
        logits = chunk_logits
    compress_s = cache.seconds + (0.0 if cache.eviction_state is None else cache.eviction_state.seconds)
    cache.detach_state()  # nothing is evicted while the answer is generated
    return cache, logits, compress_s


def _prompts(model: nn.Module, setting: Setting, seed: int) -> Tensor:
    """Return random tokens `[batch, context]`; timing does not depend on their content."""
    vocab_size = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (setting.batch or 1, setting.context), generator=generator)


def start_peak(devices: Sequence[torch.device]) -> None:
    """Reset the peak memory counters."""
    if devices[0].type == "cuda":
        torch.cuda.empty_cache()
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        # The C library keeps memory that earlier trials have freed; glibc can return it.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        try:
            _CLEAR.write_text("5")  # Linux: resets the peak of the process
        except OSError:
            return


def peak(devices: Sequence[torch.device]) -> float:
    """Return the peak memory since `start_peak` in bytes, of all GPUs together; NaN if unknown."""
    if devices[0].type == "cuda":
        return float(sum(map(torch.cuda.max_memory_allocated, devices)))
    if not _STATUS.exists():
        return float("nan")
    for status_line in _STATUS.read_text().splitlines():
        if status_line.startswith("VmHWM:"):
            return float(status_line.split()[1]) * 1024
    return float("nan")
