"""`kvbench tune`. Heavy modules are imported inside the command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvbench.cli.analyze import carry_out, command_line
from kvbench.cli.options import declared_options, given_values, grid_options, split_options
from kvbench.errors import UserError
from kvbench.progress import Reporter
from kvbench.report.figure_flags import FigureFlags
from kvbench.tuning.options import TuneOptions

if TYPE_CHECKING:
    from kvbench.analysis.output import AnalysisOutput

_GRID = (
    *("budgets", "models", "tasks", "moments", "lengths", "samples", "seed"),
    *(
        "device",
        "dtype",
        "attn",
        "revision",
        "device_map",
        "quantization",
        "batch_size",
        "chat_template",
        "max_new_tokens",
    ),
)
_MACHINES = ("executor", "ray_address", "gpus_per_cell", "workers")
_HELP = {
    "samples": "Samples per task of the last rung; the first rung has a ninth of them. Default: 27.",
    "out": "Output folder. The same command continues a search. Default: results/tune-HASH.",
}


@grid_options(*_GRID, help_texts=_HELP)
@declared_options(FigureFlags, anchor="out")
@grid_options(*_MACHINES, "out", anchor="with_files", help_texts=_HELP)
@declared_options(TuneOptions)
def tune(**flag_values: Any) -> None:
    """Search for the score, allocator, selector, merger and parameters that keep the most of a model's answers.

    The best setting is compared with the best named policy on samples that the search did not see.
    """
    figure_values, other_values = split_options(flag_values, FigureFlags)
    own_values, grid_values = split_options(other_values, TuneOptions)
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise UserError("kvbench tune needs optuna: pip install 'kvbench[tune]'") from None

    def work(reporter: Reporter) -> AnalysisOutput:
        from kvbench.tuning.write import write_tuning

        return write_tuning(
            given_values(grid_values),
            reporter,
            options=TuneOptions.of(own_values),
            figures=FigureFlags.of(figure_values),
            command=command_line(),
        )

    carry_out(work, "the same command continues the search")
