"""Command line: parses, calls, prints. Heavy modules are imported inside the commands."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

from kvbench.cli import (
    analyze,
    bench,
    compare,
    complete,
    data,
    harnesses,
    leaderboard,
    listing,
    page,
    power,
    profile,
    published,
    report,
    run,
    table,
    train,
    tune,
)
from kvbench.cli.options import option, split_names
from kvbench.cli.screen import CLOSED, FAILED, INTERRUPTED, OK, complain, console, print_json, progress, say, stopping
from kvbench.engine import lazy_sympy, lean_transformers
from kvbench.engine.lazy_module import LazyModule
from kvbench.errors import UserError, quoted, shorten, shorten_words
from kvbench.files import cannot
from kvbench.plugin_facts import PluginFacts
from kvbench.runs.options import FLAG
from kvbench.terminal import OutputError, filtered

_OF_THE_USER = (
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EACCES,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
)
"""System errors about a name, a permission or a disk, which only the user can fix."""

app = typer.Typer(
    name="kvbench",
    help="Evict the KV cache of a language model and measure what it costs.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=run.EXAMPLES)(run.run)
app.command()(report.report)
app.command()(page.view)
app.command()(leaderboard.publish)
app.command()(leaderboard.leaderboard)
app.command()(published.published)
app.command()(table.table)
app.command()(compare.compare)
app.command("compare-policies")(compare.compare_policies)
app.command()(power.power)
app.command()(bench.bench)
app.command()(tune.tune)
app.command(
    "lm-eval",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(harnesses.lm_eval)
app.command(
    "lmms-eval",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(harnesses.lmms_eval)
app.add_typer(profile.app, name="profile")
app.add_typer(analyze.app, name="analyze")
app.add_typer(train.app, name="train")
app.add_typer(data.app, name="data")


_STARTUP_OBJECTS = 1_000_000
"""Objects that may be created before garbage is first collected; the imports of `kvbench run` create fewer."""


def _collect_after_startup() -> None:
    """Collect no garbage during imports, where it takes a fifth of the time and finds nothing."""
    usual_thresholds = gc.get_threshold()

    def restore(phase: str, info: dict[str, int]) -> None:
        gc.callbacks.remove(restore)
        gc.set_threshold(*usual_thresholds)

    gc.callbacks.append(restore)
    gc.set_threshold(_STARTUP_OBJECTS, *usual_thresholds[1:])


_SPINS = "10000"
"""How often a thread of libgomp looks for work before it sleeps. Its default of 300,000 makes two processes on the same
cores up to ten times slower, because a thread that spins keeps the core from the one that it waits for; 1,000 costs an
idle machine 9%. Torch loads libgomp, so this must be set before."""

_WITHOUT_TORCH = {"compare", "report", "table"}
"""Commands that give numpy one thread: its products are small here, and its idle threads spin for up to a quarter of a
report's processor time. Not those that use torch, which on ARM multiplies by OpenBLAS as well."""


def main() -> NoReturn:
    """Run the command line and exit with its status."""
    _collect_after_startup()
    PluginFacts.uses_cache = True
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "WORLD_SIZE" not in os.environ:  # of torchrun
        lean_transformers.without_shards()
    lazy_sympy.install()
    LazyModule("requests").install()  # lm-eval imports it, for downloads only
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    if not _WITHOUT_TORCH.isdisjoint(sys.argv[1:2]):
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    warnings.formatwarning = lambda message, *_: f"kvbench: warning: {message}\n"
    sys.exit(call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> int:
    """Run one command; all output goes through `kvbench.terminal`.

    Args:
        arguments: Arguments after the program's name; an empty list shows the help.

    Returns:
        The exit code. An error that the user can fix is one line on stderr, without a traceback.
    """
    try:
        with filtered():
            return _call(arguments)
    except OutputError as error:
        if error.closed:  # as for `kvbench list tasks | head -1`
            return CLOSED
        complain(str(error))
        return FAILED


def _call(arguments: Sequence[str]) -> int:
    try:
        if nul_arguments := [argument for argument in arguments if "\0" in argument]:
            raise UserError(f"{quoted(nul_arguments[0])} contains a NUL character; remove it")
        command = _command(arguments[0] if arguments else "")
        exit_code = command(
            args=run.with_default_values(arguments) or ["--help"], standalone_mode=False, prog_name="kvbench"
        )
    except UserError as error:
        return complain(str(error))
    except OSError as error:
        if error.errno not in _OF_THE_USER or error.filename is None:
            raise
        return complain(shorten_words(str(cannot("use", error.filename, error))))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        # Typer's usage errors, whose class is not public.
        if not hasattr(error, "format_message"):
            raise
        message = str(error.format_message())
        for argument in arguments:
            message = message.replace(argument, shorten(argument)) if argument else message
        return complain(f"{message} (kvbench --help lists the commands and options)")
    return exit_code if isinstance(exit_code, int) else OK


@functools.lru_cache(maxsize=64)
def _command(name: str) -> Any:
    """Return the program with one command, or with all if none has this name; Typer builds all for every call."""
    program = copy.copy(app)
    program.registered_commands = [
        command
        for command in app.registered_commands
        if name == (command.name or typer.main.get_command_name(getattr(command.callback, "__name__", "")))
    ]
    program.registered_groups = [group for group in app.registered_groups if name == group.name]
    return typer.main.get_command(program if program.registered_commands or program.registered_groups else app)


def _version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        print(f"kvbench {version('kvbench')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", metavar=FLAG, help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Evict the KV cache of a language model and measure what it costs."""


@app.command("list")
def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="policies|tasks|models|runs|layouts|recipes",
            help="What to list.",
            autocompletion=complete.lists,
        ),
    ],
    folder: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|DIR",
            help="Policy to show in full, or folder to search for runs. Default: all policies, results.",
            show_default=False,
        ),
    ] = None,
    search: Annotated[
        str | None,
        option(None, "WORD", "Tasks only: search the names of all tasks, also lm-eval's.", show_default=False),
    ] = None,
    include_path: Annotated[
        str | None,
        option(None, "DIR", "With --search: folders with the YAML of your own tasks.", show_default=False),
    ] = None,
    check: Annotated[
        str | None,
        option(
            None,
            "MODEL",
            "Models only: test whether a model's attention is the same in kvbench as in transformers.",
            autocompletion=complete.models,
            show_default=False,
        ),
    ] = None,
    paper: Annotated[
        str | None,
        option(
            None,
            "PAPER",
            "Recipes only: list all tables and figures of a paper, with the recipe of each or why it has none.",
            autocompletion=complete.papers,
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, option(None, FLAG, "Print the list as JSON.", "--json")] = False,
) -> None:
    """List policies (paper, parts, parameters), tasks, models, runs, layouts or recipes."""
    if check is not None:
        if kind != "models" or folder is not None:
            raise UserError("--check is for kvbench list models --check MODEL")
        return _check_model(check, as_json=as_json)
    if search is not None or include_path is not None:
        if kind != "tasks" or search is None:
            raise UserError("--search and --include-path are for kvbench list tasks --search WORD")
        kind, (list_records, failures) = "names", listing.found_tasks(search, split_names([include_path or ""]))
    elif paper is not None:
        if kind != "recipes" or folder is not None:
            raise UserError("--paper is for kvbench list recipes --paper NAME")
        kind, list_records, failures = "items", listing.items(paper), []
    else:
        list_records, failures = listing.records(kind, folder)
    if as_json:
        print_json(list_records)
    elif list_records or kind != "runs":
        is_one_policy = kind == "policies" and folder is not None
        console().print(listing.render_list("policy" if is_one_policy else kind, list_records))
    else:
        say(f"no runs in {folder or listing.RUNS_FOLDER}")
    for failure in failures:
        complain(failure)
    if failures:
        raise typer.Exit(FAILED)


def _check_model(model_name: str, *, as_json: bool) -> None:
    """Print the result of a model's self-test; the exit status is 1 if kvbench cannot run the model."""
    reporter = progress()
    with stopping(reporter):
        reporter.busy(f"testing model {model_name}")
        record = listing.model_check(model_name)
    if as_json:
        print_json(record)
    elif record["modules"]:
        console().print(listing.render_model_check(record))
    if record["problem"]:
        complain(record["problem"])
        raise typer.Exit(FAILED)


@app.command()
def check(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY",
            help="./my_policy.py:MyPolicy, or a name.",
            autocompletion=complete.policies,
        ),
    ],
) -> None:
    """Test a policy: exact budgets, padding, batches, odd lengths."""
    from kvbench.checks import run_checks

    all_passed = True
    for result in run_checks(policy):
        print(f"{'ok  ' if result.ok else 'FAIL'}  {result.name}  {result.detail}".rstrip())
        all_passed = all_passed and result.ok
    if not all_passed:
        raise typer.Exit(FAILED)
