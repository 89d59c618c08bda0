"""The tables of a retention analysis: as data frames, and as a reader sees them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvbench.analysis.retention.measure import Found, OfTask, Shown
from kvbench.analysis.scopes import title_of
from kvbench.report.numbers import Kind
from kvbench.report.table import Cell, Column, Name, Phrase, Row, Table, beside
from kvbench.report.text import counted

Title: TypeAlias = tuple[Phrase, ...]

_MOST_LAYERS = 12
"""A model with more layers is shown by the least and the most sparse of them."""

EXTREMES = 10
"""Tokens in the tables of the most and of the least retained, as in the paper's figure 5b."""

READING = {
    "evictions": "Every policy sees the same text: context, question and what the model writes "
    "with the full cache.",
    "sparsity": "Sparsity: 1 - 2/(T(T+1)) times the sum of a KV head's retention matrix. Its gates "
    "are read in one pass with the full cache. At 0, nothing fades.",
    "tokens": "Retained tokens: mean beta over layers, KV heads and occurrences. Half-life: tokens "
    "until half is left, from the mean of log beta.",
    "survival": "Survival with the full cache: share of tokens that a query at least L positions "
    "later selects, of those with L positions behind them; mean over layers and query heads. Top "
    "K: a query selects the K largest logits. Mass P: it selects the smallest set with that share "
    "of its attention.",
}
"""How to read each table, by its name."""


def frames(found: Found) -> dict[str, pd.DataFrame]:
    """All tables by name (columns: docs/analysis.md); one that would be empty is left out."""
    makers: dict[str, Callable[[OfTask], Iterator[pd.DataFrame]]] = {
        "sparsity": _sparsity,
        "tokens": _tokens,
        "survival": _survival,
        "retention": lambda task: _of_shown(task, _retention),
        "evictions": lambda task: _of_shown(task, _evictions),
        "entries": lambda task: _of_shown(task, _entries),
        "positions": lambda task: _of_shown(task, _positions),
    }
    made = {}
    for name, make in makers.items():
        parts = [part for task in found.tasks for part in make(task) if len(part)]
        if parts:
            made[name] = pd.concat(parts, ignore_index=True)
    return made


def _sparsity(task: OfTask) -> Iterator[pd.DataFrame]:
    for policy, total in task.sparsity.items():
        index = _heads(task, total.shape[1])
        yield pd.DataFrame(
            {
                **task.where,
                "policy": policy,
                **index,
                "sparsity": (total / task.count).flatten().numpy(),
                "texts": task.count,
            }
        )


def _tokens(task: OfTask) -> Iterator[pd.DataFrame]:
    for policy, sums in task.tokens.items():
        rows = pd.DataFrame(sums.rows())
        rows.insert(1, "token", [task.spelled[i] for i in rows["token_id"]])
        rows = rows.assign(**task.where, policy=policy)
        yield rows[[*task.where, "policy", *(c for c in rows if c not in (*task.where, "policy"))]]


def _survival(task: OfTask) -> Iterator[pd.DataFrame]:
    alive = task.survival.alive
    assert alive is not None
    where = {k: v for k, v in task.where.items() if k != "moment"}
    _, layers, heads, points = alive.shape
    for (name, value), counts in zip(task.criteria, alive, strict=True):
        yield pd.DataFrame(
            {
                **where,
                "criterion": name,
                "value": value,
                "layer": np.repeat(np.array(task.layers, np.int32), heads * points),
                "head": np.tile(np.repeat(np.arange(heads, dtype=np.int32), points), layers),
                "horizon": np.tile(np.array(task.survival.at, np.int32), layers * heads),
                "alive": counts.flatten().numpy(),
                "tokens": np.tile(np.array(task.survival.tokens), layers * heads),
            }
        )


def _of_shown(task: OfTask, make: Any) -> Iterator[pd.DataFrame]:
    for shown in task.shown:
        for columns in make(task, shown):
            yield pd.DataFrame({**task.where, "sample_id": shown.sample_id, **columns})


def _retention(task: OfTask, shown: Shown) -> Iterator[dict[str, Any]]:
    for policy, log_beta in shown.log_beta.items():
        yield {
            "policy": policy,
            **_by_entry(task, log_beta),
            "log_beta": log_beta.flatten().numpy(),
        }


def _evictions(task: OfTask, shown: Shown) -> Iterator[dict[str, Any]]:
    for (policy, budget), trace in shown.traces.items():
        gone = trace.gone.flatten().numpy()
        yield {
            "policy": policy,
            "budget": budget,
            **_by_entry(task, trace.gone),
            "evicted": pd.arrays.IntegerArray(gone, gone == len(shown.ids)),
        }


def _entries(task: OfTask, shown: Shown) -> Iterator[dict[str, Any]]:
    for (policy, budget), trace in shown.traces.items():
        index = _by_entry(task, trace.gone)
        index["step"] = index.pop("position")
        held = trace.entries.flatten().numpy().astype(np.int32)
        yield {"policy": policy, "budget": budget, **index, "entries": held}


def _positions(task: OfTask, shown: Shown) -> Iterator[dict[str, Any]]:
    for (policy, budget), trace in shown.traces.items():
        said = shown.log_beta.get(policy)
        beta = math.nan if said is None else said.double().exp().mean((0, 1)).numpy()
        yield {
            "policy": policy,
            "budget": budget,
            "position": np.arange(len(shown.ids), dtype=np.int32),
            "part": [shown.part(i) for i in range(len(shown.ids))],
            "token_id": shown.ids,
            "token": [task.spelled[i] for i in shown.ids],
            "beta": beta,
            "heads_holding": trace.held.sum((0, 1)).numpy().astype(np.int32),
        }


def _heads(task: OfTask, heads: int) -> dict[str, Any]:
    layers = np.array(task.layers, np.int32)
    return {
        "layer": np.repeat(layers, heads),
        "kv_head": np.tile(np.arange(heads, dtype=np.int32), len(layers)),
    }


def _by_entry(task: OfTask, values: Tensor) -> dict[str, Any]:
    """Layer, KV head and position of the numbers of a tensor `[L, H, T]`."""
    layers, heads, tokens = values.shape
    index = {k: np.repeat(v, tokens) for k, v in _heads(task, heads).items()}
    return {**index, "position": np.tile(np.arange(tokens, dtype=np.int32), layers * heads)}


# --- what is shown --------------------------------------------------------------------------------


def retention_tables(found: Found) -> Iterator[Table]:
    """Tables for a terminal, a summary and the page."""
    for task in found.tasks:
        title = title_of(task.where)
        if task.sparsity:
            yield _sparsity_table(task, title)
        for policy, sums in task.tokens.items():
            yield _tokens_table(task, policy, sums.rows(), title)
        yield _survival_table(task, title)
        for shown in task.shown:
            if shown.traces:
                yield _held_table(shown, title)


def _sparsity_table(task: OfTask, title: Title) -> Table:
    each = len(task.layers) <= _MOST_LAYERS
    titles = [f"layer {i}" for i in task.layers] if each else ["least layer", "most layer"]
    shares = ("mean", "least KV head", "most KV head", *titles)
    columns = [Column("policy"), *(Column(title, Kind.PERCENT) for title in shares)]
    rows = []
    for policy, total in task.sparsity.items():
        values = total / task.count
        layers = values.mean(1)
        own = layers if each else torch.stack([layers.min(), layers.max()])
        numbers = torch.stack([values.mean(), values.min(), values.max(), *own]).tolist()
        rows.append(Row((Name(policy), *numbers)))
    what = f": sparsity, mean over {counted(task.count, 'text')}"
    return Table((*title, what), tuple(columns), tuple(rows))


def _tokens_table(task: OfTask, policy: str, rows: list[dict[str, Any]], title: Title) -> Table:
    columns: list[tuple[Column, list[Cell]]] = []
    for group, few in (("most", rows[:EXTREMES]), ("least", rows[::-1][:EXTREMES])):
        columns += [
            (Column("token", group=group), [Name(task.spelled[row["token_id"]]) for row in few]),
            (Column("times", Kind.COUNT, group), [row["count"] for row in few]),
            (Column("mean beta", Kind.NUMBER, group), [row["beta"] for row in few]),
            (Column("half-life", Kind.NUMBER, group), [row["half_life"] for row in few]),
        ]
    return beside((*title, ": tokens that ", Name(policy), " retains most and least"), columns)


def _survival_table(task: OfTask, title: Title) -> Table:
    at, shares = task.survival.at, task.survival.shares().mean((1, 2)).tolist()
    chosen = sorted({at.index(h) for h in _six(at)})
    columns = [Column("in use")]
    columns += [Column(f"L = {at[i]}", Kind.PERCENT) for i in chosen]
    rows = [
        Row((criterion(name, value), *(share[i] for i in chosen)))
        for (name, value), share in zip(task.criteria, shares, strict=True)
    ]
    what = f": survival with the full cache, {counted(task.count, 'text')}"
    return Table((*title, what), tuple(columns), tuple(rows))


def _held_table(shown: Shown, title: Title) -> Table:
    counts = ("entries", "mean at end", "least KV head", "most KV head", "cuts")
    columns = [Column("policy"), Column("budget")]
    columns += [Column(name, Kind.COUNT) for name in counts]
    rows = []
    for (policy, budget), trace in shown.traces.items():
        last = trace.entries[..., -1].double()
        held = torch.stack([last.mean(), last.min(), last.max()]).tolist()
        rows.append(Row((Name(policy), Name(budget), trace.budget, *held, trace.cuts)))
    what = f": entries per KV head, {len(shown.ids)} tokens of sample "
    return Table((*title, what, Name(shown.sample_id)), tuple(columns), tuple(rows))


def criterion(name: str, value: float) -> str:
    """A criterion of survival as it is shown."""
    return f"{name} {value:g}"


def _six(at: list[int]) -> list[int]:
    """Six horizons of many: 0, 1, the last, and three spread evenly between."""
    last = len(at) - 1
    return [at[i] for i in {0, min(1, last), *(round(last * k / 4) for k in range(1, 5))}]
