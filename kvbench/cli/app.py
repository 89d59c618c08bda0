"""The command line: parses, calls, prints. What is heavy is imported inside the commands."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kvbench.cli import analyze as commands_analyze
from kvbench.cli import data as commands_data
from kvbench.cli import profile as commands_profile
from kvbench.cli import train as commands_train
from kvbench.cli.options import (
    Device,
    DeviceMap,
    Dtype,
    Lengths,
    MaxNewTokens,
    Quantization,
    Repeats,
    Revision,
    Seed,
    Temperature,
    Template,
    Thinking,
    TopK,
    TopP,
    Truncate,
)
from kvbench.cli.screen import FAILED, INTERRUPTED, OK, complain, console
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.runs.grid import Grid

app = typer.Typer(
    name="kvbench",
    help="Evict the KV cache of a language model and measure what it costs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(commands_profile.app, name="profile")
app.add_typer(commands_analyze.app, name="analyze")
app.add_typer(commands_train.app, name="train")
app.add_typer(commands_data.app, name="data")

Names = list[str] | None


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.formatwarning = lambda message, *_: f"kvbench: warning: {message}\n"
    sys.exit(call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: What follows the program's name; nothing asks for the help.

    Returns:
        The exit code. What the user can mend is one line on stderr and no traceback.
    """
    try:
        code = app(args=list(arguments) or ["--help"], standalone_mode=False, prog_name="kvbench")
    except UserError as error:
        return complain(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        # Typer's own usage errors: their class is not part of its public interface.
        if not hasattr(error, "format_message"):
            raise
        return complain(f"{error.format_message()} (kvbench --help shows what there is)")
    return code if isinstance(code, int) else OK


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"kvbench {version('kvbench')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Evict the KV cache of a language model and measure what it costs."""


@app.command()
def run(
    policy: Annotated[
        Names,
        typer.Option(
            metavar="NAME[:KEY=VALUE...]",
            help="Policies, separated by commas, as criticalkv,snapkv:window=64 or "
            "./my_policy.py:MyPolicy, or all. See: kvbench list policies.",
        ),
    ] = None,
    budget: Annotated[
        Names,
        typer.Option(
            metavar="B",
            help="What is KEPT of the cache, per layer and KV head: a fraction as 0.2, a number of "
            "tokens as 512, or full. (In kvpress a ratio is the fraction removed.) Default: 0.2.",
        ),
    ] = None,
    model: Annotated[
        Names,
        typer.Option(metavar="M", help="reference (the default), a local folder or a hub id."),
    ] = None,
    task: Annotated[
        Names,
        typer.Option(
            metavar="T",
            help="Groups (ruler), tasks (vt) or your own ./mine.jsonl. See: kvbench list tasks.",
        ),
    ] = None,
    moment: Annotated[
        Names,
        typer.Option(
            metavar="WHEN",
            help="When to compress. context: before the question is seen (the default); "
            "question: after; decode: an absolute budget holds while the answer is generated; "
            "chunked or chunked:512: the prompt comes in chunks (of 3072), cut back after each; "
            "turns: before every new turn of a dialogue.",
        ),
    ] = None,
    length: Lengths = None,
    samples: Annotated[
        int | None,
        typer.Option(metavar="N", help="Per task; more of them extend a run. Default: 50."),
    ] = None,
    seed: Seed = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Where results go. Default: results/<hash of the grid without --samples>.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A grid as YAML; flags that are given go before it."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    attn: Annotated[
        str | None, typer.Option(metavar="A", help="Attention of the prefill: auto or sdpa.")
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option(metavar="N", help="Rows decoded together, or auto.")
    ] = None,
    revision: Revision = None,
    device_map: DeviceMap = None,
    quantization: Quantization = None,
    chat_template: Template = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    repeats: Repeats = None,
    max_new_tokens: MaxNewTokens = None,
    thinking: Thinking = None,
    truncate: Truncate = None,
    full: Annotated[
        bool | None,
        typer.Option("--full/--no-full", help="Whether to run the full cache, too. Default: yes."),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="WHO",
            help="Who judges responses where a task needs that: auto (the default: the endpoint of "
            "KVBENCH_JUDGE_URL), endpoint, or local (by shared words; for trying things out).",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show cells, samples and an estimate; run nothing.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Throw away what an earlier run left in the folder.")
    ] = False,
) -> None:
    """Run the product of all flags and score it. The same command goes on where it stopped."""
    given: dict[str, Any] = {
        "policies": policy,
        "budgets": budget,
        "models": model,
        "tasks": task,
        "moments": moment,
        "lengths": length,
        "samples": samples,
        "seed": seed,
        "out": out,
        "device": device,
        "dtype": dtype,
        "attn": attn,
        "batch_size": batch_size,
        "revision": revision,
        "device_map": device_map,
        "quantization": quantization,
        "chat_template": chat_template,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "repeats": repeats,
        "max_new_tokens": max_new_tokens,
        "thinking": thinking,
        "truncate": truncate,
        "full": full,
        "judge": judge,
    }
    _execute(_grid(config, given), fresh=fresh, dry_run=dry_run)


def _grid(config: Path | None, given: dict[str, Any]) -> Grid:
    """The grid of the flags that were given, over that of a file."""
    from kvbench.runs.grid import Grid

    explicit = {name: value for name, value in given.items() if value is not None}
    return Grid.from_yaml(config, explicit) if config else Grid.from_dict(explicit)


def _execute(grid: Grid, *, fresh: bool, dry_run: bool) -> None:
    from rich.console import Console

    from kvbench.progress import reporter
    from kvbench.runs.runner import describe, execute

    progress = reporter(Console(stderr=True))
    if dry_run:
        for line in describe(grid, progress.message, fresh=fresh):
            print(line)
        return
    try:
        done = execute(grid, reporter=progress, fresh=fresh)
    except KeyboardInterrupt:
        progress.stop()
        print(
            f"kvbench: stopped; what is done is kept in {grid.path}, "
            "and the same command (without --fresh) goes on from there",
            file=sys.stderr,
        )
        raise typer.Exit(INTERRUPTED) from None
    finally:
        progress.stop()
    from kvbench.report.terminal import run_table

    console().print(run_table(done.cells, done.samples))
    names = [p.name for p in sorted(done.path.iterdir()) if p.is_file() and p.name[0] != "."]
    print(f"wrote {done.path}: {', '.join(names)}")
    print(f"figures: kvbench report {done.path}")
    failed = done.cells[done.cells["status"] != "ok"]
    if len(failed):
        first = " ".join(str(failed.iloc[0]["error"]).split())
        print(f"kvbench: {len(failed)} of {len(done.cells)} cells failed: {first}", file=sys.stderr)
        raise typer.Exit(FAILED)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where it goes. Default: report/ in the first run."),
    ] = None,
    against: Annotated[
        Names,
        typer.Option(
            metavar="POLICY",
            help="Also hold every policy against this one at the same budget, paired.",
        ),
    ] = None,
) -> None:
    """Show the tables of runs; write Pareto fronts and a summary."""
    from kvbench.report import against as pairs
    from kvbench.report import render
    from kvbench.report.outputs import terminal
    from kvbench.report.terminal import run_table
    from kvbench.report.text import slug
    from kvbench.runs.store import load_frames

    cells, samples = load_frames(runs)
    bases = [name for text in against or [] for name in text.split(",") if name]
    held = [(base, pairs.differences(cells, samples, base)) for base in bases]
    console().print(run_table(cells, samples))
    folder = out or runs[0] / "report"
    written = render(cells, samples, folder)
    for base, found in held:
        for table in pairs.tables(found, base):
            console().print(terminal(table))
        written.append(pairs.write(found, base, folder / f"against-{slug(base)}.md"))
    for path in written:
        print(f"wrote {path}")


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(metavar="policies|tasks|models", help="What to list.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """List policies (paper, parts, parameters), tasks or models."""
    from kvbench.cli import listing
    from kvbench.report.outputs import terminal

    rows, failed = listing.records(kind)
    if as_json:
        import json

        print(json.dumps(rows, indent=2))
    else:
        console().print(terminal(listing.table(kind, rows), boxed=False))
    for line in failed:
        print(f"kvbench: {line}", file=sys.stderr)
    if failed:
        raise typer.Exit(FAILED)


@app.command()
def check(
    policy: Annotated[
        str, typer.Argument(metavar="POLICY", help="./my_policy.py:MyPolicy, or a name.")
    ],
) -> None:
    """Try a policy: exact budgets, padding, batches, odd lengths."""
    from kvbench.checks import run_checks

    passed = True
    for result in run_checks(policy):
        print(f"{'ok  ' if result.ok else 'FAIL'}  {result.name}  {result.detail}".rstrip())
        passed = passed and result.ok
    if not passed:
        raise typer.Exit(FAILED)
