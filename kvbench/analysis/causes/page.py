"""One HTML page per lost sample: the verdict of every cell, the prompt around the evidence, and all interventions.

A page has no scripts and loads nothing. Everything that came from a prompt, a model or a user is escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from kvbench.analysis.causes.diagnosis import RIGHT, VERDICTS
from kvbench.analysis.causes.evidence import column_mask
from kvbench.analysis.causes.study import CausesResult, ExaminedSample
from kvbench.analysis.causes.trials import Trials, named
from kvbench.analysis.scopes import scope_heading
from kvbench.files import replacing
from kvbench.report.frames import INFORMED
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.outputs import html, html_text
from kvbench.tables.table import Column, Name, beside
from kvbench.tables.text import plain, slug

_AROUND = 60
"""Tokens shown on either side of the evidence."""
_LEVELS = 10
_STYLE = """
body { font: 14px/1.45 sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; border-top: 1px solid #ccc; padding-top: 1em }
table { border-collapse: collapse; margin: .5em 0 1em } caption { text-align: left; font-weight: bold }
th, td { padding: .15em .6em; text-align: right; border-bottom: 1px solid #e5e5e5 }
th.text, td.text { text-align: left } .note { color: #555 }
.text { font: 13px/1.7 monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid #ddd; padding: .7em }
.e { border-bottom: 2px solid #d55e00 } .t { border-bottom: 4px double #d55e00 }
""" + "".join(f".h{n} {{ background: rgba(0,114,178,{0.75 * n / _LEVELS:.3f}) }}\n" for n in range(_LEVELS + 1))


def write_pages(result: CausesResult, folder: Path) -> list[Path]:
    """Write a page for every sample that some cell loses.

    Args:
        result: Result of the analysis.
        folder: Folder of the pages; created if needed.

    Returns:
        The files written.
    """
    groups: dict[tuple[object, ...], list[ExaminedSample]] = {}
    for sample in result.samples:
        labels, request = sample.cell.labels, sample.prompt.request
        place: tuple[object, ...] = (
            labels["model"],
            labels["task"],
            labels["length"],
            request.sample_id,
            request.question_id,
        )
        groups.setdefault(place, []).append(sample)
    paths = []
    for place, samples in groups.items():
        if all(sample.verdict == RIGHT for sample in samples):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{slug('-'.join(str(part) for part in place))}.html"
        with replacing(path) as temporary_path:
            temporary_path.write_text(sample_page(samples, result.pieces[place], result), encoding="utf-8")
        paths.append(path)
    return paths


def sample_page(samples: Sequence[ExaminedSample], pieces: Sequence[str], result: CausesResult) -> str:
    """Render the page of one sample.

    Args:
        samples: The sample under every cell.
        pieces: Text of every token of the prompt.
        result: The whole result, for the numbers of layers.
    """
    first, request = samples[0], samples[0].prompt.request
    labels = dict(first.cell.labels)
    if len({sample.cell.labels["moment"] for sample in samples}) > 1:
        del labels["moment"]  # each section names its own
    title = f"{request.task}, sample {request.sample_id}" + f"/{request.question_id}" * bool(request.question_id)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        f'<p class="note">{html_text(scope_heading(labels))}</p>',
        f"<p>Question: <code>{_text(request.question)}</code></p>",
        f"<p>Reference answer: <code>{_text(', '.join(request.target))}</code></p>",
        f"<p>Full cache: <code>{_text(first.full.response)}</code></p>",
    ]
    for sample in samples:
        if sample.verdict != RIGHT:
            parts += _cell(sample, pieces, result.layers[sample.cell.model])
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _cell(sample: ExaminedSample, pieces: Sequence[str], layers: Sequence[int]) -> Iterator[str]:
    """Yield the part of one cell."""
    heading = f"{sample.cell.budget}, moment {sample.cell.labels['moment']}: {sample.verdict}"
    mark = INFORMED * sample.cell.policy.is_informed
    yield f"<h2><code>{_text(sample.cell.policy)}</code>{mark} at {_text(heading)}</h2>"
    yield f"<p>Its answer: <code>{_text(sample.own.response)}</code></p>"
    meaning = VERDICTS[sample.verdict]
    yield f'<p class="note">{_text(meaning[0].upper() + meaning[1:])}.</p>'
    if sample.diagnosis is None:
        return
    if sample.diagnosis.heads or sample.diagnosis.layers:
        found = sample.diagnosis.heads or sample.diagnosis.layers
        units = [(layers[unit[0]], *unit[1:]) for unit in found]
        kind = "KV heads (layer.head)" if sample.diagnosis.heads else "layers"
        yield f"<p>Smallest set of {kind} that brings the answer back: <code>{named(units)}</code></p>"
    if sample.diagnosis.anchors:
        yield f"<p>Missing besides the evidence: {_text(', '.join(sample.diagnosis.anchors))}</p>"
    if sample.evidence.spans:
        yield '<p class="note">Evidence is underlined, the answer doubly. Darker tokens are held by more heads.</p>'
        yield _passages(sample, pieces)
    yield _trials_table("Interventions", sample.diagnosis.trials, layers)
    if sample.swap is not None:
        yield _trials_table(f"Against the other policy: {sample.swap.explained}", sample.swap.trials, layers)


def _passages(sample: ExaminedSample, pieces: Sequence[str]) -> str:
    """Render the tokens around the evidence, coloured by the share of heads that hold them."""
    columns = min(sample.kept.shape[-1], len(pieces))
    held = sample.kept[..., :columns].double().mean((0, 1))
    evidence, target = (column_mask(spans, columns) for spans in (sample.evidence.spans, sample.evidence.target_spans))
    shown = sorted(
        {
            column
            for start, stop in sample.evidence.spans
            for column in range(max(0, start - _AROUND), min(columns, stop + _AROUND))
        }
    )
    spans = []
    for index, column in enumerate(shown):
        if column and (not index or shown[index - 1] != column - 1):
            spans.append("…")
        style = f"h{round(float(held[column]) * _LEVELS)}" + " e" * bool(evidence[column]) + " t" * bool(target[column])
        tooltip = f"{column}: held by {float(held[column]):.0%} of the KV heads"
        printable = "".join(plain(character) + "\n" * (character == "\n") for character in pieces[column])
        spans.append(f'<span class="{style}" title="{tooltip}">{escape(printable)}</span>')
    if shown and shown[-1] < columns - 1:
        spans.append("…")
    return f'<div class="text">{"".join(spans)}</div>'


def _trials_table(title: str, trials: Trials, layers: Sequence[int]) -> str:
    """Render the table of interventions."""
    rows = trials.rows
    units = [named([(layers[unit[0]], *unit[1:]) for unit in row["units"]]) for row in rows]
    return html(
        beside(
            title,
            [
                (Column("intervention"), [row["intervention"] for row in rows]),
                (Column("units"), [Name(unit) if unit else "" for unit in units]),
                (Column("entries", NumberFormat.COUNT), [row["entries"] for row in rows]),
                (Column("right"), ["yes" if row["right"] else "no" for row in rows]),
                (Column("gain", NumberFormat.NUMBER, "nats"), [row["gain"] for row in rows]),
                (Column("margin", NumberFormat.NUMBER), [row["margin"] for row in rows]),
            ],
        )
    )


def _text(content: object) -> str:
    return escape(plain(content))
