"""Compares variants with the first one: paired differences over all seeds, and seed by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvbench.report.against import differences
from kvbench.report.frames import records
from kvbench.tables import outputs
from kvbench.tables.numbers import NumberFormat, number
from kvbench.tables.table import Column, Interval, Table, TableCell, TableRow
from kvbench.tables.text import tokens
from scripts.ablations.recipe import Ablation, Variant

_SAME = ["task", "group", "length", "moment", "budget", "policy"]
_Place = tuple[str, int, str, str]


@dataclass(frozen=True)
class Contrast:
    """A variant compared with the first one, on one group of tasks at one budget.

    Attributes:
        place: Group, length, moment and budget.
        score: Mean over tasks, questions and seeds.
        by_seed: Score of each seed.
        diff: Score minus the first variant's score.
        lo: Lower end of its 95% interval, by a bootstrap over contexts with fixed gates.
        hi: Upper end.
    """

    place: _Place
    score: float
    by_seed: tuple[float, ...] = ()
    diff: float = math.nan
    lo: float = math.nan
    hi: float = math.nan

    def direction(self, first: Contrast) -> str:
        """`better` or `worse` than the first variant, or "" if that is not clear.

        The interval must exclude 0, and every training of one variant must score above every
        training of the other.
        """
        if self.lo > 0 and min(self.by_seed) > max(first.by_seed):
            return "better"
        if self.hi < 0 and max(self.by_seed) < min(first.by_seed):
            return "worse"
        return ""


def pooled(
    cells: pd.DataFrame, samples: pd.DataFrame, names: Mapping[str, tuple[str, int]]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Treat the seeds of a variant as repeats of the same questions.

    Args:
        cells: The frame of `cells.parquet`.
        samples: The frame of `samples.parquet`.
        names: Variant and seed of every policy, by its canonical spelling; other policies are left
            out.

    Returns:
        Both frames, as if the variants were the policies of the run, with one cell each.
    """
    cells = cells[cells["policy"].isin(list(names))]
    seeds = [names[policy][1] for policy in cells["policy"]]
    cells = cells.assign(policy=[names[policy][0] for policy in cells["policy"]])
    first = cells.groupby(_SAME)["cell"].transform("first")
    joins = dict(zip(cells["cell"], first, strict=True))
    samples = samples[samples["cell"].isin(list(joins))]
    most = int(samples["repeat"].max()) + 1 if len(samples) else 1
    index = {seed: i * most for i, seed in enumerate(sorted(set(seeds)))}
    shift = {cell: index[seed] for cell, seed in zip(cells["cell"], seeds, strict=True)}
    samples = samples.assign(repeat=samples["repeat"] + samples["cell"].map(shift), cell=samples["cell"].map(joins))
    whole = cells.groupby(_SAME)["status"].transform(lambda s: (s == "ok").all())
    cells = cells.assign(status=cells["status"].where(whole, "error"))
    return cells[cells["cell"] == first], samples


def contrasts(
    cells: pd.DataFrame, samples: pd.DataFrame, names: Mapping[str, tuple[str, int]]
) -> dict[str, list[Contrast]]:
    """Compare every variant with the first one in `names`; arguments as in `pooled`.

    Returns:
        By variant, including the first: a contrast per group, length, moment and budget.
    """
    variants = list(dict.fromkeys(name for name, _ in names.values()))
    base = variants[0]
    by_variant: dict[str, list[Contrast]] = {name: [] for name in variants}
    seeds = sorted({seed for _, seed in names.values()})
    single = [_scores(cells, samples, _only(names, seed), base) for seed in seeds]
    for row in _rows(cells, samples, names, base):
        place, name = _place(row), str(row["policy"])

        def each_seed(variant: str, at: _Place = place) -> tuple[float, ...]:
            return tuple(scores.get((at, variant), math.nan) for scores in single)

        if all(c.place != place for c in by_variant[base]):
            by_variant[base].append(Contrast(place, float(row["base_score"]), each_seed(base)))
        score, *gap = (float(row[k]) for k in ("score", "diff", "diff_lo", "diff_hi"))
        by_variant[name].append(Contrast(place, score, each_seed(name), *gap))
    return by_variant


def _only(names: Mapping[str, tuple[str, int]], seed: int) -> dict[str, tuple[str, int]]:
    return {policy: pair for policy, pair in names.items() if pair[1] == seed}


def _rows(
    cells: pd.DataFrame, samples: pd.DataFrame, names: Mapping[str, tuple[str, int]], base: str
) -> list[dict[str, Any]]:
    return records(differences(*pooled(cells, samples, names), base))


def _scores(
    cells: pd.DataFrame, samples: pd.DataFrame, names: Mapping[str, tuple[str, int]], base: str
) -> dict[tuple[_Place, str], float]:
    """Scores of one seed by place and variant."""
    rows = _rows(cells, samples, names, base)
    scores = {(_place(row), str(row["policy"])): float(row["score"]) for row in rows}
    return scores | {(_place(row), base): float(row["base_score"]) for row in rows}


def _place(row: Mapping[str, Any]) -> _Place:
    return str(row["group"]), int(row["length"]), str(row["moment"]), str(row["budget"])


def markdown(table: Ablation, by_variant: Mapping[str, Sequence[Contrast]]) -> str:
    """The table as Markdown.

    Args:
        table: The ablation.
        by_variant: The result of `contrasts`.
    """
    heads = (
        Column("variant"),
        Column("tasks"),
        Column("score", NumberFormat.POINTS),
        Column("by seed", align="right"),
        Column("difference [95%]", NumberFormat.POINTS, better="higher", signed=True),
        Column("here"),
        Column("in the paper"),
    )
    first = {c.place: c for c in by_variant[table.variants[0].name]}
    rows = []
    for variant in table.variants:
        in_paper, direction = _paper(table, variant)
        for i, c in enumerate(by_variant[variant.name]):
            group, length, moment, budget = c.place
            known = not math.isnan(c.diff)
            here = _verdict(c.direction(first[c.place]), direction)
            cells: tuple[TableCell, ...] = (
                variant.name,
                f"{group}, {tokens(length)}, {moment}, {budget}",
                c.score,
                ", ".join(number(score, NumberFormat.POINTS) for score in c.by_seed),
                Interval(c.diff, c.lo, c.hi) if known else None,
                "" if variant is table.variants[0] else here,
                "" if i else in_paper,
            )
            rows.append(TableRow(cells))
    head = f"## {table.title}\n\nIn the paper: {table.paper}.\n\n"
    return head + outputs.markdown(Table("", heads, tuple(rows))) + "\n"


def _verdict(here: str, in_paper: str) -> str:
    if not here:
        return "not clear"
    if not in_paper:
        return here
    return f"{here}, as in the paper" if here == in_paper else f"{here}, unlike the paper"


def _paper(table: Ablation, variant: Variant) -> tuple[str, str]:
    """The paper's scores as text, and their direction if all columns agree."""
    if isinstance(variant.paper, str):
        return variant.paper, variant.paper
    if variant.paper is None:
        return "", ""
    first = table.variants[0].paper
    named = zip(variant.paper, table.columns, strict=True)
    text = ", ".join(f"{x:g} at {at}" if at else f"{x:g}" for x, at in named)
    if variant is table.variants[0] or not isinstance(first, tuple):
        return text, ""
    gaps = [x - y for x, y in zip(variant.paper, first, strict=True)]
    if all(g > 0 for g in gaps):
        return text, "better"
    return text, "worse" if all(g < 0 for g in gaps) else ""
