"""One HTML page with tables, figures, and the text with its retained tokens highlighted.

The page is self-contained: it has no scripts and loads nothing, and its content security policy
forbids both. Everything that came from a text, a tokenizer or a user is escaped.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path

import numpy as np
from torch import Tensor

from kvbench.analysis.retention.plots import RetentionFigure
from kvbench.analysis.retention.steps import Trace
from kvbench.analysis.retention.survival import RetentionResult, RetentionText, TaskRetention
from kvbench.analysis.scopes import scope_heading
from kvbench.stats import Floats
from kvbench.tables.outputs import html, html_text
from kvbench.tables.table import Table
from kvbench.tables.text import plain

LEVELS = 10
_LIGHT = {"h": (0, 114, 178), "b": (213, 94, 0)}
"""Colours of held tokens and of mean retention."""

_STYLE = """
body { font: 14px/1.45 sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.25em; border-top: 1px solid #ccc; padding-top: 1em }
h3 { font-size: 1.05em } table { border-collapse: collapse; margin: .5em 0 1em }
caption { text-align: left; font-weight: bold; padding-bottom: .3em }
th, td { padding: .15em .6em; text-align: right; border-bottom: 1px solid #e5e5e5 }
th.text, td.text { text-align: left } th[colspan] { text-align: center }
img { max-width: 100%; height: auto } figure { margin: 1em 0 } figcaption { color: #555 }
.text { font: 13px/1.7 monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1px solid #ddd; padding: .7em; max-height: 40em; overflow-y: auto }
.s { outline: 1px dotted #777 } .part { color: #777; font: italic 12px sans-serif }
.k { background: #0072b2; color: #fff } .g { color: #aaa } .note { color: #555 }
""" + "".join(
    f".{kind}{n} {{ background: rgba({r},{g},{b},{0.75 * n / LEVELS:.3f}) }}\n"
    for kind, (r, g, b) in _LIGHT.items()
    for n in range(LEVELS + 1)
)


def page(
    result: RetentionResult,
    command: str,
    tables: Sequence[Table],
    notes: Sequence[str],
    figures: Sequence[RetentionFigure],
) -> str:
    """Render the page.

    Args:
        result: Result of the analysis.
        command: Command shown on the page.
        tables: Tables, shown first.
        notes: Lines below the tables.
        figures: Figures to embed; their files exist.
    """
    html_parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        f"<title>kvbench retention</title><style>{_STYLE}</style></head><body>",
        "<h1>kvbench retention</h1>",
        f'<p class="note">Made by <code>{_text(command)}</code>.</p>',
    ]
    html_parts += [html(table) for table in tables]
    html_parts += ["<ul>", *(f"<li>{_text(note)}</li>" for note in notes), "</ul>"]
    for task_number, task in enumerate(result.tasks):
        html_parts.append(f"<h2>{html_text(scope_heading(task.where))}</h2>")
        html_parts += [_figure(figure) for figure in figures if figure.task == task_number]
        for sample in task.samples:
            html_parts += _highlighted(task, sample)
    return "\n".join([*html_parts, "</body></html>"]) + "\n"


def _highlighted(task: TaskRetention, sample: RetentionText) -> Iterator[str]:
    """Yield the text once per policy with gates and once per policy and budget."""
    name = f"sample {_text(sample.sample_id)}"
    for policy, log_beta in sample.log_beta.items():
        mean_beta = _beta(log_beta)
        low, high = float(mean_beta.min()), float(mean_beta.max())
        scaled_beta = (mean_beta - low) / (high - low) if high > low else np.ones_like(mean_beta)
        yield f"<h3>{name}: mean retention, <code>{_text(policy)}</code></h3>"
        yield (f'<p class="note">From {low:.4f} (white) to {high:.4f}: the mean of beta over layers and KV heads.</p>')
        yield _spans(sample, "b", scaled_beta, [f"mean beta {beta_value:.4f}" for beta_value in mean_beta])
        yield '<p class="note">By KV head, from beta 0 (white) to 1:</p>'
        yield from _by_head(task, sample, partial(_faded, log_beta))
    for (policy, budget), trace in sample.traces.items():
        heads = trace.eviction_steps.shape[0] * trace.eviction_steps.shape[1]
        holder_counts = trace.held.sum((0, 1)).numpy()
        tooltips = [f"held by {holders} of {heads} KV heads" for holders in holder_counts]
        if policy in sample.log_beta:
            token_beta = _beta(sample.log_beta[policy])
            tooltips = [
                f"{tooltip}, mean beta {beta_value:.4f}"
                for tooltip, beta_value in zip(tooltips, token_beta, strict=True)
            ]
        yield f"<h3>{name}: held at the end, <code>{_text(policy)}</code> at {_text(budget)}</h3>"
        yield '<p class="note">Darker tokens are held by more KV heads.</p>'
        yield _spans(sample, "h", holder_counts / heads, tooltips)
        yield from _by_head(task, sample, partial(_held, trace))


def _beta(log_beta: Tensor) -> Floats:
    """Return the mean retention of each position over layers and KV heads, from `[L, H, T]`."""
    mean_beta: Floats = log_beta.double().exp().mean((0, 1)).numpy()
    return mean_beta


def _spans(sample: RetentionText, style: str, levels: Floats, tooltips: Sequence[str]) -> str:
    """Render the text with a background and a tooltip per token."""
    html_parts = []
    for position, piece in enumerate(sample.pieces):
        level = round(float(levels[position]) * LEVELS)
        special = " s" * (position in sample.special)
        tooltip = escape(f"{position}: {plain(repr(piece))}, {tooltips[position]}")
        html_parts.append(f'{_part(sample, position)}<span class="{style}{level}{special}" title="{tooltip}">')
        html_parts.append(f"{_piece(piece)}</span>")
    return f'<div class="text">{"".join(html_parts)}</div>'


def _by_head(
    task: TaskRetention, sample: RetentionText, styler: Callable[[int, int], tuple[list[str], str]]
) -> Iterator[str]:
    """Yield the text once per drawn KV head, collapsed.

    Args:
        task, sample: The text.
        styler: Returns the style of each token and a summary, for a layer (its position) and a head.
    """
    for layer in task.draw_layers:
        for head in task.draw_heads:
            styles, summary = styler(layer, head)
            heading = f"layer {task.layers[layer]}, KV head {head}: {summary}"
            markup = _runs(sample, styles)
            yield f'<details><summary>{heading}</summary><div class="text">{markup}</div></details>'


def _runs(sample: RetentionText, styles: Sequence[str]) -> str:
    """Render the text with a style per token; neighbours with the same style share a span."""
    spans: list[str] = []
    for position, piece in enumerate(sample.pieces):
        part_mark = _part(sample, position)
        if position and styles[position] == styles[position - 1] and not part_mark:
            spans[-1] += _piece(piece)
        else:
            spans.append(f'{part_mark}<span class="{styles[position]}">{_piece(piece)}')
    return "</span>".join(spans) + "</span>"


def _held(trace: Trace, layer: int, head: int) -> tuple[list[str], str]:
    held_mask = trace.held[layer, head].tolist()
    return ["k" if is_held else "g" for is_held in held_mask], f"{sum(held_mask)} of {len(held_mask)} tokens"


def _faded(log_beta: Tensor, layer: int, head: int) -> tuple[list[str], str]:
    head_beta = log_beta[layer, head].double().exp()
    levels = (head_beta * LEVELS).round().int().tolist()
    return [f"b{level}" for level in levels], f"beta from {head_beta.min():.4f} to {head_beta.max():.4f}"


def _part(sample: RetentionText, position: int) -> str:
    """Return a mark at the beginning of each part of the text, else ""."""
    part_name = sample.part(position)
    if position and part_name == sample.part(position - 1):
        return ""
    return f'<span class="part">[{part_name}] </span>'


def _piece(piece: str) -> str:
    """Render a token's text, with unprintable characters escaped; a line break also starts a line."""
    printable = "".join(plain(character) + "\n" * (character == "\n") for character in piece)
    return escape(printable)


def _text(content: object) -> str:
    return escape(plain(content))


def _figure(figure: RetentionFigure) -> str:
    path: Path = next(candidate for candidate in figure.paths if candidate.suffix == ".png")
    encoded = base64.b64encode(path.read_bytes()).decode("ascii")
    caption = _text(figure.title)
    image = f'<img alt="{caption}" src="data:image/png;base64,{encoded}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
