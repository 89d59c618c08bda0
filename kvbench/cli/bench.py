"""`kvbench bench`. Heavy modules are imported inside the command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvbench.analysis.choosing import parse_integers, split_commas
from kvbench.cli.analyze import carry_out, command_line
from kvbench.cli.options import declared_options, grid_options, option, split_names, split_options
from kvbench.errors import UserError
from kvbench.progress import Reporter
from kvbench.report.figure_flags import FigureFlags
from kvbench.runs.options import MODEL, OUTPUT, PROMPTS

if TYPE_CHECKING:
    from kvbench.analysis.output import AnalysisOutput


_HELP = {
    "budgets": "Part of the cache that is KEPT, per layer and KV head, comma-separated: a fraction (0.2), a number of "
    "tokens (512), or prompt, as many tokens as the prompt has. Default: 0.2.",
    "moments": "When to compress, comma-separated. context: once, after the prompt (the default); decode: also during "
    "the answer; chunked or chunked:512: after each chunk of the prompt.",
}


@declared_options(FigureFlags, anchor="out")
@grid_options("policies", "budgets", "moments", help_texts=_HELP)
@grid_options("seed", anchor="repeats")
@grid_options("device", "dtype", "attn", "revision", "device_map", anchor="out")
def bench(
    model: Annotated[
        str,
        option(
            MODEL,
            "NAME",
            "Named models, folders, GGUF files or hub ids, comma-separated. Default: reference.",
            show_default=False,
        ),
    ] = "reference",
    context: Annotated[
        str | None,
        option(PROMPTS, "TOKENS", "Tokens per prompt, comma-separated. Default: 1024.", show_default=False),
    ] = None,
    batch: Annotated[
        str,
        option(
            PROMPTS,
            "N",
            "Batch sizes, comma-separated; max is the largest that fits into --memory. Default: 1.",
            show_default=False,
        ),
    ] = "1",
    generate: Annotated[
        str | None,
        option(
            PROMPTS,
            "TOKENS",
            "Decode steps after the prompt, comma-separated. Default: 32.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        str,
        option(
            PROMPTS,
            "PROMPT+ANSWER",
            "Pairs of prompt and decode steps, comma-separated: 256+1024,512+2048. Replaces --context and --generate.",
            show_default=False,
        ),
    ] = "",
    memory: Annotated[
        str,
        option(
            PROMPTS,
            "SIZE",
            "Memory for --batch max, with the model, such as 40GB. Default: that of the GPUs; a CPU needs a size.",
            show_default=False,
        ),
    ] = "",
    repeats: Annotated[
        int,
        option(PROMPTS, "N", "Number of repetitions. Default: 5.", show_default=False),
    ] = 5,
    out: Annotated[Path | None, option(OUTPUT, "DIR", "Output folder. Default: results/bench-HASH.")] = None,
    **grid_values: Any,
) -> None:
    """Measure time to first token, decode steps, throughput and memory against the full cache."""
    from kvbench.analysis.speed.settings import LARGEST, SpeedSettings
    from kvbench.runs.values import device_map as parse_device_map
    from kvbench.runs.values import memory as parse_memory
    from kvbench.runs.values import optional

    if size and (context or generate):
        raise UserError("--size replaces --context and --generate; leave them out")
    bench_settings = SpeedSettings(
        model=model,
        policies=tuple(split_names(grid_values["policy"])) or ("snapkv",),
        budgets=tuple(split_names(grid_values["budget"])) or ("0.2",),
        contexts=parse_integers("context", split_commas(context or "1024"), "512,2048"),
        batches=tuple(
            None if part == LARGEST else parse_integers("batch", [part], f"1,8 or {LARGEST}")[0]
            for part in split_commas(batch) or [""]
        ),
        generates=parse_integers("generate", split_commas(generate or "32"), "512,2048"),
        repeats=repeats,
        seed=grid_values["seed"] or 0,
        device=grid_values["device"] or "auto",
        dtype=grid_values["dtype"] or "auto",
        attn=grid_values["attn"] or "auto",
        revision=grid_values["revision"],
        moments=tuple(split_names(grid_values["moment"])) or ("context",),
        sizes=tuple(split_commas(size)),
        memory=parse_memory(memory, "--memory") if memory else None,
        device_map=optional(parse_device_map)(grid_values["device_map"]),
    )

    figures = FigureFlags.of(split_options(grid_values, FigureFlags)[0])

    def work(reporter: Reporter) -> AnalysisOutput:
        from kvbench.analysis.speed.bench import write_bench

        return write_bench(bench_settings, out, reporter, figures=figures, command=command_line())

    carry_out(work)
