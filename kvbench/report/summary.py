"""The summary of a report in Markdown."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
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
from kvbench.report.frames import INFORMED, Results, informed_policies, records
from kvbench.report.headroom import headroom, headroom_tables
from kvbench.report.panel import Filled, Panel
from kvbench.report.remarks import remarks
from kvbench.report.table_files import PanelTables
from kvbench.tables.figure_files import SavedFigure
from kvbench.tables.numbers import DASH
from kvbench.tables.outputs import markdown, markdown_text
from kvbench.tables.table import Column, Name, Table, beside
from kvbench.tables.text import code, listed, short, span, tokens, word

_READING = """\
- **Scores** in [0, 1] are shown in points, 0 to 100; other scores are unchanged. Lower is better for \
tasks marked ↓. Brackets are 95% intervals.
- **Differences from full are paired:** they compare answers to the same questions, with a bootstrap \
over contexts (stratified by task for means). The statements about the cheapest policy are based on them.
- **Intervals of scores are not paired.** If the intervals of two policies overlap, the policies \
may still differ. This page does not compare policies with each other; \
`kvbench report RUN --against POLICY` does.
- **Small samples:** if fewer than 5 contexts differ from the rest, a bootstrap would be \
overconfident, so Wilson's interval is used: 50 correct answers out of 50 do not count as \
certainty. Scores outside [0, 1] get Student's t interval if there are 10 contexts or fewer.
- **KV held** is the live bytes of keys, values and the per-entry state of a policy, as a \
share of the full cache of the same samples. **KV read** is the bytes read per decode step, shown if \
a policy reads less than it holds. **KV allocated** is the reserved memory, including space for the \
answer, shown if a policy is quantised or prunes channels: it then needs relatively more. On a CPU, cells that only \
evict read their entries in the prefill of their context, which they share: each of them counts it whole.
- **The cheapest policy** is selected after seeing the scores, so it is slightly optimistically biased. \
Confirm a choice on new samples, with another `--seed`. A cheaper setting cannot be ruled out if its mean \
loss exceeds the limit but its interval includes smaller losses."""


def summary_text(
    results: Results,
    panel_tables: Sequence[PanelTables],
    figures: Sequence[SavedFigure],
    root_folder: Path,
    aim: Aim = WITHIN_A_POINT,
) -> str:
    """Return the summary of a report in Markdown.

    Args:
        results: The results.
        panel_tables: Tables of the report, panel by panel.
        figures: Figures to show or link to.
        root_folder: Base folder of the links.
        aim: Requirements for the choice of a setting.
    """
    has_several_models = len(results.models) > 1
    blocks = ["# KV-cache eviction: results", *_overview(results)]
    blocks.append(f"## Cheapest policy within {aim.points} of the full cache")
    for panel in (panel_entry.panel for panel_entry in panel_tables):
        choice_lines = [f"- {choice_line}" for choice_line in lines(panel, results.samples, aim, MARKDOWN)]
        chance_text = NO_VERDICT["silent"].capitalize()
        blocks += [_heading(panel, has_several_models), "\n".join(choice_lines) or chance_text]
        if aim.serving is not None:
            blocks.append(PanelMemory.of(panel, results.samples).note(panel, aim.serving))
    blocks.append("## Scores")
    for panel_entry in panel_tables:
        blocks += [
            _heading(panel_entry.panel, has_several_models),
            *(markdown(panel_table.table) for panel_table in panel_entry.tables),
        ]
    if head_tables := [markdown(table) for table in headroom_tables(headroom(results))]:
        blocks += ["## Headroom", *head_tables]
    blocks += ["## Figures", *_figures(figures, root_folder)]
    blocks += ["## How to read this page", _READING]
    failed_cells = results.cells[results.cells["status"] != "ok"]
    if len(failed_cells):
        blocks += ["## Failed cells", markdown(_failures(failed_cells))]
    blocks += ["## Versions", _versions(results.cells)]
    return "\n\n".join(blocks) + "\n"


# --- what was run ---------------------------------------------------------------------------------


def _overview(results: Results) -> Iterator[str]:
    cells = results.cells
    compressed = cells[cells["policy"] != "full"]
    sample_counts = sorted({int(sample_count) for sample_count in cells.loc[cells["status"] == "ok", "samples"]})
    revisions = cells.drop_duplicates(["model", "model_revision"])
    model_labels = [
        code(model_name) + (f" at {code(revision)}" if revision else "")
        for model_name, revision in zip(revisions["model"], revisions["model_revision"], strict=True)
    ]
    machines = dict.fromkeys(zip(cells["device"], cells["dtype"], cells["attention"], strict=True))
    lengths = sorted(set(cells["length"]))
    length_text = listed([str(length) for length in lengths if length])
    facts = {
        "Model": listed(model_labels),
        "Tasks": _codes(cells["task"]),
        "Policies": _codes(cells["policy"], informed_policies(cells)),
        "Budgets": _codes(compressed["budget"]),
        "Compression moments": _codes(compressed["moment"]),
        "Prompt length": ", ".join([f"{length_text} tokens"] * bool(length_text) + [tokens(0)] * (0 in lengths)),
        "Samples per cell": " to ".join(map(str, dict.fromkeys([*sample_counts[:1], *sample_counts[-1:]]))),
        "Seed": listed([str(seed) for seed in sorted(set(cells["seed"]))]),
        "Run on": listed(
            [f"{word(device)}, {word(dtype)}, {word(attention)} attention" for device, dtype, attention in machines]
        ),
    }
    yield "\n".join(f"- {fact_name}: {fact_value or DASH}" for fact_name, fact_value in facts.items())
    failed_count = int((cells["status"] != "ok").sum())
    yield f"Cells: {len(cells)}" + (f"; **{failed_count} failed**, listed below." if failed_count else ".")
    for remark in remarks(results):
        yield f"> **Note.** {markdown_text(remark)}"


def _codes(column: pd.Series, informed: Collection[str] = ()) -> str:
    return listed([code(name) + INFORMED * (name in informed) for name in dict.fromkeys(column)], 40)


def _heading(panel: Panel, with_model: bool) -> str:
    model_phrase = (Name(panel.model), ", ") if with_model else ()
    return f"### {markdown_text((*model_phrase, panel.title))}"


# --- tables ---------------------------------------------------------------------------------------


def _failures(failed_cells: pd.DataFrame) -> Table:
    failed_rows = records(failed_cells)
    column_names = ("policy", "budget", "moment", "task")
    table_columns: list[Filled] = [
        (Column(column_name), [Name(failed_row[column_name]) for failed_row in failed_rows])
        for column_name in column_names
    ]
    table_columns.append((Column("length"), [tokens(failed_row["length"]) for failed_row in failed_rows]))
    table_columns.append((Column("error"), [short(failed_row["error"], 400) for failed_row in failed_rows]))
    return beside("", table_columns)


# --- figures --------------------------------------------------------------------------------------


def _figures(figures: Sequence[SavedFigure], root_folder: Path) -> Iterator[str]:
    """Yield figures of several tasks and heat maps as images, and fronts of single tasks as links."""
    task_links = []
    for figure in figures:
        links = {path.suffix[1:]: path.relative_to(root_folder).as_posix() for path in figure.paths}
        # Browsers do not show a PDF as an image.
        image_format = next((name for name in ("png", "svg") if name in links and not figure.task), None)
        link_texts = [f"[{name.upper()}]({link})" for name, link in links.items() if name != image_format]
        if figure.task:
            task_links.append(f"{code(figure.task)} ({', '.join(link_texts)})")
            continue
        title = markdown_text(figure.title)
        shown = [f"![{title}]({links[image_format]})"] if image_format else [f"{title}:"]
        yield "\n".join([*shown, *link_texts])
    if task_links:
        yield f"Per task: {', '.join(task_links)}."
    if not figures:
        yield "None: no compressed cache has a score."
        return
    yield (
        "Each point is at the bytes it holds. If policies hold the same bytes, only their error bars are drawn side by "
        "side. The dotted line is the Pareto front; the dashed line and its band are the full cache with its 95% "
        "interval."
    )


# --- versions -------------------------------------------------------------------------------------


def _versions(cells: pd.DataFrame) -> str:
    """Return the versions recorded in the cells, one line per set."""
    version_sets: dict[tuple[str, ...], None] = {}
    for versions_json in dict.fromkeys(cells["versions"].astype(str)):
        try:
            version_record = json.loads(versions_json)
        except ValueError:
            version_record = versions_json
        # Sorted, because the order of versions does not matter.
        version_items = (
            sorted(version_record.items()) if isinstance(version_record, dict) else [("recorded", version_record)]
        )
        version_sets[
            tuple(
                f"{word(version_name)} {_value(version_value)}"
                for version_name, version_value in version_items
                if _says_something(version_value)
            )
        ] = None
    version_lines = ["- " + ", ".join(versions) for versions in version_sets if versions]
    task_rows = cells.drop_duplicates(["task", "task_version", "data_hash"])
    task_texts = [
        f"{code(task_name)} {span(version)} (data {span(str(digest)[:12])})"
        for task_name, version, digest in zip(
            task_rows["task"], task_rows["task_version"], task_rows["data_hash"], strict=True
        )
    ]
    return "\n".join([*version_lines, f"- Tasks: {listed(task_texts, 60)}"])


def _says_something(version_value: object) -> bool:
    """Return whether a recorded value is not empty; `false` is not."""
    return (
        version_value is not None and version_value != {} and version_value != [] and bool(str(version_value).strip())
    )


def _value(version_value: object) -> str:
    return span(version_value if isinstance(version_value, str) else json.dumps(version_value, sort_keys=True))
