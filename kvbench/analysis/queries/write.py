"""The autoregression of queries, from a grid to tables and figures (arXiv 2605.09649, figure 8)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from kvbench.analysis.common import analysis_runner, prompt_name, prompts_grid, stages
from kvbench.analysis.output import AnalysisOutput, Findings, prepare_output, write_all
from kvbench.analysis.queries.autoregression import Autoregression, fit_autoregression, principal_directions
from kvbench.analysis.queries.options import QueryOptions
from kvbench.analysis.queries.rollouts import sample_queries
from kvbench.analysis.summary import notes
from kvbench.engine.decode import end_tokens
from kvbench.engine.models import full_layer_ids, model_info
from kvbench.errors import UserError
from kvbench.progress import Reporter
from kvbench.report.figure_flags import DEFAULT_FLAGS, FigureFlags
from kvbench.report.figure_options import DEFAULT_FIGURES, FigureOptions
from kvbench.runs.grid import Grid
from kvbench.stats import Floats
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.plot_style import GREY, PAGE, PALE, lay_out_figure, plot_style, save
from kvbench.tables.table import Column, Name, Table, TableRow
from kvbench.tables.text import short, slug

SAMPLES = 10
_BLUE, _RED, _GREEN = "#0072B2", "#D55E00", "#009E73"
_LEAST_PANEL = 1.6  # inches
_MOST_PATHS = 40
"""Running means drawn; more would cover each other."""
_READING = (
    "Queries are those of the generated tokens, before RoPE, on the leading principal directions of the training "
    "answers of all prompts. A model is fitted per prompt. Radius: spectral radius of A; below 1 the process is "
    "stable and reverts to its mean. R²: variance of the next state that the model predicts one step ahead, on the "
    "other answers.",
    "Tail: the largest magnitude of a whitened innovation, component by component. Gaussian and exponential tails have "
    "the same variance; log-survival between them is sub-exponential.",
)


@dataclass(frozen=True)
class FittedPrompt:
    """The model of one prompt's answers.

    Attributes:
        where: Model, task, length, layer, head and sample.
        fit: The fitted process.
        train, held_out: States of the answers on the principal directions, `[tokens, m]` each.
        variance_share: Share of the variance of all training queries that the directions hold.
    """

    where: dict[str, Any]
    fit: Autoregression
    train: list[Floats]
    held_out: list[Floats]
    variance_share: float

    @property
    def innovations(self) -> Floats:
        """Return the whitened innovations of the answers that were not fitted, `[steps, m]`."""
        return self.fit.whitened(self.held_out)


def write_queries(
    grid_options: Mapping[str, Any],
    reporter: Reporter,
    *,
    options: QueryOptions,
    figures: FigureFlags = DEFAULT_FLAGS,
    command: str = "kvbench analyze queries",
) -> AnalysisOutput:
    """Fit the queries of sampled answers and write `prompts`, `eigenvalues` and `innovations.parquet`.

    Args:
        grid_options: Grid options without policies, in the format of `Grid.from_dict`.
        reporter: Progress reporter.
        options: All other options.
        figures: Options of the figures.
        command: Command shown in the summary.

    Raises:
        UserError: A value is unknown or out of range, the answers are too short to fit, or the output is not writable.
    """
    grid = prompts_grid({"samples": SAMPLES, **grid_options})
    folder, figure_settings = prepare_output(grid, "queries", figures, options.to_dict())
    fitted = fit_queries(grid, options, reporter)
    prompts = pd.DataFrame([_row(prompt) for prompt in fitted])
    eigenvalues = pd.DataFrame(
        [
            {**prompt.where, "real": float(value.real), "imaginary": float(value.imag)}
            for prompt in fitted
            for value in prompt.fit.eigenvalues
        ]
    )
    innovations = pd.concat(
        [
            pd.DataFrame(
                prompt.innovations, columns=[f"component_{index}" for index in range(options.components)]
            ).assign(**prompt.where)
            for prompt in fitted
        ],
        ignore_index=True,
    )
    findings = Findings(
        {"prompts": prompts, "eigenvalues": eigenvalues, "innovations": innovations},
        [queries_table(prompts)],
        notes(prompts, {}, _READING),
        draw_queries(fitted, folder / "figures", figure_settings),
        {},
    )
    return write_all(folder, grid, {"analysis": "queries", **options.to_dict()}, findings, command)


def fit_queries(grid: Grid, options: QueryOptions, reporter: Reporter) -> list[FittedPrompt]:
    """Sample answers to every prompt of a grid and fit a model per prompt.

    Raises:
        UserError: As in `write_queries`.
    """
    fitted: list[FittedPrompt] = []
    for stage in stages(grid, reporter.message):
        with analysis_runner(stage, grid, reporter, {}) as runner:
            layer_ids = full_layer_ids(runner.model)
            layer = layer_ids[len(layer_ids) // 2] if options.layer is None else options.layer
            heads = model_info(runner.model).query_heads
            if layer not in layer_ids or options.head >= heads:
                known = ", ".join(map(str, layer_ids))
                raise UserError(
                    f"{stage.model} has no query head {options.head} in a full-attention layer {layer}; its layers are "
                    f"{known}, its heads 0 to {heads - 1}"
                )
            ends = frozenset(end_tokens(runner.model, stage.tokenizer))
            reporter.start(sum(len(job.prompts) for job in stage.jobs), stage.model)
            for job in stage.jobs:
                answers: dict[str, list[Floats]] = {}
                for prompt in job.prompts:
                    if prompt.media:
                        raise UserError(f"{job.task.name} shows images; the queries of answers are of text tasks")
                    answers[prompt_name(prompt)] = sample_queries(
                        runner,
                        prompt,
                        layer_ids.index(layer),
                        options.head,
                        count=options.rollouts,
                        new_tokens=options.new_tokens,
                        temperature=options.temperature,
                        end_token_ids=ends,
                        seed=grid.seed,
                    )
                    reporter.advance()
                where = {"model": stage.model, "task": job.task.name, "length": job.task.length}
                fitted += _fit_task(where | {"layer": layer, "head": options.head}, answers, options)
    return fitted


def _fit_task(where: dict[str, Any], answers: Mapping[str, list[Floats]], options: QueryOptions) -> list[FittedPrompt]:
    """Fit the answers of one task, which share the principal directions."""
    train_count = min(options.rollouts - 1, max(1, round(options.train_share * options.rollouts)))
    training = [path for paths in answers.values() for path in paths[:train_count] if len(path)]
    if not training:
        raise UserError("every sampled answer is empty; use another --task or --temperature")
    states = np.concatenate(training)
    if min(states.shape) < options.components:
        raise UserError(
            f"--components {options.components}: {len(states)} queries of {states.shape[1]} channels have fewer; "
            f"use at most {min(states.shape)}"
        )
    directions, variance_share = principal_directions(states, options.components)
    fitted = []
    for sample, paths in answers.items():
        projected = [path @ directions if len(path) else np.zeros((0, options.components)) for path in paths]
        train, held_out = projected[:train_count], projected[train_count:]
        fitted.append(
            FittedPrompt(where | {"sample_id": sample}, fit_autoregression(train), train, held_out, variance_share)
        )
    return fitted


def _row(prompt: FittedPrompt) -> dict[str, Any]:
    mean, covariance = prompt.fit.stationary()
    return {
        **prompt.where,
        "radius": prompt.fit.radius,
        "explained": prompt.fit.explained(prompt.held_out),
        "variance_share": prompt.variance_share,
        "steps": sum(max(0, len(path) - 1) for path in prompt.train),
        "tail": float(np.abs(prompt.innovations).max()),
        "mean_0": float(mean[0]),
        "sd_0": math.sqrt(covariance[0, 0]) if np.isfinite(covariance[0, 0]) else math.nan,
    }


def queries_table(prompts: pd.DataFrame) -> Table:
    """Return a table with a row per model and task: medians over prompts, and how many fits are stable."""
    columns = (
        *(Column("model"), Column("task"), Column("layer", NumberFormat.COUNT), Column("head", NumberFormat.COUNT)),
        *(Column("prompts", NumberFormat.COUNT), Column("stable", NumberFormat.COUNT)),
        *(Column("radius", NumberFormat.NUMBER), Column("R²", NumberFormat.NUMBER)),
        *(Column("variance in components", NumberFormat.PERCENT), Column("tail", NumberFormat.NUMBER)),
    )
    rows = []
    for _, group in prompts.groupby(["model", "task", "length"], sort=False):
        first = group.iloc[0]
        rows.append(
            TableRow(
                (
                    Name(str(first["model"])),
                    Name(str(first["task"])),
                    int(first["layer"]),
                    int(first["head"]),
                    len(group),
                    int((group["radius"] < 1).sum()),
                    float(group["radius"].median()),
                    float(group["explained"].median()),
                    float(first["variance_share"]),
                    float(group["tail"].max()),
                )
            )
        )
    return Table("autoregression of queries, medians over prompts", columns, tuple(rows))


def draw_queries(fitted: list[FittedPrompt], folder: Path, options: FigureOptions = DEFAULT_FIGURES) -> list[Path]:
    """Draw eigenvalues, running means and tails of every model and task (figure 8 of the paper).

    Args:
        fitted: The fitted prompts.
        folder: Existing output folder.
        options: Formats and size of the figures.

    Returns:
        The files written.
    """
    paths: list[Path] = []
    groups: dict[tuple[Any, ...], list[FittedPrompt]] = {}
    for prompt in fitted:
        groups.setdefault(tuple(prompt.where[key] for key in ("model", "task", "length")), []).append(prompt)
    with plot_style():
        for (model, task, length), prompts in groups.items():
            layer, head = (prompts[0].where[key] for key in ("layer", "head"))
            handles = {
                "one answer": Line2D([], [], color=PALE),
                "mean of answers, measured tail": Line2D([], [], color=_BLUE),
                "fitted mean and ±σ, Gaussian tail": Line2D([], [], color=_RED, ls="--"),
                "exponential tail": Line2D([], [], color=_GREEN, ls=":"),
            }
            across = options.panels_across(3, margins=0.6, gap=0.5, least_width=_LEAST_PANEL)
            layout = lay_out_figure(
                -(-3 // across),
                across,
                title=f"queries of layer {layer}, head {head} · {short(str(task))} · {short(str(model))}"
                * options.has_title,
                width=options.width or PAGE,
                panel_height=1.75,
                x_label="",
                y_label="",
                labels=list(handles),
                handles=list(handles.values()),
                left_margin=0.5,
                top_margin=0.2,
                panel_gap=(0.5, 0.65),
            )
            first, second, third = layout.used(3)
            _eigenvalues(first, prompts)
            _running_means(second, prompts[0])
            _tails(third, np.concatenate([prompt.innovations.ravel() for prompt in prompts]))
            several = len({key[2] for key in groups}) > 1, len({key[0] for key in groups}) > 1
            parts = [task, *([length] if several[0] else []), *([model] if several[1] else [])]
            paths += save(layout.figure, folder / f"queries-{'-'.join(slug(part) for part in parts)}", options.formats)
    return paths


def _eigenvalues(axes: Axes, prompts: list[FittedPrompt]) -> None:
    angle = np.linspace(0, 2 * np.pi, 200)
    axes.plot(np.cos(angle), np.sin(angle), color=GREY, lw=0.7, ls="--")
    values = np.concatenate([prompt.fit.eigenvalues for prompt in prompts])
    axes.scatter(values.real, values.imag, s=8, color=_BLUE, lw=0)
    limit = max(1.1, 1.05 * float(np.abs(values).max()))
    axes.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
    axes.set_xlabel("real part")
    axes.set_ylabel("imaginary part", labelpad=1)
    median = float(np.median([prompt.fit.radius for prompt in prompts]))
    axes.set_title(f"eigenvalues, median radius {median:.2f}", loc="left", y=1.0, pad=3)


def _running_means(axes: Axes, prompt: FittedPrompt) -> None:
    paths = [path[:, 0] for path in [*prompt.train, *prompt.held_out] if len(path)]
    longest = max(map(len, paths))
    running = np.full((len(paths), longest), np.nan)
    for row, path in zip(running, paths, strict=True):
        row[: len(path)] = path.cumsum() / np.arange(1, len(path) + 1)
    steps = np.arange(1, longest + 1)
    for row in running[:_MOST_PATHS]:
        axes.plot(steps, row, color=PALE, lw=0.5)
    axes.plot(steps, np.nanmean(running, 0), color=_BLUE, lw=1.2)
    mean, covariance = prompt.fit.stationary()
    if np.isfinite(mean[0]):
        deviation = math.sqrt(covariance[0, 0])
        axes.axhline(mean[0], color=_RED, lw=1.0, ls="--")
        axes.axhspan(mean[0] - deviation, mean[0] + deviation, color=_RED, alpha=0.08, lw=0)
    axes.set_xlabel("generated tokens")
    axes.set_title("running mean, component 1", loc="left", y=1.0, pad=3)


def _tails(axes: Axes, innovations: Floats) -> None:
    magnitudes = np.sort(np.abs(innovations))
    survival = 1 - np.arange(len(magnitudes)) / len(magnitudes)
    reach = np.linspace(0, float(magnitudes[-1]), 200)
    axes.plot(magnitudes, survival, color=_BLUE, lw=1.2)
    gaussian = [math.erfc(value / math.sqrt(2)) for value in reach]
    axes.plot(reach, gaussian, color=_RED, lw=1.0, ls="--")
    axes.plot(reach, np.exp(-math.sqrt(2) * reach), color=_GREEN, lw=1.0, ls=":")  # the Laplace distribution
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(bottom=0.5 / len(magnitudes), top=1.5)
    axes.set_xlabel("magnitude of an innovation, sd")
    axes.set_title("survival, log scale", loc="left", y=1.0, pad=3)
