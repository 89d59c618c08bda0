"""The summary of a report in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from kvbench.report.choosing import (
    MARKDOWN,
    NO_VERDICT,
    WITHIN_A_POINT,
    Aim,
    PanelMemory,
    lines,
)
from kvbench.report.frames import Results, records
from kvbench.report.numbers import DASH
from kvbench.report.outputs import markdown, markdown_text
from kvbench.report.panel import Filled, Panel
from kvbench.report.remarks import remarks
from kvbench.report.style import Drawn
from kvbench.report.table import Column, Name, Table, beside
from kvbench.report.tables import PanelTables
from kvbench.report.text import code, listed, short, span, tokens, word

_READING = """\
- **Scores** in [0, 1] are shown in points, 0 to 100; others as they are. Lower is better where a \
task is marked ↓. Brackets are 95% intervals.
- **Differences to full are paired:** they compare answers to the same questions, with a bootstrap \
over contexts (stratified by task for means). The statements about the cheapest policy rest on them.
- **Intervals of scores are not paired.** If the intervals of two policies overlap, the policies \
may still differ. This page does not compare policies with each other; \
`kvbench report RUN --against POLICY` does.
- **Small samples:** where fewer than 5 contexts differ from the rest, a bootstrap is \
overconfident and Wilson's interval replaces it, so 50 right answers out of 50 do not count as \
certainty. Scores outside [0, 1] get Student's t interval if there are 10 contexts or fewer.
- **KV held** is the live bytes of keys, values and whatever else a policy stores with them, as a \
share of the full cache of the same samples. **KV read** is what a decode step reads, shown if \
a policy reads less than it holds. **KV allocated** is what is set aside, room for the answer \
included, shown if a policy holds codes: they need more of it than whole entries do.
- **The cheapest policy** is picked after seeing the scores, which flatters it slightly. Confirm a \
choice on fresh samples, with another `--seed`. A cheaper setting cannot be ruled out if it loses \
more than asked for on average but its interval includes smaller losses."""


def summary_text(
    results: Results,
    tables: Sequence[PanelTables],
    figures: Sequence[Drawn],
    root: Path,
    aim: Aim = WITHIN_A_POINT,
) -> str:
    """Write the summary of a report.

    Args:
        results: What the report is about.
        tables: Its tables, panel by panel.
        figures: What to show or link to.
        root: The folder that the links start from.
        aim: What a setting is looked for.

    Returns:
        Markdown.
    """
    several = len(results.models) > 1
    blocks = ["# KV-cache eviction: results", *_overview(results)]
    blocks.append(f"## Cheapest policy within {aim.points} of the full cache")
    for panel in (part.panel for part in tables):
        said = [f"- {line}" for line in lines(panel, results.samples, aim, MARKDOWN)]
        silent = NO_VERDICT["silent"].capitalize()
        blocks += [_heading(panel, several), "\n".join(said) or silent]
        if aim.serving is not None:
            blocks.append(PanelMemory.of(panel, results.samples).note(panel, aim.serving))
    blocks.append("## Scores")
    for part in tables:
        blocks += [_heading(part.panel, several), *(markdown(one.table) for one in part.tables)]
    blocks += ["## Figures", *_figures(figures, root)]
    blocks += ["## How to read this page", _READING]
    failed = results.cells[results.cells["status"] != "ok"]
    if len(failed):
        blocks += ["## Failed cells", markdown(_failures(failed))]
    blocks += ["## Versions", _versions(results.cells)]
    return "\n\n".join(blocks) + "\n"


# --- what was run ---------------------------------------------------------------------------------


def _overview(results: Results) -> Iterator[str]:
    cells = results.cells
    compressed = cells[cells["policy"] != "full"]
    counts = sorted({int(n) for n in cells.loc[cells["status"] == "ok", "samples"]})
    revisions = cells.drop_duplicates(["model", "model_revision"])
    models = [
        code(model) + (f" at {code(revision)}" if revision else "")
        for model, revision in zip(revisions["model"], revisions["model_revision"], strict=True)
    ]
    machines = dict.fromkeys(zip(cells["device"], cells["dtype"], cells["attention"], strict=True))
    lengths = sorted(set(cells["length"]))
    sized = listed([str(length) for length in lengths if length])
    facts = {
        "Model": listed(models),
        "Tasks": _codes(cells["task"]),
        "Policies": _codes(cells["policy"]),
        "Budgets": _codes(compressed["budget"]),
        "Compression moments": _codes(compressed["moment"]),
        "Prompt length": ", ".join(
            [f"{sized} tokens"] * bool(sized) + [tokens(0)] * (0 in lengths)
        ),
        "Samples per cell": " to ".join(map(str, dict.fromkeys([*counts[:1], *counts[-1:]]))),
        "Seed": listed([str(seed) for seed in sorted(set(cells["seed"]))]),
        "Run on": listed([f"{word(d)}, {word(t)}, {word(a)} attention" for d, t, a in machines]),
    }
    yield "\n".join(f"- {name}: {value or DASH}" for name, value in facts.items())
    failed = int((cells["status"] != "ok").sum())
    yield f"Cells: {len(cells)}" + (f"; **{failed} failed**, listed below." if failed else ".")
    for remark in remarks(results):
        yield f"> **Note.** {markdown_text(remark)}"


def _codes(column: pd.Series) -> str:
    return listed([code(name) for name in dict.fromkeys(column)], 40)


def _heading(panel: Panel, several: bool) -> str:
    model = (Name(panel.model), ", ") if several else ()
    return f"### {markdown_text((*model, panel.title))}"


# --- tables ---------------------------------------------------------------------------------------


def _failures(failed: pd.DataFrame) -> Table:
    rows = records(failed)
    names = ("policy", "budget", "moment", "task")
    columns: list[Filled] = [(Column(name), [Name(row[name]) for row in rows]) for name in names]
    columns.append((Column("length"), [tokens(row["length"]) for row in rows]))
    columns.append((Column("error"), [short(row["error"], 400) for row in rows]))
    return beside("", columns)


# --- figures --------------------------------------------------------------------------------------


def _figures(figures: Sequence[Drawn], root: Path) -> Iterator[str]:
    """Figures of several tasks and heat maps as pictures, the fronts of single tasks as links."""
    tasks = []
    for figure in figures:
        png, svg = (path.relative_to(root).as_posix() for path in figure.paths)
        if figure.task:
            tasks.append(f"{code(figure.task)} ([PNG]({png}), [SVG]({svg}))")
        else:
            yield f"![{markdown_text(figure.title)}]({png})\n[SVG]({svg})"
    if tasks:
        yield f"Per task: {', '.join(tasks)}."
    if not figures:
        yield "None: no compressed cache has a score to draw."
        return
    yield (
        "Each point stands at the bytes it holds. Where policies hold the same bytes, only their "
        "error bars are set side by side. The dotted line is the Pareto front; the dashed line and "
        "its band are the full cache with its 95% interval."
    )


# --- versions -------------------------------------------------------------------------------------


def _versions(cells: pd.DataFrame) -> str:
    """Versions as recorded by the cells, one line per set of them."""
    sets: dict[tuple[str, ...], None] = {}
    for text in dict.fromkeys(cells["versions"].astype(str)):
        try:
            known = json.loads(text)
        except ValueError:
            known = text
        # Sorted: the same versions in another order are the same versions.
        pairs = sorted(known.items()) if isinstance(known, dict) else [("recorded", known)]
        sets[tuple(f"{word(name)} {_value(v)}" for name, v in pairs if _says_something(v))] = None
    lines = ["- " + ", ".join(versions) for versions in sets if versions]
    tasks = cells.drop_duplicates(["task", "task_version", "data_hash"])
    data = [
        f"{code(task)} {span(version)} (data {span(str(digest)[:12])})"
        for task, version, digest in zip(
            tasks["task"], tasks["task_version"], tasks["data_hash"], strict=True
        )
    ]
    return "\n".join([*lines, f"- Tasks: {listed(data, 60)}"])


def _says_something(value: object) -> bool:
    """Whether a recorded value is worth a mention; `false` is."""
    return value is not None and value != {} and value != [] and bool(str(value).strip())


def _value(value: object) -> str:
    return span(value if isinstance(value, str) else json.dumps(value, sort_keys=True))
