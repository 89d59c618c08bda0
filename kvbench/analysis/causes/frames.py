"""Data frames of an analysis of causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvbench.analysis.causes.diagnosis import RIGHT, VERDICTS
from kvbench.analysis.causes.study import CausesResult, ExaminedSample, budget_shares, held_share
from kvbench.analysis.causes.swaps import OUTCOMES
from kvbench.analysis.causes.trials import named
from kvbench.analysis.scopes import SCOPE

CELL = [*SCOPE, "policy", "budget"]
_QUESTION = ("sample_id", "question_id", "context_id")
_PAIR = ("explained", "swapped_back", "layers", "heads")
_MAIN = ("own", "mask", "full", "give", "give random", "take", "take random")


def sample_rows(result: CausesResult) -> pd.DataFrame:
    """Return a row per sample and cell."""
    return _frame([_sample_row(sample, result.layers) for sample in result.samples])


def intervention_rows(result: CausesResult) -> pd.DataFrame:
    """Return a row per measured cache, including those that are taken from the full cache."""
    rows: list[dict[str, Any]] = []
    for sample in result.samples:
        parts = [part.trials for part in (sample.diagnosis, sample.swap) if part is not None]
        layers = result.layers[sample.cell.model]
        rows += [_labels(sample) | _located(row, layers) for trials in parts for row in trials.rows]
    for reading in result.reading:
        labels = {column: reading.where[column] for column in SCOPE}
        labels |= {
            "moment": "",
            "policy": "full",
            "budget": "full",
            "cell": "",
            "informed": False,
            **_question(reading.prompt.request),
        }
        layers = result.layers[str(reading.where["model"])]
        rows += [labels | _located(row, layers) for row in reading.trials.rows]
    return _frame(rows)


def pair_rows(result: CausesResult) -> pd.DataFrame:
    """Return a row per sample that a policy loses and the policy `against` answers."""
    rows = []
    for sample in result.samples:
        if sample.swap is not None:
            outcomes = {_right(name): outcome.right for name, outcome in sample.swap.outcomes.items()}
            layers = result.layers[sample.cell.model]
            rows.append(
                _labels(sample)
                | {"explained": sample.swap.explained, "swapped_back": sample.swap.swapped_back}
                | {"layers": named(_model_units(sample.swap.layers, layers))}
                | {"heads": named(_model_units(sample.swap.heads, layers))}
                | outcomes
            )
    if rows:
        return _frame(rows)
    return _frame([], ["cell", *CELL, "informed", *_QUESTION, *_PAIR, *map(_right, OUTCOMES)])


def _right(intervention: str) -> str:
    """Return the column that says whether the answer is right after an intervention."""
    return intervention.replace(" ", "_").replace("'", "") + "_right"


def head_rows(result: CausesResult) -> pd.DataFrame:
    """Return a row per cell, layer and KV head; the columns are in docs/analysis.md."""
    loss = _losses(result)
    frames = []
    for labels, samples in _by_cell(result.samples):
        layers = result.layers[str(labels["model"])]
        shares = np.stack([budget_shares(sample) for sample in samples])
        evidence = [held_share(sample, sample.evidence.spans).numpy() for sample in samples]
        target = np.stack([held_share(sample, sample.evidence.target_spans).numpy() for sample in samples])
        is_right = np.array([sample.verdict == RIGHT for sample in samples])[:, None, None]
        columns: dict[str, Any] = {
            "share": shares.mean(0),
            "evidence_held": _mean(evidence),
            "target_held": _mean(np.where(np.isnan(target), np.nan, target == 1)),
            "agreement": _mean(np.where(np.isnan(target), np.nan, (target == 1) == is_right)),
            **_gains(samples, shares.shape[1:]),
            "loss": loss.get(tuple(labels[column] for column in SCOPE[:3]), np.full(shares.shape[1:], np.nan)),
        }
        layer_index, head = np.indices(shares.shape[1:])
        frames.append(
            pd.DataFrame(
                {
                    **{column: labels[column] for column in CELL},
                    "informed": samples[0].cell.policy.is_informed,
                    "layer": np.array(layers)[layer_index.ravel()],
                    "kv_head": head.ravel(),
                    "samples": len(samples),
                    **{name: values.ravel() for name, values in columns.items()},
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def _gains(samples: Sequence[ExaminedSample], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return, by head: the mean gain where it was given alone, how often it was, how often it was sufficient, and how
    often it is in the smallest set.
    """
    total, tried, sufficient, needed = (np.zeros(shape) for _ in range(4))
    for sample in samples:
        if sample.diagnosis is None:
            continue
        for row in sample.diagnosis.trials.rows:
            if row["intervention"] == "give heads" and len(row["units"]) == 1:
                (place,) = row["units"]
                total[place] += row["gain"]
                tried[place] += 1
                sufficient[place] += row["right"]
        for unit in sample.diagnosis.heads:
            needed[unit] += 1
    with np.errstate(invalid="ignore"):
        return {"gain": total / np.where(tried, tried, np.nan), "tried": tried, "sufficient": sufficient,
                "needed": needed}  # fmt: skip


def layer_gains(samples: Sequence[ExaminedSample], shape: tuple[int, ...]) -> Any:
    """Return the mean gain of every layer that was given alone, repeated for its heads, `[L, H]`."""
    total, tried = np.zeros(shape[0]), np.zeros(shape[0])
    for sample in samples:
        for row in sample.diagnosis.trials.rows if sample.diagnosis is not None else []:
            if row["intervention"] == "give layers" and len(row["units"]) == 1:
                ((layer,),) = row["units"]
                total[layer] += row["gain"]
                tried[layer] += 1
    return np.repeat((total / np.maximum(tried, 1))[:, None], shape[1], 1)


def _losses(result: CausesResult) -> dict[tuple[Any, ...], Any]:
    """Return what the full cache loses without the evidence in each head, `[L, H]`, by model, task and length."""
    collected: dict[tuple[Any, ...], list[Any]] = {}
    for reading in result.reading:
        kept = reading.trials.probe.cache.ragged
        loss = np.full((len(kept), kept[0].heads), np.nan)
        for row in reading.trials.rows:
            (unit,) = row["units"]
            if len(unit) == 2:
                loss[unit] = -row["gain"]
        collected.setdefault(tuple(reading.where[column] for column in SCOPE[:3]), []).append(loss)
    return {place: _mean(maps) for place, maps in collected.items()}


def _mean(maps: Any) -> Any:
    """Return the mean of maps without their NaN, `[L, H]`; NaN where all are."""
    stacked = np.stack(maps)
    counts = np.isfinite(stacked).sum(0)
    return np.where(counts, np.nansum(stacked, 0) / np.maximum(counts, 1), np.nan)


def _by_cell(samples: Sequence[ExaminedSample]) -> list[tuple[Mapping[str, Any], list[ExaminedSample]]]:
    """Group samples by cell, in order."""
    groups: dict[str, list[ExaminedSample]] = {}
    for sample in samples:
        groups.setdefault(sample.cell.cell, []).append(sample)
    return [(group[0].cell.labels, group) for group in groups.values()]


def _sample_row(sample: ExaminedSample, layers: Mapping[str, list[int]]) -> dict[str, Any]:
    """Return the row of one sample."""
    diagnosis, model_layers = sample.diagnosis, layers[sample.cell.model]
    row = _labels(sample) | {
        "verdict": sample.verdict,
        "full_score": sample.full.score,
        "score": sample.own.score,
        "context_tokens": sample.columns,
        "step": sample.step,
        "source": sample.evidence.source,
        "evidence": " ".join(f"{start}-{stop}" for start, stop in sample.evidence.spans),
    }
    evidence, target = (held_share(sample, spans) for spans in (sample.evidence.spans, sample.evidence.target_spans))
    whole = float((target == 1).sum()) if sample.evidence.target_spans else float("nan")
    held = [float(evidence.mean()), float(target.mean()), float(target.max()), whole]
    row |= dict(zip(("evidence_held", "target_held", "best_head", "whole_heads"), held, strict=True))
    outcomes = diagnosis.outcomes if diagnosis is not None else {}
    for name in _MAIN:
        column = name.replace(" ", "_")
        outcome = outcomes.get(name)
        row[f"{column}_right"] = None if outcome is None else outcome.right
        row[f"{column}_same"] = None if outcome is None else outcome.same
        row[f"{column}_nll"] = float("nan") if outcome is None else outcome.nll
        row[f"{column}_margin"] = float("nan") if outcome is None else outcome.margin
    units = {"layers": (), "heads": ()} if diagnosis is None else {"layers": diagnosis.layers, "heads": diagnosis.heads}
    for name, found in units.items():
        row[name] = named(_model_units(found, model_layers))
        row[f"n_{name}"] = len(found)
    row["anchors"] = ", ".join(diagnosis.anchors) if diagnosis is not None else ""
    return row | {"caches": sample.cells, "seconds": sample.seconds}


def _model_units(units: Sequence[tuple[int, ...]], layers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return units with the model's own index of their layer."""
    return [(layers[unit[0]], *unit[1:]) for unit in units]


def _located(row: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Return the row of an intervention, with layer and head if it concerns only one."""
    units = _model_units(row["units"], layers)
    single = units[0] if len(units) == 1 else ()
    place = {"layer": single[0] if single else -1, "kv_head": single[1] if len(single) == 2 else -1}
    return {"intervention": row["intervention"], **place, **row, "units": named(units)}


def _labels(sample: ExaminedSample) -> dict[str, Any]:
    cell = sample.cell
    labels = {column: cell.labels[column] for column in CELL}
    return {"cell": cell.cell, **labels, "informed": cell.policy.is_informed, **_question(sample.prompt.request)}


def _question(request: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in _QUESTION}


def _frame(rows: Sequence[Mapping[str, Any]], columns: list[str] | None = None) -> pd.DataFrame:
    """Return rows as a frame; columns of truth values may lack some."""
    frame = pd.DataFrame(list(rows), columns=columns)
    for column in frame.columns:
        if column.endswith(("_right", "_same")):
            frame[column] = frame[column].astype("boolean")
    return frame


def verdict_order(frame: pd.DataFrame) -> list[str]:
    """Return the verdicts that occur, in the order of `VERDICTS`."""
    occurring = set(frame["verdict"])
    return [verdict for verdict in VERDICTS if verdict in occurring]
