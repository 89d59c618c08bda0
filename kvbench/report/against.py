"""One policy against another at the same budget: paired differences of the mean over tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pandas as pd

from kvbench.errors import UserError, nearest
from kvbench.files import write_whole
from kvbench.report.frames import records
from kvbench.report.numbers import score_kind
from kvbench.report.outputs import markdown
from kvbench.report.overall import SETTING, group_means
from kvbench.report.samples import Samples
from kvbench.report.table import Cell, Column, Interval, Name, Table, beside
from kvbench.report.text import code, tokens

_PANEL = [*SETTING, "dtype", "device", "attention", "moment", "budget"]
_OF_POLICY = ["policy", "tasks", "higher_is_better"]
_NUMBERS = ["base_score", "score", "diff", "diff_lo", "diff_hi"]

_READING = """\
Differences of the mean over tasks at the same budget, paired by question. Brackets are 95% \
intervals by a bootstrap over contexts, stratified by task. Scores in [0, 1] are shown in points. \
At every budget the best score is bold and the second best underlined."""


def differences(cells: pd.DataFrame, samples: pd.DataFrame | Samples, base: str) -> pd.DataFrame:
    """How much every policy differs from one of them, at the same budget and moment.

    As in `group_means`, every task of a group weighs the same, and tasks on which the full cache is
    not above chance are left out. The bootstrap draws the same contexts for both policies, so the
    differences are paired.

    Args:
        cells: The frame of `cells.parquet`.
        samples: The frame of `samples.parquet`.
        base: Canonical spelling of the policy to compare the others with.

    Returns:
        A row per (model, model_revision, group, length, seed, moment, budget, policy) with `tasks`,
        `higher_is_better`, `base_score`, `score`, `diff` (score minus base), `diff_lo`, `diff_hi`.

    Raises:
        UserError: `base` was not run; the nearest names are given.
    """
    known = [str(p) for p in dict.fromkeys(cells["policy"]) if p != "full"]
    if base not in known:
        listed = f"there are {', '.join(known)}" if known else "nothing but full was run"
        raise UserError(f"--against {base}: not in this run{nearest(base, known)} ({listed})")
    kept = cells[cells["policy"] != "full"]
    rows: list[dict[str, Any]] = []
    for panel, part in kept.groupby(_PANEL, sort=False):
        names = panel if isinstance(panel, tuple) else (panel,)
        if base not in set(part["policy"]) or part["policy"].nunique() < 2:
            continue
        # In the place of full, the base is what the others are paired with.
        turned = part.assign(policy=part["policy"].where(part["policy"] != base, "full"))
        for row in records(group_means(turned, samples)):
            if row["policy"] != "full" and row["status"] == "ok" and pd.notna(row["diff"]):
                head = dict(zip(_PANEL, names, strict=True))
                rows.append(head | row | {"base_score": row["full_score"]})
    return pd.DataFrame(rows, columns=[*_PANEL, *_OF_POLICY, *_NUMBERS])


def tables(found: pd.DataFrame, base: str) -> list[Table]:
    """The differences as tables, one per model, group, length, seed and moment."""
    tables = []
    for place, part in found.groupby([*SETTING, "moment"], sort=False):
        model, _, group, length, seed, moment = map(str, place)
        several = found["seed"].nunique() > 1
        where = f", {tokens(int(length))}, {moment}" + f", seed {seed}" * several
        title = (Name(model), " · ", Name(group), where, ": against ", Name(base))
        groups = part["budget"].astype(str).tolist()
        tables.append(beside(title, _columns(part, base), groups=groups))
    return tables


def write(found: pd.DataFrame, base: str, path: Path) -> Path:
    """Write the differences as Markdown.

    Raises:
        UserError: The file cannot be written.
    """
    blocks = [f"# Against {code(base)}", _READING, *map(markdown, tables(found, base))]
    write_whole(path, ("\n\n".join(blocks) + "\n").encode())
    return path


def _columns(part: pd.DataFrame, base: str) -> list[tuple[Column, list[Cell]]]:
    rows = records(part)
    scores = part[["base_score", "score"]]
    kind = score_kind(unit=bool(((scores >= 0) & (scores <= 1)).all(axis=None)))
    gaps: list[Cell] = [Interval(row["diff"], row["diff_lo"], row["diff_hi"]) for row in rows]
    better: Literal["higher", "lower"] = "higher" if part["higher_is_better"].iloc[0] else "lower"
    return [
        (Column("budget", align="right"), [Name(row["budget"]) for row in rows]),
        (Column("policy"), [Name(row["policy"]) for row in rows]),
        (Column(Name(base), kind), [row["base_score"] for row in rows]),
        (Column("score", kind, better=better), [row["score"] for row in rows]),
        (Column("difference", kind, better=better, signed=True), gaps),
    ]
