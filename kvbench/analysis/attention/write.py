"""Attention maps and variance by layer, from a grid to tables and figures.

Wan, Wu, Zhang and others: D2O, arXiv 2406.13035: maps of a prompt's attention (figures 1 and 9), and the variance of
accumulated attention over tokens (section 4.1, figure 4): with `A` of a head in layer `l`,
`F_l = mean over heads of Var_i(sum_q A[q, i])`. Dense attention has a small variance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvbench.analysis.attention.observer import AttentionMap
from kvbench.analysis.attention.options import MOST_LAYERS, AttentionOptions
from kvbench.analysis.choosing import select_numbers
from kvbench.analysis.common import analysis_runner, contexts, prompt_name, prompts_grid, stages
from kvbench.analysis.output import AnalysisOutput, Findings, prepare_output, require_results, write_all
from kvbench.analysis.summary import notes
from kvbench.engine.models import full_layer_ids
from kvbench.plugin import AttentionMass
from kvbench.progress import Reporter
from kvbench.report.figure_flags import DEFAULT_FLAGS, FigureFlags
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.runs.grid import Grid
from kvbench.stats import Floats
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.plot_style import (
    COLUMN,
    PAGE,
    SEQUENTIAL,
    lay_out_figure,
    legend_handle,
    marker_options,
    marker_styles,
    plot_style,
    save,
)
from kvbench.tables.table import Column, Name, Table, TableRow
from kvbench.tables.text import counted, short, slug

SAMPLES = 4
_SCOPE = ["model", "task", "length"]
_MOST_ACROSS = 4
_LEAST_EXPONENT = -4
"""Weights below its power of ten share the first colour of a map."""
_MASS = AttentionMass()
_READING = (
    "Variance: of the attention that a token accumulates over all queries of the prompt, over tokens; mean over query "
    "heads and prompts. The maps show the first prompt of each task, averaged over query heads: queries down, keys "
    "across, mean weight per visible pair."
)

Maps = dict[tuple[str, str, int], dict[int, Floats]]
"""Maps `[bins, bins]` by model, task and length, and by layer."""


def write_attention(
    grid_options: Mapping[str, Any],
    reporter: Reporter,
    *,
    options: AttentionOptions,
    figures: FigureFlags = DEFAULT_FLAGS,
    command: str = "kvbench analyze attention",
) -> AnalysisOutput:
    """Measure the attention of prompts and write `layers` and `maps.parquet`.

    Args:
        grid_options: Grid options without policies, in the format of `Grid.from_dict`.
        reporter: Progress reporter.
        options: All other options.
        figures: Options of the figures.
        command: Command shown in the summary.

    Raises:
        UserError: A value in the grid is unknown or out of range, or the output is not writable.
    """
    grid = prompts_grid({"samples": SAMPLES, **grid_options})
    folder, figure_settings = prepare_output(grid, "attention", figures, options.to_dict())
    layers, maps = measure_attention(grid, options, reporter)
    require_results(layers, {})
    cells = [
        {**dict(zip(_SCOPE, scope, strict=True)), "layer": layer, "query_bin": row, "key_bin": column, "weight": weight}
        for scope, by_layer in maps.items()
        for layer, attention_map in by_layer.items()
        for (row, column), weight in np.ndenumerate(attention_map)
        if np.isfinite(weight)
    ]
    findings = Findings(
        {"layers": layers, "maps": pd.DataFrame(cells)},
        list(attention_tables(layers)),
        notes(layers, {}, [_READING]),
        draw_attention(layers, maps, folder / "figures", figure_settings),
        {},
    )
    return write_all(folder, grid, {"analysis": "attention", **options.to_dict()}, findings, command)


def measure_attention(grid: Grid, options: AttentionOptions, reporter: Reporter) -> tuple[pd.DataFrame, Maps]:
    """Prefill every prompt of a grid once with the full cache.

    Returns:
        A row per prompt and layer with `variance` and `tokens`, and the maps of the first prompt of every task.

    Raises:
        UserError: A value in the grid is unknown or out of range, or a layer does not exist.
    """
    rows: list[dict[str, Any]] = []
    maps: Maps = {}
    need = AttentionMap(options.bins)
    for stage in stages(grid, reporter.message):
        with analysis_runner(stage, grid, reporter, {}) as runner:
            layer_ids = full_layer_ids(runner.model)
            drawn = select_numbers(options.layers, layer_ids, "layers", MOST_LAYERS)
            reporter.start(sum(len(job.prompts) for job in stage.jobs), stage.model)
            for job in stage.jobs:
                scope = (stage.model, job.task.name, job.task.length)
                for prompts in contexts(job):
                    for prompt in prompts:
                        is_first = scope not in maps
                        needs = {_MASS, need} if is_first else {_MASS}
                        prefix, _ = runner.prefill(prompt.ids, needs, prompt.media)
                        for layer_index, layer in enumerate(layer_ids):
                            mass = prefix.cache.observers[_MASS].read(layer_index)[0].double()
                            variance = float(mass.var(-1, correction=0).mean())
                            rows.append(
                                dict(zip(_SCOPE, scope, strict=True))
                                | {"sample_id": prompt_name(prompt), "layer": layer, "variance": variance}
                                | {"tokens": len(prompt.ids)}
                            )
                        if is_first:
                            observer = prefix.cache.observers[need]
                            maps[scope] = {
                                layer: observer.read(layer_ids.index(layer)).cpu().numpy() for layer in drawn
                            }
                        reporter.advance()
    return pd.DataFrame(rows), maps


def attention_tables(layers: pd.DataFrame) -> Iterator[Table]:
    """Yield one table: the variance of every layer, a row per model, task and length."""
    layer_ids = sorted(set(layers["layer"]))
    columns = [Column("model"), Column("task"), Column("tokens", NumberFormat.COUNT)]
    columns += [Column(f"layer {layer}", NumberFormat.NUMBER) for layer in layer_ids]
    table_rows = []
    for _, scope_rows in layers.groupby(_SCOPE, sort=False):
        means = scope_rows.groupby("layer")["variance"].mean()
        names = (Name(str(scope_rows["model"].iloc[0])), Name(str(scope_rows["task"].iloc[0])))
        variances = [float(means[layer]) if layer in means.index else None for layer in layer_ids]
        table_rows.append(TableRow((*names, float(scope_rows["tokens"].mean()), *variances)))
    yield Table("variance of accumulated attention over tokens", tuple(columns), tuple(table_rows))


def draw_attention(
    layers: pd.DataFrame, maps: Maps, folder: Path, options: FigureOptions = DEFAULT_FIGURES
) -> list[Path]:
    """Draw the maps of every task, and the variance by layer of all.

    Args:
        layers: A row per prompt and layer.
        maps: Maps by model, task and length, and by layer.
        folder: Existing output folder.
        options: Formats and size of the figures.

    Returns:
        The files written.
    """
    several = {column: layers[column].nunique() > 1 for column in _SCOPE}
    paths: list[Path] = []
    with plot_style():
        for scope, by_layer in maps.items():
            parts = [str(part) for name, part in zip(_SCOPE, scope, strict=True) if name == "task" or several[name]]
            title = f"attention weights, {short(str(scope[1]))}, mean over query heads · {short(str(scope[0]))}"
            paths += _draw_maps(by_layer, title, folder / f"maps-{'-'.join(map(slug, parts))}", options)
        if layers["layer"].nunique() > 1:
            paths += _draw_variance(layers, folder / "variance", several, options)
    return paths


def _draw_maps(by_layer: Mapping[int, Floats], title: str, stem: Path, options: FigureOptions) -> list[Path]:
    across = min(len(by_layer), _MOST_ACROSS if (options.width or PAGE) > COLUMN else 2)
    width = options.width or (COLUMN if across == 1 else PAGE)
    panel = (width - 0.5 - 0.75 - 0.1 * (across - 1)) / across
    layout = lay_out_figure(
        -(-len(by_layer) // across),
        across,
        title=title * options.has_title,
        width=width,
        panel_height=panel,
        x_label="key, % of the prompt",
        y_label="query, % of the prompt",
        left_margin=0.5,
        top_margin=0.2,
        panel_gap=(0.1, 0.22),
        right_margin=0.75,
        sharex=True,
        sharey=True,
    )
    for axes, (layer, attention_map) in zip(layout.used(len(by_layer)), by_layer.items(), strict=True):
        image = axes.imshow(
            np.ma.masked_invalid(np.log10(attention_map.clip(10.0**_LEAST_EXPONENT))),
            vmin=_LEAST_EXPONENT,
            vmax=0,
            cmap=SEQUENTIAL,
            interpolation="nearest",
            aspect="auto",
            extent=(0, 100, 100, 0),
        )
        axes.set_title(f"layer {layer}", loc="left", y=1.0, pad=2)
        axes.set_xticks([0, 50])
        axes.set_yticks([0, 50, 100])
    layout.colour_bar(image, [_LEAST_EXPONENT, 0], "log10 of attention")
    return save(layout.figure, stem, options.formats)


def _draw_variance(layers: pd.DataFrame, stem: Path, several: Mapping[str, bool], options: FigureOptions) -> list[Path]:
    lines = []
    for scope, scope_rows in layers.groupby(_SCOPE, sort=False):
        assert isinstance(scope, tuple)
        parts = [str(part) for name, part in zip(_SCOPE, scope, strict=True) if several[name]]
        lines.append((", ".join(parts) or str(scope[1]), scope_rows))
    styles = marker_styles([name for name, _ in lines])
    prompts = counted(int(layers.groupby(_SCOPE)["sample_id"].nunique().min()), "prompt")
    layout = lay_out_figure(
        1,
        1,
        title=f"variance of accumulated attention over tokens, mean over query heads and {prompts}" * options.has_title,
        width=options.width or COLUMN,
        panel_height=1.9,
        x_label="layer",
        y_label="variance, log scale",
        labels=[name for name, _ in lines],
        handles=[legend_handle(styles[name]) for name, _ in lines],
        left_margin=0.6,
    )
    axes = layout.axes[0, 0]
    for name, scope_rows in lines:
        means = scope_rows.groupby("layer")["variance"].mean()
        axes.plot(means.index, means, **marker_options(styles[name]))
    axes.set_yscale("log")
    lowest, highest = axes.get_ylim()
    digits = [1.0] if highest > 100 * lowest else [1.0, 2.0, 5.0]  # a narrow range needs more labels
    axes.yaxis.set_major_locator(LogLocator(10, digits, numticks=9))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.locator_params(axis="x", integer=True)
    return save(layout.figure, stem, options.formats)
