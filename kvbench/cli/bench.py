"""`kvbench bench`. Heavy modules are imported inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvbench.analysis.choosing import parse_integers, split_commas
from kvbench.cli.analyze import carry_out, command_line
from kvbench.cli.options import declared_options, grid_options, option, split_names, split_options
from kvbench.progress import Reporter
from kvbench.report.figure_flags import FigureFlags
from kvbench.runs.options import MODEL, OUTPUT, PROMPTS

if TYPE_CHECKING:
    from kvbench.analysis.output import AnalysisOutput


@declared_options(FigureFlags, anchor="out")
@grid_options("policies", "budgets")
@grid_options("seed", anchor="repeats")
@grid_options("device", "dtype", "attn", "revision", anchor="out")
def bench(
    model: Annotated[
        str,
        option(
            MODEL,
            "NAME",
            "A named model, folder, GGUF file or hub id. Default: reference.",
            show_default=False,
        ),
    ] = "reference",
    context: Annotated[
        str,
        option(PROMPTS, "TOKENS", "Tokens per prompt, comma-separated. Default: 1024.", show_default=False),
    ] = "1024",
    batch: Annotated[
        str,
        option(PROMPTS, "N", "Batch sizes, comma-separated. Default: 1.", show_default=False),
    ] = "1",
    generate: Annotated[
        str,
        option(
            PROMPTS,
            "TOKENS",
            "Decode steps after the prompt, comma-separated. Default: 32.",
            show_default=False,
        ),
    ] = "32",
    repeats: Annotated[
        int,
        option(PROMPTS, "N", "Number of repetitions. Default: 5.", show_default=False),
    ] = 5,
    out: Annotated[Path | None, option(OUTPUT, "DIR", "Output folder. Default: results/bench-HASH.")] = None,
    **grid_values: Any,
) -> None:
    """Measure time to first token, decode steps and memory against the full cache."""
    from kvbench.analysis.speed.settings import SpeedSettings

    bench_settings = SpeedSettings(
        model=model,
        policies=tuple(split_names(grid_values["policy"])) or ("snapkv",),
        budgets=tuple(split_names(grid_values["budget"])) or ("0.2",),
        contexts=parse_integers("context", split_commas(context), "512,2048"),
        batches=parse_integers("batch", split_commas(batch), "1,8"),
        generates=parse_integers("generate", split_commas(generate), "512,2048"),
        repeats=repeats,
        seed=grid_values["seed"] or 0,
        device=grid_values["device"] or "auto",
        dtype=grid_values["dtype"] or "auto",
        attn=grid_values["attn"] or "auto",
        revision=grid_values["revision"],
    )

    figures = FigureFlags.of(split_options(grid_values, FigureFlags)[0])

    def work(reporter: Reporter) -> AnalysisOutput:
        from kvbench.analysis.speed.bench import write_bench

        return write_bench(bench_settings, out, reporter, figures=figures, command=command_line())

    carry_out(work)
