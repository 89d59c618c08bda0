"""Frames of a made-up run, in the schema of `cells.parquet` and `samples.parquet`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvbench.runs.schema import METRICS_SCHEMA, SCHEMA_VERSION, ScoredCell
from kvbench.runs.store import RunStore
from kvbench.stats import discriminative, paired, summary

Frames = tuple[pd.DataFrame, pd.DataFrame]
STRENGTH = {
    "random": 0.1,
    "streaming_llm": 0.3,
    "snapkv": 0.75,
    "adakv": 0.85,
    "criticalkv": 0.93,
    "keydiff": 0.6,
}
_SAMPLES = (
    "cell task policy budget moment sample_id context_id response stop error extra prompt_end metrics "
    "target schema "
    "length doc_id question_id repeat context_tokens question_tokens generated_tokens score "
    "budget_entries held_entries kv_bytes_live kv_bytes_read visual_tokens held_visual state_bytes"
).split()
_FIDELITY = "kl kl_first kl_middle kl_last agreement nll_diff first_difference fidelity_tokens".split()
FULL_BYTES = 2_097_152.0


def reading_few(cells: pd.DataFrame, policy: str) -> pd.DataFrame:
    """Cells in which a policy holds everything, and 5% more, and reads what it held before."""
    few = cells["policy"] == policy
    return cells.assign(kv_bytes_live=cells["kv_bytes_live"].where(~few, 1.05 * cells["kv_bytes_full"]))


def make_run(
    policies: Sequence[str] = ("snapkv", "criticalkv"),
    budgets: Sequence[str] = ("0.1", "0.2", "0.4"),
    tasks: Sequence[str] = ("vt", "cwe"),
    *,
    model: str = "reference",
    group: str = "ruler",
    lengths: Sequence[int] = (1024,),
    moments: Sequence[str] = ("context",),
    samples: int = 50,
    depths: Sequence[int] = (),
    chance: float = 0.0,
    full_level: float = 0.97,
    with_full: bool = True,
    failed: Sequence[tuple[str, str, str]] = (),
    error: str = "RuntimeError: out of memory",
) -> Frames:
    """A run whose policies lose less at larger budgets; pairs share how hard a question is."""
    cells: list[dict[str, object]] = []
    rows: list[dict[str, object]] = []
    for length in lengths:
        for t, task in enumerate(tasks):
            rng = np.random.default_rng([t, length])
            hard = rng.random(samples)
            full_scores: dict[tuple[str, int, int], float] = {}
            full_mean = np.nan
            grid = [("full", "full", "")] if with_full else []
            grid += [(p, b, m) for m in moments for p in policies for b in budgets]
            for policy, budget, moment in grid:
                level = full_level
                kept = 1.0 if policy == "full" else float(budget.removeprefix("visual:"))
                if policy != "full":
                    base = STRENGTH.get(policy.split(":")[0], 0.5)
                    base = base ** (0.35 if moment == "question" else 1)
                    level *= base ** (0.1 / kept) * (1 - 0.3 * (t % 3) / 2 * (1 - base))
                scores = (hard < level).astype(float)
                key = f"{model}/{task}/{length}/{policy}/{budget}/{moment}"
                cell = hashlib.sha256(key.encode()).hexdigest()[:16]
                keys, clusters = [], []
                for i in range(samples):
                    depth = f"-d{depths[i % len(depths)]:03d}" if depths else ""
                    keys.append((f"{task}-{length}-0-{i}{depth}", 0, 0))
                    clusters.append(f"{task}-{length}-{i // 2 if task == 'qa_1' else i}")
                share = 1.0 if policy == "full" else kept + 0.004
                by_key = dict(zip(keys, scores.tolist(), strict=True))
                estimate = summary(scores, clusters)
                if policy == "full":
                    full_scores, full_mean, full_lo = by_key, estimate.mean, estimate.lo
                gap = paired(by_key, full_scores, dict(zip(keys, clusters, strict=True)))
                bad = (policy, budget, task) in failed

                def extra(i: int) -> str:
                    return json.dumps({"depth": depths[i % len(depths)]} if depths else {})

                numbers = {
                    "score": estimate.mean,
                    "score_se": estimate.se,
                    "score_lo": estimate.lo,
                    "score_hi": estimate.hi,
                    "full_score": full_mean,
                    "diff": 0.0 if policy == "full" else gap.mean,
                    "diff_lo": 0.0 if policy == "full" else gap.lo,
                    "diff_hi": 0.0 if policy == "full" else gap.hi,
                    "budget_entries": share * length * 4,
                    "held_entries": share * length * 4,
                    "kv_bytes_live": share * FULL_BYTES * length / 1024,
                    "kv_bytes_read": share * FULL_BYTES * length / 1024,
                    "kv_bytes_allocated": share * FULL_BYTES * length / 1024,
                    "kv_bytes_full": FULL_BYTES * length / 1024,
                    "visual_tokens": 0.0,
                    "held_visual": 0.0,
                    "state_bytes": 0.0,
                    "prefill_s": 0.01,
                    "compress_s": 0.001,
                    "decode_s": 0.02,
                    **dict.fromkeys(_FIDELITY, np.nan),
                }
                telling = with_full and discriminative(full_lo, 0.99 if task == "qa_1" else chance)
                cells.append(
                    {"cell": cell, "match": cell[::-1], "model": model, "model_revision": "",
                     "task": task, "group": group, "policy": policy, "budget": budget,
                     "moment": moment, "metric": "string_match", "status": "error" if bad else "ok",
                     "error": error if bad else "", "task_version": "1", "data_hash": "ab" * 8,
                     "dtype": "float32", "device": "cpu", "attention": "auto",
                     "versions": json.dumps({"kvbench": "0.1.0", "torch": "2.13.0"}),
                     "schema": SCHEMA_VERSION, "length": length, "samples": samples, "seed": 0,
                     "higher_is_better": True, "is_mean": True, "discriminative": telling and not bad,
                     "informed": policy == "oracle"}
                    | {k: np.nan if bad else v for k, v in numbers.items()}
                )  # fmt: skip
                rows += [
                    {"cell": cell, "task": task, "policy": policy, "budget": budget,
                     "moment": moment, "sample_id": k[0], "context_id": c, "response": "x",
                     "stop": "eos", "error": "", "extra": extra(i), "target": ["x"], "schema": SCHEMA_VERSION,
                     "prompt_end": f"What is {i}?", "metrics": "", "length": length,
                     "doc_id": i, "question_id": 0, "repeat": 0, "context_tokens": length - 40,
                     "question_tokens": 20, "generated_tokens": 8, "score": s,
                     "budget_entries": round(share * 4 * (length - 40)),
                     "held_entries": round(share * 4 * (length - 40)), "kv_bytes_live": 1000,
                     "kv_bytes_read": 1000,
                     "visual_tokens": 0, "held_visual": 0, "state_bytes": 0}
                    for i, (k, c, s) in enumerate(zip(keys, clusters, scores, strict=True))
                    if not bad
                ]  # fmt: skip
    frame = pd.DataFrame(cells).astype({"schema": "int32", "length": "int32", "samples": "int32"})
    return frame, pd.DataFrame(rows, columns=[*_SAMPLES, *_FIDELITY])


@pytest.fixture(scope="session")
def run_frames() -> Callable[..., Frames]:
    """The function that makes the frames of a run."""
    return make_run


def unaveraged(frames: Frames, task: str) -> Frames:
    """The run with a task whose score is no mean: a perplexity of 3 at full and 5 otherwise."""
    cells, samples = frames[0].copy(), frames[1].copy()
    here = cells["task"] == task
    score = np.where(cells["policy"] == "full", 3.0, 5.0)[here]
    numbers = {"score": score, "full_score": 3.0, "diff": score - 3, "higher_is_better": False, "is_mean": False}
    ends = {f"{name}_lo": numbers[name] - 1 for name in ("score", "diff")}
    ends |= {f"{name}_hi": numbers[name] + 2 for name in ("score", "diff")}
    for name, values in (numbers | ends).items():
        cells.loc[here, name] = values
    samples.loc[samples["task"] == task, "score"] = np.nan
    return cells, samples


def save_two_metrics(frames: Frames, folder: Path) -> Path:
    """Write the run with the further metric `missed`, 1 minus the score, of which less is better."""
    cells, samples = frames
    both = samples.assign(metrics=[json.dumps({"string_match": s, "missed": 1 - s}) for s in samples["score"]])
    ends = {"score_lo": "score_hi", "score_hi": "score_lo", "diff_lo": "diff_hi", "diff_hi": "diff_lo"}
    scored = []
    for cell in cells.to_dict("records"):
        missed = {"metric": "missed", "higher_is_better": False}
        missed |= {name: 1 - cell[ends.get(name, name)] for name in ("score", "score_lo", "score_hi", "full_score")}
        missed |= {name: -cell[ends.get(name, name)] for name in ("diff", "diff_lo", "diff_hi")}
        rows = [{**cell, "filter": "", **change} for change in ({}, missed)]
        metric_rows = [{name: row[name] for name in METRICS_SCHEMA.names} for row in rows]
        scored.append(ScoredCell(cell, metric_rows, both[both["cell"] == cell["cell"]].to_dict("list")))
    with RunStore(folder) as store:
        store.save_grid({})
        store.write_scored(scored, {})
    return folder
