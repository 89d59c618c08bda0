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

from kvbench.analysis.retention.figures import Drawn
from kvbench.analysis.retention.measure import Found, OfTask, Shown
from kvbench.analysis.retention.steps import Trace
from kvbench.analysis.scopes import title_of
from kvbench.report.outputs import html, html_text
from kvbench.report.table import Table
from kvbench.report.text import plain
from kvbench.stats import Floats

LEVELS = 10
_LIGHT = {"h": (0, 114, 178), "b": (213, 94, 0)}
"""Colours of what heads hold and of mean retention."""

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
    found: Found,
    command: str,
    tables: Sequence[Table],
    notes: Sequence[str],
    drawn: Sequence[Drawn],
) -> str:
    """Write the page.

    Args:
        found: The result of the analysis.
        command: The command that made it.
        tables: Shown first.
        notes: Lines below them.
        drawn: Figures, whose files exist; they are embedded.
    """
    out = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">",
        f"<title>kvbench retention</title><style>{_STYLE}</style></head><body>",
        "<h1>kvbench retention</h1>",
        f'<p class="note">Made by <code>{_text(command)}</code>.</p>',
    ]
    out += [html(table) for table in tables]
    out += ["<ul>", *(f"<li>{_text(note)}</li>" for note in notes), "</ul>"]
    for number, task in enumerate(found.tasks):
        out.append(f"<h2>{html_text(title_of(task.where))}</h2>")
        out += [_figure(one) for one in drawn if one.task == number]
        for shown in task.shown:
            out += _highlighted(task, shown)
    return "\n".join([*out, "</body></html>"]) + "\n"


def _highlighted(task: OfTask, shown: Shown) -> Iterator[str]:
    """The text, once for each policy with gates and once for each policy and budget."""
    name = f"sample {_text(shown.sample_id)}"
    for policy, log_beta in shown.log_beta.items():
        beta = _beta(log_beta)
        low, high = float(beta.min()), float(beta.max())
        scaled = (beta - low) / (high - low) if high > low else np.ones_like(beta)
        yield f"<h3>{name}: mean retention, <code>{_text(policy)}</code></h3>"
        yield (
            f'<p class="note">From {low:.4f} (white) to {high:.4f}: the mean of beta over layers '
            "and KV heads.</p>"
        )
        yield _spans(shown, "b", scaled, [f"mean beta {b:.4f}" for b in beta])
        yield '<p class="note">By KV head, from beta 0 (white) to 1:</p>'
        yield from _by_head(task, shown, partial(_faded, log_beta))
    for (policy, budget), trace in shown.traces.items():
        heads = trace.gone.shape[0] * trace.gone.shape[1]
        count = trace.held.sum((0, 1)).numpy()
        tips = [f"held by {n} of {heads} KV heads" for n in count]
        if policy in shown.log_beta:
            known = _beta(shown.log_beta[policy])
            tips = [f"{tip}, mean beta {b:.4f}" for tip, b in zip(tips, known, strict=True)]
        yield f"<h3>{name}: held at the end, <code>{_text(policy)}</code> at {_text(budget)}</h3>"
        yield '<p class="note">Darker tokens are held by more KV heads.</p>'
        yield _spans(shown, "h", count / heads, tips)
        yield from _by_head(task, shown, partial(_held, trace))


def _beta(log_beta: Tensor) -> Floats:
    """Mean retention of each position over layers and KV heads, from `[L, H, T]`."""
    found: Floats = log_beta.double().exp().mean((0, 1)).numpy()
    return found


def _spans(shown: Shown, kind: str, levels: Floats, tips: Sequence[str]) -> str:
    """The text, with a background and a tooltip for each token."""
    out = []
    for i, piece in enumerate(shown.pieces):
        level = round(float(levels[i]) * LEVELS)
        special = " s" * (i in shown.special)
        tip = escape(f"{i}: {plain(repr(piece))}, {tips[i]}")
        out.append(f'{_part(shown, i)}<span class="{kind}{level}{special}" title="{tip}">')
        out.append(f"{_piece(piece)}</span>")
    return f'<div class="text">{"".join(out)}</div>'


def _by_head(
    task: OfTask, shown: Shown, classes: Callable[[int, int], tuple[list[str], str]]
) -> Iterator[str]:
    """The text, once for each KV head that is drawn, folded away.

    Args:
        task, shown: The text.
        classes: Gives the style of each token and a summary, for a layer (its position) and a head.
    """
    for layer in task.draw_layers:
        for head in task.draw_heads:
            styles, what = classes(layer, head)
            name = f"layer {task.layers[layer]}, KV head {head}: {what}"
            text = _runs(shown, styles)
            yield f'<details><summary>{name}</summary><div class="text">{text}</div></details>'


def _runs(shown: Shown, styles: Sequence[str]) -> str:
    """The text with a style for each token; neighbours with the same style share a span."""
    runs: list[str] = []
    for i, piece in enumerate(shown.pieces):
        part = _part(shown, i)
        if i and styles[i] == styles[i - 1] and not part:
            runs[-1] += _piece(piece)
        else:
            runs.append(f'{part}<span class="{styles[i]}">{_piece(piece)}')
    return "</span>".join(runs) + "</span>"


def _held(trace: Trace, layer: int, head: int) -> tuple[list[str], str]:
    own = trace.held[layer, head].tolist()
    return ["k" if held else "g" for held in own], f"{sum(own)} of {len(own)} tokens"


def _faded(log_beta: Tensor, layer: int, head: int) -> tuple[list[str], str]:
    own = log_beta[layer, head].double().exp()
    levels = (own * LEVELS).round().int().tolist()
    return [f"b{level}" for level in levels], f"beta from {own.min():.4f} to {own.max():.4f}"


def _part(shown: Shown, i: int) -> str:
    """A mark at the beginning of each part of the text."""
    new = shown.part(i)
    if i and new == shown.part(i - 1):
        return ""
    return f'<span class="part">[{new}] </span>'


def _piece(piece: str) -> str:
    """A token's text, with unprintable characters spelled out; a line break also starts a line."""
    shown = "".join(plain(c) + "\n" * (c == "\n") for c in piece)
    return escape(shown)


def _text(text: object) -> str:
    return escape(plain(text))


def _figure(drawn: Drawn) -> str:
    path: Path = next(p for p in drawn.paths if p.suffix == ".png")
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    caption = _text(drawn.title)
    image = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"
