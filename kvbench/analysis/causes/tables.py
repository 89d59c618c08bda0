"""Tables and sentences of an analysis of causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pandas as pd

from kvbench.analysis.causes.diagnosis import RIGHT, VERDICTS
from kvbench.analysis.causes.frames import CELL, verdict_order
from kvbench.analysis.scopes import rows_in_scope, scope_heading, scopes
from kvbench.report.frames import budget_order
from kvbench.stats import wilson
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.table import Column, Interval, Name, Table, beside
from kvbench.tables.text import counted

_MOST_HEADS = 12
READING = (
    "Verdicts: "
    + "; ".join(f"{verdict}: {meaning}" for verdict, meaning in VERDICTS.items() if verdict != RIGHT)
    + ".",
    "give: the policy's cache with the evicted evidence. take: the full cache without these entries. Random: as many "
    "random entries of every head. Right: every token of the reference answer, and the token after it, is the most "
    "likely one after the full cache's words. Brackets: 95% intervals (Wilson).",
    "An enlarged cache exceeds its budget: it is a diagnosis, never a score.",
)


def cause_tables(
    samples: pd.DataFrame, heads: pd.DataFrame, pairs: pd.DataFrame, against: str | None
) -> Iterator[Table]:
    """Yield the tables of every model, task, length and moment.

    Args:
        samples, heads, pairs: Data frames of the analysis.
        against: The policy of the pairs.
    """
    for scope, rows in scopes(samples):
        title = scope_heading(scope)
        yield _verdict_table((*title, ": why samples are lost"), rows)
        yield _intervention_table((*title, ": interventions"), rows)
        head_rows = rows_in_scope(heads, scope)
        if (head_rows["needed"] > 0).any():
            yield _head_table((*title, ": KV heads whose evidence brings answers back"), head_rows)
        if len(pairs) and len(pair_rows := rows_in_scope(pairs, scope)):
            yield _pair_table((*title, ": lost, but answered by ", Name(str(against))), pair_rows)


def _cells(rows: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """Return the rows of every policy and budget, in order of budgets."""
    groups = [
        (str(policy), str(budget), cell_rows)
        for (policy, budget), cell_rows in rows.groupby(["policy", "budget"], sort=False)
    ]
    return sorted(groups, key=lambda group: budget_order(group[1]))


def _verdict_table(title: Any, rows: pd.DataFrame) -> Table:
    cells = _cells(rows)
    columns: list[tuple[Column, list[Any]]] = [
        (Column("policy"), [Name(policy) for policy, _, _ in cells]),
        (Column("budget"), [Name(budget) for _, budget, _ in cells]),
        (Column("answered by full", NumberFormat.COUNT), [len(cell) for _, _, cell in cells]),
        (Column("lost", NumberFormat.COUNT), [int((cell["verdict"] != RIGHT).sum()) for _, _, cell in cells]),
    ]
    for verdict in verdict_order(rows):
        if verdict != RIGHT:
            counts = [int((cell["verdict"] == verdict).sum()) for _, _, cell in cells]
            columns.append((Column(verdict, NumberFormat.COUNT, "verdict"), counts))
    for column, heading in (
        ("evidence_held", "evidence"),
        ("target_held", "answer"),
        ("best_head", "answer, best head"),
    ):
        held = [float(cell.loc[cell["verdict"] != RIGHT, column].mean()) for _, _, cell in cells]
        columns.append((Column(heading, NumberFormat.PERCENT, "held of lost samples"), held))
    return beside(title, columns)


def _intervention_table(title: Any, rows: pd.DataFrame) -> Table:
    cells = [(policy, budget, cell[cell["give_right"].notna()]) for policy, budget, cell in _cells(rows)]
    cells = [cell for cell in cells if len(cell[2])]
    columns: list[tuple[Column, list[Any]]] = [
        (Column("policy"), [Name(policy) for policy, _, _ in cells]),
        (Column("budget"), [Name(budget) for _, budget, _ in cells]),
        (Column("samples", NumberFormat.COUNT), [len(cell) for _, _, cell in cells]),
    ]
    for column, heading, group in (
        ("give_right", "evidence", "right after giving"),
        ("give_random_right", "random", "right after giving"),
        ("take_right", "evidence", "wrong after taking"),
        ("take_random_right", "random", "wrong after taking"),
    ):
        values = [cell[column].astype(bool) ^ column.startswith("take") for _, _, cell in cells]
        columns.append((Column(heading, NumberFormat.PERCENT, group), [_share(value) for value in values]))
    for column, heading in (("n_layers", "layers"), ("n_heads", "heads")):
        medians = [float(cell.loc[cell[column] > 0, column].median()) for _, _, cell in cells]
        columns.append((Column(heading, NumberFormat.NUMBER, "median needed"), medians))
    return beside(title, columns)


def _share(values: pd.Series) -> Interval:
    mean = float(values.mean())
    return Interval(mean, *wilson(mean, len(values)))


def _head_table(title: Any, heads: pd.DataFrame) -> Table:
    ranked = heads[heads["needed"] > 0].sort_values("needed", ascending=False, kind="stable").head(_MOST_HEADS)
    texts = [(Column(column), [Name(str(value)) for value in ranked[column]]) for column in ("policy", "budget")]
    names = [Name(f"{row.layer}.{row.kv_head}") for row in ranked.itertuples()]
    numbers = [
        (Column(heading, kind, group), [float(value) for value in ranked[column]])
        for column, heading, kind, group in (
            ("needed", "needed", NumberFormat.COUNT, "times"),
            ("sufficient", "sufficient alone", NumberFormat.COUNT, "times"),
            ("gain", "gain", NumberFormat.NUMBER, "nats"),
            ("loss", "loss in full", NumberFormat.NUMBER, "nats"),
            ("share", "budget over mean", NumberFormat.TIMES, ""),
            ("target_held", "holds the answer", NumberFormat.PERCENT, "samples"),
            ("agreement", "as the answer is right", NumberFormat.PERCENT, "samples"),
        )
    ]
    return beside(title, [*texts, (Column("layer.head"), names), *numbers])


def _pair_table(title: Any, pairs: pd.DataFrame) -> Table:
    cells = _cells(pairs)
    columns: list[tuple[Column, list[Any]]] = [
        (Column("policy"), [Name(policy) for policy, _, _ in cells]),
        (Column("budget"), [Name(budget) for _, budget, _ in cells]),
        (Column("samples", NumberFormat.COUNT), [len(cell) for _, _, cell in cells]),
    ]
    for explained in dict.fromkeys(pairs["explained"]):
        counts = [int((cell["explained"] == explained).sum()) for _, _, cell in cells]
        columns.append((Column(explained, NumberFormat.COUNT, "explained by the other's"), counts))
    lost_again = [int((~cell["take_others_evidence_right"].astype(bool)).sum()) for _, _, cell in cells]
    columns.append((Column("other loses without this evidence", NumberFormat.COUNT), lost_again))
    columns.append(
        (Column("swap back loses", NumberFormat.COUNT), [int(cell["swapped_back"].sum()) for *_, cell in cells])
    )
    return beside(title, columns)


def sentences(samples: pd.DataFrame, pairs: pd.DataFrame, against: str | None) -> list[str]:
    """Return a sentence per cell with its counts, as a paper could quote it."""
    lines = []
    for names, rows in samples.groupby(CELL, sort=False):
        cell = dict(zip(CELL, names, strict=True))
        lines.append(_sentence(cell, rows))
        if len(pairs):
            matching = pairs
            for column in CELL:
                matching = matching[matching[column] == cell[column]]
            if len(matching):
                lines.append(_pair_sentence(cell, matching, str(against)))
    return lines


def _sentence(cell: dict[str, Any], rows: pd.DataFrame) -> str:
    """Return the sentence of one cell."""
    lost = rows[rows["verdict"] != RIGHT]
    low, high = wilson(len(lost) / len(rows), len(rows))
    where = f"{cell['task']}, {cell['moment']}" + (f", {cell['length']} tokens" if cell["length"] else "")
    text = (
        f"{cell['policy']} at {cell['budget']} ({where}) loses {len(lost)} of the "
        f"{counted(len(rows), 'question')} that the full cache answers "
        f"({len(lost) / len(rows):.0%}, 95% CI {low:.0%} to {high:.0%})"
    )
    tried = lost[lost["give_right"].notna()]
    if not len(tried):
        return text + "."
    given, taken = int(tried["give_right"].sum()), int((~tried["take_right"].astype(bool)).sum())
    random_given = int(tried["give_random_right"].sum())
    random_taken = int((~tried["take_random_right"].astype(bool)).sum())
    text += (
        f": giving the evicted evidence back restores {given} of {len(tried)}, and the full cache loses {taken} of "
        f"{len(tried)} without it; as many random entries do so in {random_given} and {random_taken}"
    )
    units = "heads" if (tried["n_heads"] > 0).any() else "layers"
    sizes = tried.loc[tried[f"n_{units}"] > 0, f"n_{units}"]
    if len(sizes):
        common = Counter(unit for found in tried[units] for unit in found.split()).most_common(3)
        named = ", ".join(f"{unit} in {count}" for unit, count in common)
        text += (
            f"; in the median, {sizes.median():g} {'KV ' * (units == 'heads')}{units} of it are enough "
            f"({sizes.min()} to {sizes.max()}; most often {named})"
        )
    anchors = Counter(anchor for found in tried["anchors"] for anchor in found.split(", ") if anchor)
    if anchors:
        text += "; the evidence needs " + ", ".join(f"{anchor} in {count}" for anchor, count in anchors.most_common(3))
    return text + "."


def _pair_sentence(cell: dict[str, Any], pairs: pd.DataFrame, against: str) -> str:
    """Return the sentence of one cell against another policy."""
    explained = Counter(pairs["explained"])
    reasons = ", ".join(f"{reason} in {count}" for reason, count in explained.most_common())
    lost_again = int((~pairs["take_others_evidence_right"].astype(bool)).sum())
    units = Counter(
        unit for found in pairs["heads"].where(pairs["heads"] != "", pairs["layers"]) for unit in found.split()
    )
    named = ", ".join(f"{unit} in {count}" for unit, count in units.most_common(3))
    text = (
        f"Of the {counted(len(pairs), 'question')} that {cell['policy']} at {cell['budget']} ({cell['task']}, "
        f"{cell['moment']}) loses and {against} answers, what {against} keeps explains the difference by {reasons}; "
        f"{against} loses {lost_again} of {len(pairs)} without the evidence that only it keeps"
    )
    if named:
        text += (
            f"; most often swapped: {named}, and swapping the same units back loses {int(pairs['swapped_back'].sum())}"
        )
    return text + "."
