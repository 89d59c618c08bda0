"""Tables of a retention analysis, as data frames and for display."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvbench.analysis.retention.survival import RetentionResult, RetentionText, TaskRetention
from kvbench.analysis.scopes import scope_heading
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.table import Column, Name, Phrase, Table, TableCell, TableRow, beside
from kvbench.tables.text import counted

Title: TypeAlias = tuple[Phrase, ...]

_MOST_LAYERS = 12
"""For models with more layers, only the least and most sparse ones are shown."""

EXTREMES = 10
"""Tokens in the tables of most and least retained tokens, as in the paper's figure 5b."""

READING = {
    "evictions": "Every policy sees the same text: context, question and what the model writes with the full cache.",
    "sparsity": "Sparsity: 1 - 2/(T(T+1)) times the sum of a KV head's retention matrix. Its gates "
    "are read in one pass with the full cache. At 0, nothing fades.",
    "tokens": "Retained tokens: mean beta over layers, KV heads and occurrences. Half-life: tokens "
    "until half is left, from the mean of log beta.",
    "survival": "Survival with the full cache: share of tokens that a query at least L positions "
    "later selects, of those with L positions behind them; mean over layers and query heads. Top "
    "K: a query selects the K largest logits. Mass P: it selects the smallest set with that share "
    "of its attention.",
}
"""Explanation of each table, by name."""


def frames(result: RetentionResult) -> dict[str, pd.DataFrame]:
    """Return all non-empty tables by name (columns: docs/analysis.md)."""
    makers: dict[str, Callable[[TaskRetention], Iterator[pd.DataFrame]]] = {
        "sparsity": _sparsity,
        "tokens": _tokens,
        "survival": _survival,
        "retention": lambda task: _per_text(task, _retention),
        "evictions": lambda task: _per_text(task, _evictions),
        "entries": lambda task: _per_text(task, _entries),
        "positions": lambda task: _per_text(task, _positions),
    }
    frames_by_name = {}
    for table_name, make_frames in makers.items():
        task_frames = [task_frame for task in result.tasks for task_frame in make_frames(task) if len(task_frame)]
        if task_frames:
            frames_by_name[table_name] = pd.concat(task_frames, ignore_index=True)
    return frames_by_name


def _sparsity(task: TaskRetention) -> Iterator[pd.DataFrame]:
    for policy, total in task.sparsity.items():
        head_columns = _heads(task, total.shape[1])
        yield pd.DataFrame(
            {
                **task.where,
                "policy": policy,
                **head_columns,
                "sparsity": (total / task.count).flatten().numpy(),
                "texts": task.count,
            }
        )


def _tokens(task: TaskRetention) -> Iterator[pd.DataFrame]:
    for policy, token_sums in task.tokens.items():
        token_rows = pd.DataFrame(token_sums.rows())
        token_rows.insert(1, "token", [task.token_labels[token_id] for token_id in token_rows["token_id"]])
        token_rows = token_rows.assign(**task.where, policy=policy)
        yield token_rows[
            [
                *task.where,
                "policy",
                *(column for column in token_rows if column not in (*task.where, "policy")),
            ]
        ]


def _survival(task: TaskRetention) -> Iterator[pd.DataFrame]:
    alive_counts = task.survival.alive
    assert alive_counts is not None
    labels = {label: setting for label, setting in task.where.items() if label != "moment"}
    _, layer_count, heads, horizon_count = alive_counts.shape
    for (name, value), counts_by_head in zip(task.criteria, alive_counts, strict=True):
        yield pd.DataFrame(
            {
                **labels,
                "criterion": name,
                "value": value,
                "layer": np.repeat(np.array(task.layers, np.int32), heads * horizon_count),
                "head": np.tile(np.repeat(np.arange(heads, dtype=np.int32), horizon_count), layer_count),
                "horizon": np.tile(np.array(task.survival.horizons, np.int32), layer_count * heads),
                "alive": counts_by_head.flatten().numpy(),
                "tokens": np.tile(np.array(task.survival.tokens), layer_count * heads),
            }
        )


def _per_text(task: TaskRetention, make_columns: Any) -> Iterator[pd.DataFrame]:
    for sample in task.samples:
        for columns in make_columns(task, sample):
            yield pd.DataFrame({**task.where, "sample_id": sample.sample_id, **columns})


def _retention(task: TaskRetention, sample: RetentionText) -> Iterator[dict[str, Any]]:
    for policy, log_beta in sample.log_beta.items():
        yield {
            "policy": policy,
            **_by_entry(task, log_beta),
            "log_beta": log_beta.flatten().numpy(),
        }


def _evictions(task: TaskRetention, sample: RetentionText) -> Iterator[dict[str, Any]]:
    for (policy, budget), trace in sample.traces.items():
        eviction_steps = trace.eviction_steps.flatten().numpy()
        yield {
            "policy": policy,
            "budget": budget,
            **_by_entry(task, trace.eviction_steps),
            "evicted": pd.arrays.IntegerArray(eviction_steps, eviction_steps == len(sample.token_ids)),
        }


def _entries(task: TaskRetention, sample: RetentionText) -> Iterator[dict[str, Any]]:
    for (policy, budget), trace in sample.traces.items():
        columns = _by_entry(task, trace.eviction_steps)
        columns["step"] = columns.pop("position")
        entry_counts = trace.entries.flatten().numpy().astype(np.int32)
        yield {"policy": policy, "budget": budget, **columns, "entries": entry_counts}


def _positions(task: TaskRetention, sample: RetentionText) -> Iterator[dict[str, Any]]:
    for (policy, budget), trace in sample.traces.items():
        log_beta = sample.log_beta.get(policy)
        mean_beta = math.nan if log_beta is None else log_beta.double().exp().mean((0, 1)).numpy()
        yield {
            "policy": policy,
            "budget": budget,
            "position": np.arange(len(sample.token_ids), dtype=np.int32),
            "part": [sample.part(position) for position in range(len(sample.token_ids))],
            "token_id": sample.token_ids,
            "token": [task.token_labels[position] for position in sample.token_ids],
            "beta": mean_beta,
            "heads_holding": trace.held.sum((0, 1)).numpy().astype(np.int32),
        }


def _heads(task: TaskRetention, heads: int) -> dict[str, Any]:
    layers = np.array(task.layers, np.int32)
    return {
        "layer": np.repeat(layers, heads),
        "kv_head": np.tile(np.arange(heads, dtype=np.int32), len(layers)),
    }


def _by_entry(task: TaskRetention, entry_values: Tensor) -> dict[str, Any]:
    """Return layer, KV head and position of the values of a tensor `[L, H, T]`."""
    layer_count, heads, length = entry_values.shape
    columns = {column: np.repeat(head_row, length) for column, head_row in _heads(task, heads).items()}
    return {**columns, "position": np.tile(np.arange(length, dtype=np.int32), layer_count * heads)}


# --- display --------------------------------------------------------------------------------------


def retention_tables(result: RetentionResult) -> Iterator[Table]:
    """Yield the tables for the terminal, the summary and the page."""
    for task in result.tasks:
        title = scope_heading(task.where)
        if task.sparsity:
            yield _sparsity_table(task, title)
        for policy, token_sums in task.tokens.items():
            yield _tokens_table(task, policy, token_sums.rows(), title)
        yield _survival_table(task, title)
        for sample in task.samples:
            if sample.traces:
                yield _held_table(sample, title)


def _sparsity_table(task: TaskRetention, title: Title) -> Table:
    shows_all = len(task.layers) <= _MOST_LAYERS
    titles = [f"layer {layer}" for layer in task.layers] if shows_all else ["least layer", "most layer"]
    share_titles = ("mean", "least KV head", "most KV head", *titles)
    columns = [Column("policy"), *(Column(title, NumberFormat.PERCENT) for title in share_titles)]
    table_rows = []
    for policy, total in task.sparsity.items():
        sparsities = total / task.count
        by_layer = sparsities.mean(1)
        selected = by_layer if shows_all else torch.stack([by_layer.min(), by_layer.max()])
        numbers = torch.stack([sparsities.mean(), sparsities.min(), sparsities.max(), *selected]).tolist()
        table_rows.append(TableRow((Name(policy), *numbers)))
    subtitle = f": sparsity, mean over {counted(task.count, 'text')}"
    return Table((*title, subtitle), tuple(columns), tuple(table_rows))


def _tokens_table(task: TaskRetention, policy: str, token_rows: list[dict[str, Any]], title: Title) -> Table:
    columns: list[tuple[Column, list[TableCell]]] = []
    for group, extremes in (
        ("most", token_rows[:EXTREMES]),
        ("least", token_rows[::-1][:EXTREMES]),
    ):
        columns += [
            (
                Column("token", group=group),
                [Name(task.token_labels[token_row["token_id"]]) for token_row in extremes],
            ),
            (
                Column("times", NumberFormat.COUNT, group),
                [token_row["count"] for token_row in extremes],
            ),
            (
                Column("mean beta", NumberFormat.NUMBER, group),
                [token_row["beta"] for token_row in extremes],
            ),
            (
                Column("half-life", NumberFormat.NUMBER, group),
                [token_row["half_life"] for token_row in extremes],
            ),
        ]
    return beside((*title, ": tokens that ", Name(policy), " retains most and least"), columns)


def _survival_table(task: TaskRetention, title: Title) -> Table:
    horizons, shares = task.survival.horizons, task.survival.shares().mean((1, 2)).tolist()
    column_indices = sorted({horizons.index(horizon) for horizon in _spread_horizons(horizons)})
    columns = [Column("in use")]
    columns += [Column(f"L = {horizons[index]}", NumberFormat.PERCENT) for index in column_indices]
    table_rows = [
        TableRow((criterion(name, value), *(share[index] for index in column_indices)))
        for (name, value), share in zip(task.criteria, shares, strict=True)
    ]
    subtitle = f": survival with the full cache, {counted(task.count, 'text')}"
    return Table((*title, subtitle), tuple(columns), tuple(table_rows))


def _held_table(sample: RetentionText, title: Title) -> Table:
    count_titles = ("entries", "mean at end", "least KV head", "most KV head", "cuts")
    columns = [Column("policy"), Column("budget")]
    columns += [Column(heading, NumberFormat.COUNT) for heading in count_titles]
    table_rows = []
    for (policy, budget), trace in sample.traces.items():
        final_entries = trace.entries[..., -1].double()
        entry_numbers = torch.stack([final_entries.mean(), final_entries.min(), final_entries.max()]).tolist()
        table_rows.append(TableRow((Name(policy), Name(budget), trace.budget, *entry_numbers, trace.eviction_count)))
    subtitle = f": entries per KV head, {len(sample.token_ids)} tokens of sample "
    return Table((*title, subtitle, Name(sample.sample_id)), tuple(columns), tuple(table_rows))


def criterion(name: str, value: float) -> str:
    """Format a survival criterion."""
    return f"{name} {value:g}"


def _spread_horizons(horizons: list[int]) -> list[int]:
    """Select six horizons: 0, 1, the last, and three evenly spaced in between."""
    last_index = len(horizons) - 1
    return [
        horizons[index]
        for index in {
            0,
            min(1, last_index),
            *(round(last_index * quarter / 4) for quarter in range(1, 5)),
        }
    ]
