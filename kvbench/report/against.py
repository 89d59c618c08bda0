"""One policy against another at the same budget: paired differences of the mean over tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from kvbench.errors import UserError, nearest
from kvbench.report.overall import SETTING, group_means
from kvbench.report.text import code, interval, md, number, plain, short, tokens

_PANEL = [*SETTING, "dtype", "device", "attention", "moment", "budget"]
_NUMBERS = ["base_score", "score", "diff", "diff_lo", "diff_hi"]


def differences(cells: pd.DataFrame, samples: pd.DataFrame, base: str) -> pd.DataFrame:
    """How much better every policy is than one of them, at the same budget and moment.

    As in `group_means`: every task of a group weighs the same, tasks on which the full cache is not
    above chance are left out, and the bootstrap draws contexts within each task, the same for both
    policies, so that the differences are paired.

    Args:
        cells: The frame of `cells.parquet`.
        samples: The frame of `samples.parquet`.
        base: Canonical spelling of the policy that the others are held against.

    Returns:
        A row per (model, model_revision, group, length, seed, moment, budget, policy) with `tasks`,
        `base_score`, `score`, `diff` (score minus base), `diff_lo`, `diff_hi`.

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
        for row in group_means(turned, samples).to_dict("records"):
            if row["policy"] != "full" and row["status"] == "ok" and pd.notna(row["diff"]):
                found = {k: row[k] for k in ("policy", "tasks", "score", "diff")}
                ends = {k: row[k] for k in ("diff_lo", "diff_hi")}
                head = dict(zip(_PANEL, names, strict=True))
                rows.append(head | found | ends | {"base_score": row["full_score"]})
    return pd.DataFrame(rows, columns=[*_PANEL, "policy", "tasks", *_NUMBERS])


def tables(found: pd.DataFrame, base: str) -> list[Table]:
    """The differences as tables for the terminal, one per model, group, length, seed and moment."""
    out = []
    for place, part in found.groupby([*SETTING, "moment"], sort=False):
        names: list[Any] = list(place) if isinstance(place, tuple) else [place]
        model, _, group, length, seed, moment = names
        title = f"{plain(model)} · {plain(group)} · {plain(moment)} · {tokens(length)}"
        if found["seed"].nunique() > 1:
            title += f" · seed {seed}"
        table = Table(title=f"{title}: against {plain(base)}", title_justify="left")
        for name in ("policy", "budget"):
            table.add_column(name)
        for name in (short(base, 20), "score", "difference, paired", "95% interval"):
            table.add_column(name, justify="right")
        for row in part.to_dict("records"):
            table.add_row(short(row["policy"], 40), plain(row["budget"]), *_cells(row))
        out.append(table)
    return out


def write(found: pd.DataFrame, base: str, path: Path) -> Path:
    """Write the differences as Markdown."""
    lines = [
        f"# Against {code(base)}",
        "",
        "Differences in points of the mean over tasks at the same budget, paired question by "
        "question; 95% intervals by a bootstrap over contexts, stratified by task.",
        "",
        f"| model | tasks | length | moment | budget | policy | {code(base)} | score | difference "
        "| 95% |",
        "| --- | --- | --: | --- | --- | --- | --: | --: | --: | --: |",
    ]
    for row in found.to_dict("records"):
        where = [md(row["model"]), md(row["group"]), tokens(row["length"]), md(row["moment"])]
        names = [code(row["budget"]), code(row["policy"])]
        lines.append(f"| {' | '.join([*where, *names, *_cells(row)])} |")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _cells(row: Mapping[Any, Any]) -> list[str]:
    unit = all(0 <= row[name] <= 1 for name in ("base_score", "score"))
    return [
        number(row["base_score"], unit=unit),
        number(row["score"], unit=unit),
        number(row["diff"], unit=unit, signed=True),
        interval(row["diff_lo"], row["diff_hi"], unit=unit, signed=True),
    ]
