"""Tables and sentences of an analysis of causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvbench.analysis.causes.diagnosis import NOT_FOUND, RIGHT, UNSTABLE, VALUES, VERDICTS, WORDING
from kvbench.analysis.causes.frames import CELL, verdict_order
from kvbench.analysis.causes.options import SEARCH
from kvbench.analysis.causes.swaps import BOTH, EITHER, EVIDENCE, NOT_REPRODUCED, REST
from kvbench.analysis.scopes import rows_in_scope, scope_heading, scopes
from kvbench.report.frames import INFORMED, budget_order, informed_policies, policy_title
from kvbench.stats import wilson
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.table import Column, Interval, Name, Phrase, Table, beside
from kvbench.tables.text import counted

_MOST_HEADS = 12
_WITHOUT_EVIDENCE = {
    VALUES: "the keys and values that it writes are at fault",
    WORDING: "its own words lead elsewhere",
    UNSTABLE: "the verdict is unstable",
    NOT_FOUND: "no evidence was found",
}
"""What a sentence says of verdicts that do not follow from the evidence."""
_REASONS = {
    EVIDENCE: "those of the evidence",
    REST: "the others",
    EITHER: "either of these",
    BOTH: "only both together",
}
"""What a sentence says of the entries that explain a difference."""
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
        if rows["give_right"].notna().any():
            yield _intervention_table((*title, ": interventions"), rows)
        head_rows = rows_in_scope(heads, scope)
        if (head_rows["needed"] > 0).any():
            yield _head_table((*title, ": KV heads whose evidence brings answers back"), head_rows)
        if len(pairs) and len(pair_rows := rows_in_scope(pairs, scope)):
            other = policy_title(str(against), informed=against in informed_policies(rows))
            yield _pair_table((*title, ": lost, but answered by ", other), pair_rows)


def _cells(rows: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """Return the rows of every policy and budget, in order of budgets."""
    groups = [
        (str(policy), str(budget), cell_rows)
        for (policy, budget), cell_rows in rows.groupby(["policy", "budget"], sort=False)
    ]
    return sorted(groups, key=lambda group: budget_order(group[1]))


def _policy_titles(cells: Sequence[tuple[str, str, pd.DataFrame]]) -> list[Phrase]:
    """Return the names of the policies of cells; those that see the answer are marked."""
    return [policy_title(policy, informed=policy in informed_policies(rows)) for policy, _, rows in cells]


def _verdict_table(title: Any, rows: pd.DataFrame) -> Table:
    cells = _cells(rows)
    columns: list[tuple[Column, list[Any]]] = [
        (Column("policy"), _policy_titles(cells)),
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
        if not np.isnan(held).all():
            columns.append((Column(heading, NumberFormat.PERCENT, "held of lost samples"), held))
    return beside(title, columns)


def _intervention_table(title: Any, rows: pd.DataFrame) -> Table:
    cells = [(policy, budget, cell[cell["give_right"].notna()]) for policy, budget, cell in _cells(rows)]
    cells = [cell for cell in cells if len(cell[2])]
    columns: list[tuple[Column, list[Any]]] = [
        (Column("policy"), _policy_titles(cells)),
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
    informed = informed_policies(ranked)
    policies: list[Any] = [policy_title(policy, informed=policy in informed) for policy in map(str, ranked["policy"])]
    budgets = [Name(str(budget)) for budget in ranked["budget"]]
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
        if ranked[column].notna().any() or column not in ("target_held", "agreement")
    ]
    return beside(
        title, [(Column("policy"), policies), (Column("budget"), budgets), (Column("layer.head"), names), *numbers]
    )


def _pair_table(title: Any, pairs: pd.DataFrame) -> Table:
    cells = _cells(pairs)
    columns: list[tuple[Column, list[Any]]] = [
        (Column("policy"), _policy_titles(cells)),
        (Column("budget"), [Name(budget) for _, budget, _ in cells]),
        (Column("samples", NumberFormat.COUNT), [len(cell) for _, _, cell in cells]),
    ]
    for explained in dict.fromkeys(pairs["explained"]):
        counts = [int((cell["explained"] == explained).sum()) for _, _, cell in cells]
        columns.append((Column(explained, NumberFormat.COUNT, "explained by"), counts))
    lost_again = [int((~_explained(cell)["take_others_evidence_right"]).sum()) for _, _, cell in cells]
    columns.append((Column("other loses without this evidence", NumberFormat.COUNT), lost_again))
    columns.append(
        (Column("swap back loses", NumberFormat.COUNT), [int(cell["swapped_back"].sum()) for *_, cell in cells])
    )
    return beside(title, columns)


def _explained(pairs: pd.DataFrame) -> pd.DataFrame:
    """Return the pairs whose difference is explained by the evidence or by other entries."""
    return pairs[pairs["explained"].isin(_REASONS)]


def sentences(
    samples: pd.DataFrame, pairs: pd.DataFrame, against: str | None, label: Callable[[str], str] = str
) -> list[str]:
    """Return a sentence per cell with its counts, as a paper could quote it.

    Args:
        samples, pairs: Data frames of the analysis.
        against: The policy of the pairs.
        label: Returns the name to show for a policy.
    """
    lines = []
    informed = informed_policies(samples)

    def marked(policy: str) -> str:
        return label(policy) + INFORMED * (policy in informed)

    for names, rows in samples.groupby(CELL, sort=False):
        cell = dict(zip(CELL, names, strict=True))
        where = f"{cell['task']}, {cell['moment']}" + (f", {cell['length']} tokens" if cell["length"] else "")
        shown = f"{marked(str(cell['policy']))} at {cell['budget']} ({where})"
        lines.append(_sentence(shown, rows))
        matching = pairs
        for column in CELL:
            matching = matching[matching[column] == cell[column]]
        if len(matching):
            lines.append(_pair_sentence(shown, matching, marked(str(against))))
    return lines


def _sentence(cell: str, rows: pd.DataFrame) -> str:
    """Return the sentence of one cell."""
    lost = rows[rows["verdict"] != RIGHT]
    low, high = wilson(len(lost) / len(rows), len(rows))
    text = (
        f"{cell} loses {len(lost)} of the {counted(len(rows), 'question')} that the full cache answers "
        f"({len(lost) / len(rows):.0%}, 95% CI {low:.0%} to {high:.0%})"
    )
    parts = []
    tried = lost[lost["give_right"].notna()]
    if len(tried):
        given, random_given = (int(tried[column].sum()) for column in ("give_right", "give_random_right"))
        taken, random_taken = (int((~tried[column]).sum()) for column in ("take_right", "take_random_right"))
        searched = int((tried["source"] == SEARCH).sum())
        source = f" (found by a search{f' in {searched}' * (searched < len(tried))})" if searched else ""
        parts += [
            f"giving the evicted evidence{source} back restores {given} of {len(tried)}, and the full cache loses "
            f"{taken} of {len(tried)} without it",
            f"as many random entries restore {random_given} and lose {random_taken}",
            *_sizes(tried),
        ]
        anchors = Counter(anchor for found in tried["anchors"] for anchor in found.split(", ") if anchor)
        if anchors:
            parts.append(f"the evidence needs {_in_counts(anchors)} as well")
    counts = Counter(lost["verdict"])
    parts += [f"in {counts[verdict]}, {words}" for verdict, words in _WITHOUT_EVIDENCE.items() if verdict in counts]
    return text + ": " * bool(parts) + "; ".join(parts) + "."


def _sizes(tried: pd.DataFrame) -> Iterator[str]:
    """Yield how many heads or layers of the evidence are enough, if it is sufficient anywhere."""
    units = "heads" if (tried["n_heads"] > 0).any() else "layers"
    sizes = tried.loc[tried[f"n_{units}"] > 0, f"n_{units}"]
    if len(sizes):
        low, median, high = int(sizes.min()), float(sizes.median()), int(sizes.max())
        noun = {"heads": "KV head", "layers": "layer"}[units]
        are = "is" if median == 1 else "are"
        extent = f"{low} to {high}, " * (low < high)
        yield (
            f"in the median, {median:g} {noun}{'s' * (median != 1)} of it {are} enough "
            f"({extent}most often {_in_counts(_unit_counts(tried[units]))})"
        )


def _unit_counts(unit_names: Iterable[str]) -> Counter[str]:
    """Count layers, `3`, or heads, `3.0`, under the names that a sentence gives them."""
    split = [unit.partition(".") for found in unit_names for unit in found.split()]
    return Counter(f"layer {layer}" + f", head {head}" * bool(head) for layer, _, head in split)


def _in_counts(counts: Counter[str]) -> str:
    """Return the most common names with their counts."""
    return "; ".join(f"{name} in {count}" for name, count in counts.most_common(3))


def _pair_sentence(cell: str, pairs: pd.DataFrame, against: str) -> str:
    """Return the sentence of one cell against another policy."""
    explained = Counter(pairs["explained"])
    known = _explained(pairs)
    parts = []
    if len(known):
        reasons = ", ".join(
            f"{_REASONS[reason]} in {count}" for reason, count in explained.most_common() if reason in _REASONS
        )
        lost_again = int((~known["take_others_evidence_right"]).sum())
        parts = [
            f"the entries of {against} that bring the answer back are {reasons}",
            f"{against} loses {lost_again} of {len(known)} without the evidence that only it keeps",
        ]
    if NOT_REPRODUCED in explained:
        parts.append(f"in {explained[NOT_REPRODUCED]}, masks do not reproduce the difference")
    if NOT_FOUND in explained:
        parts.append(f"in {explained[NOT_FOUND]}, {_WITHOUT_EVIDENCE[NOT_FOUND]}")
    units = _unit_counts(pairs["heads"].where(pairs["heads"] != "", pairs["layers"]))
    if units:
        swapped_back = int(pairs["swapped_back"].sum())
        parts.append(f"most often swapped: {_in_counts(units)}, and swapping the same units back loses {swapped_back}")
    return (
        f"Of the {counted(len(pairs), 'question')} that {cell} loses and {against} answers, " + "; ".join(parts) + "."
    )
