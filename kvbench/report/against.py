"""Comparison of policies at the same budget: paired differences of the mean over tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pandas as pd

from kvbench.errors import UserError, nearest
from kvbench.files import write_whole
from kvbench.report.frames import informed_policies, metric_title, policy_title, records, unaveraged_tasks, unit_scale
from kvbench.report.overall import SETTING, group_means
from kvbench.report.sorted_samples import Samples
from kvbench.tables.numbers import score_kind
from kvbench.tables.outputs import markdown, markdown_text
from kvbench.tables.table import Column, Interval, Name, Phrase, Table, TableCell, beside
from kvbench.tables.text import md, tokens

_PANEL = [*SETTING, "dtype", "device", "attention", "moment", "budget"]
_OF_POLICY = ["policy", "tasks", "higher_is_better", "informed", "metric"]
_NUMBERS = ["base_score", "base_informed", "score", "diff", "diff_lo", "diff_hi"]

_READING = """\
Differences of the mean over tasks at the same budget, paired by question. Brackets are 95% \
intervals by a bootstrap over contexts, stratified by task. Scores in [0, 1] are shown in points. \
Scores are over the questions that both policies have. Among the policies beside the base, the best score at \
every budget is bold and the second best underlined."""


def differences(cells: pd.DataFrame, samples: pd.DataFrame | Samples | None, base: str) -> pd.DataFrame:
    """Return the paired difference of every policy from a base policy, at the same budget and moment.

    As in `group_means`, every task of a group has the same weight, and tasks on which the full cache is not above
    chance are left out, as are those whose score is not a mean over samples. The bootstrap draws the same contexts for
    both policies.

    Args:
        cells: The frame of `cells.parquet`.
        samples: The frame of `samples.parquet`; see `group_means`.
        base: Canonical spelling of the policy to compare the others with.

    Returns:
        A row per (model, model_revision, group, length, seed, moment, budget, policy) with `tasks`, `higher_is_better`,
        `informed`, `metric`, `base_score`, `base_informed`, `score`, `diff` (score minus base), `diff_lo`, `diff_hi`;
        all are over the samples that both policies have.

    Raises:
        UserError: `base` was not run; the message suggests the closest names.
    """
    policies = [str(policy) for policy in dict.fromkeys(cells["policy"]) if policy != "full"]
    if base not in policies:
        choices = f"there are {', '.join(policies)}" if policies else "nothing but full was run"
        raise UserError(f"--against {base}: not in this run{nearest(base, policies)} ({choices})")
    compressed_cells = cells[(cells["policy"] != "full") & ~cells["task"].isin(unaveraged_tasks(cells))]
    base_informed = base in informed_policies(cells)
    difference_rows: list[dict[str, Any]] = []
    for panel_key, panel_cells in compressed_cells.groupby(_PANEL, sort=False):
        panel_values = panel_key if isinstance(panel_key, tuple) else (panel_key,)
        if base not in set(panel_cells["policy"]) or panel_cells["policy"].nunique() < 2:
            continue
        # `group_means` pairs with "full", so the base takes that name.
        relabelled_cells = panel_cells.assign(policy=panel_cells["policy"].where(panel_cells["policy"] != base, "full"))
        for mean_row in records(group_means(relabelled_cells, samples)):
            if mean_row["policy"] != "full" and mean_row["status"] == "ok" and pd.notna(mean_row["diff"]):
                panel_fields = dict(zip(_PANEL, panel_values, strict=True))
                common_scores = {
                    "base_score": mean_row["full_score"],
                    "score": mean_row["full_score"] + mean_row["diff"],
                }
                difference_rows.append(panel_fields | mean_row | common_scores | {"base_informed": base_informed})
    return pd.DataFrame(difference_rows, columns=[*_PANEL, *_OF_POLICY, *_NUMBERS])


def tables(difference_frame: pd.DataFrame, base: str) -> list[Table]:
    """Return the differences as tables, one per model, group, length, seed and moment."""
    panel_tables = []
    for panel_key, panel_rows in difference_frame.groupby([*SETTING, "moment"], sort=False):
        model_name, _, group_name, length, seed, moment = map(str, panel_key)
        has_several_seeds = difference_frame["seed"].nunique() > 1
        setting_text = f", {tokens(int(length))}, {moment}" + f", seed {seed}" * has_several_seeds
        table_title = (
            Name(model_name),
            " · ",
            Name(group_name),
            setting_text,
            ": against ",
            _base_title(panel_rows, base),
        )
        budget_groups = panel_rows["budget"].astype(str).mask(panel_rows["informed"], "").tolist()
        panel_tables.append(beside(table_title, _columns(panel_rows, base), groups=budget_groups))
    return panel_tables


def left_out(cells: pd.DataFrame) -> str:
    """Return a sentence about the tasks that cannot be compared, or an empty string."""
    tasks = unaveraged_tasks(cells)
    if not tasks:
        return ""
    return f"Not compared: {', '.join(tasks)}. A score that is not a mean over samples has no paired difference."


def write(difference_frame: pd.DataFrame, base: str, output_path: Path, note: str = "") -> Path:
    """Write the differences as Markdown.

    Args:
        difference_frame: The differences.
        base: The policy they refer to.
        output_path: The file.
        note: Sentence about what is left out, if anything.

    Raises:
        UserError: The file cannot be written.
    """
    blocks = [
        "# " + markdown_text(("Against ", _base_title(difference_frame, base))),
        _READING,
        *map(markdown, tables(difference_frame, base)),
        *[md(note)] * bool(note),
    ]
    write_whole(output_path, ("\n\n".join(blocks) + "\n").encode())
    return output_path


def _base_title(difference_rows: pd.DataFrame, base: str) -> Phrase:
    return policy_title(base, informed=bool(difference_rows["base_informed"].any()))


def _columns(panel_rows: pd.DataFrame, base: str) -> list[tuple[Column, list[TableCell]]]:
    row_records = records(panel_rows)
    number_kind = score_kind(unit_scaled=unit_scale(panel_rows.assign(full_score=panel_rows["base_score"])))
    gap_cells: list[TableCell] = [
        Interval(record["diff"], record["diff_lo"], record["diff_hi"]) for record in row_records
    ]
    better_direction: Literal["higher", "lower"] = "higher" if panel_rows["higher_is_better"].iloc[0] else "lower"
    policy_names: list[TableCell] = [
        policy_title(record["policy"], informed=record["informed"]) for record in row_records
    ]
    return [
        (Column("budget", align="right"), [Name(record["budget"]) for record in row_records]),
        (Column("policy"), policy_names),
        (Column(_base_title(panel_rows, base), number_kind), [record["base_score"] for record in row_records]),
        (
            Column(metric_title(panel_rows["metric"].iloc[0]), number_kind, better=better_direction),
            [record["score"] for record in row_records],
        ),
        (Column("difference", number_kind, better=better_direction, signed=True), gap_cells),
    ]
