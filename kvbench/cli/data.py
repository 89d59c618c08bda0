"""`kvbench data`: fetch, verify and list the Hugging Face hub tables that tasks use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from kvbench import terminal
from kvbench.benchmark import Source
from kvbench.cli import complete
from kvbench.cli.options import option, split_names
from kvbench.cli.screen import FAILED, complain, console, print_json
from kvbench.data import records
from kvbench.data.records import Damaged, Record
from kvbench.errors import UserError
from kvbench.files import cache_dir
from kvbench.harness import catalogue
from kvbench.harness.lmms_tasks import LmmsBenchmark
from kvbench.harness.named_tasks.benchmarks import NamedBenchmark
from kvbench.runs.options import FLAG

# `kvbench.data.fetching` is imported inside the commands, so that `kvbench --help` does not load `datasets`.

app = typer.Typer(
    help="Fetch, verify and list data of the Hugging Face hub.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TASKS = "Groups, tasks or all (kvbench list tasks)."


@app.callback()
def _root() -> None:
    """Fetch, verify and list data of the Hugging Face hub."""


@app.command()
def fetch(
    task: Annotated[list[str], typer.Argument(metavar="TASK...", help=_TASKS, autocompletion=complete.tasks)],
    fresh: Annotated[bool, option(None, FLAG, "Update data that is already fetched.", "--fresh")] = False,
    include_path: Annotated[
        str, option(None, "DIR", "Folders with the YAML of your own tasks, comma-separated.", show_default=False)
    ] = "",
) -> None:
    """Fetch the data of tasks, so that runs work without the hub."""
    from kvbench.data import fetching

    named_tasks, own_specs = _split_named(task, split_names([include_path]))
    has_failures = _fetch_named(named_tasks, fresh) if named_tasks else False
    if not own_specs:
        if has_failures:
            raise typer.Exit(FAILED)
        return

    error_console = terminal.console(stderr=True)

    def fetched(source: Source, source_label: str, task_name: str) -> str:
        old_record = records.head(source, cache_dir())
        if fresh or old_record is None:
            print(f"{source_label}: fetching", flush=True)
        status, row_counter = error_console.status(""), itertools.count(1)

        def counted() -> None:
            if (row_number := next(row_counter)) % 100 == 1:
                status.update(f"{row_number} rows of {source_label}")
                status.start()  # not earlier: downloads show the hub client's own progress bars

        try:
            record = fetching.fetch(source, cache_dir(), fresh=fresh, on_row=counted)
        finally:
            status.stop()
        return f"{'already fetched' if record == old_record else 'fetched'}, {_described(record)}"

    _report(own_specs, fetched, "nothing to fetch", has_failures)


def _split_named(
    task_specs: Sequence[str], include_path: Sequence[str]
) -> tuple[list[tuple[str, NamedBenchmark | LmmsBenchmark]], list[str]]:
    """Return the tasks of lm-eval and lmms-eval among some names, and the other names."""
    named_tasks: dict[str, NamedBenchmark | LmmsBenchmark] = {}
    own_specs = []
    for task_spec in split_names(task_specs):
        pairs = [] if task_spec == "all" else catalogue.resolve_task(task_spec, include_path)
        named_pairs = {
            task_name: group for task_name, group in pairs if isinstance(group, NamedBenchmark | LmmsBenchmark)
        }
        named_tasks |= named_pairs
        own_specs += [] if named_pairs else [task_spec]
    return [*named_tasks.items()], own_specs


def _fetch_named(named_tasks: Sequence[tuple[str, NamedBenchmark | LmmsBenchmark]], fresh: bool) -> bool:
    """Fetch the data of tasks of lm-eval and lmms-eval; return whether some could not be fetched."""
    from kvbench.harness import lmms_eval
    from kvbench.harness.named_tasks import building

    has_failures = False
    for task_name, benchmark in named_tasks:
        try:
            if isinstance(benchmark, LmmsBenchmark):
                description = lmms_eval.fetch(benchmark, task_name, fresh=fresh)
            else:
                description = building.fetch(benchmark, task_name, fresh=fresh)
            print(f"{task_name}: {description}", flush=True)
        except UserError as error:
            complain(f"{task_name}: {error}")
            has_failures = True
    return has_failures


@app.command()
def verify(
    task: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK...",
            help=f"{_TASKS} Default: all fetched data.",
            autocompletion=complete.tasks,
        ),
    ] = None,
) -> None:
    """Check fetched data against its recorded hash; report damaged or missing tables."""
    from kvbench.data import fetching

    def verified(source: Source, source_label: str, task_name: str) -> str:
        if not task and not records.path(source, cache_dir()).exists():
            return ""
        try:
            return f"intact, {_described(fetching.verify(source, cache_dir()))}"
        except FileNotFoundError:
            raise UserError(f"missing; run `kvbench data fetch {task_name}`") from None
        except Damaged as error:
            raise UserError(f"{error}; run `kvbench data fetch {task_name}` to fetch it again") from None

    _report(task or ["all"], verified, f"nothing is fetched into {cache_dir() / 'hub'}")


@app.command("list")
def list_(
    task: Annotated[
        list[str] | None,
        typer.Argument(metavar="TASK...", help=f"{_TASKS} Default: all.", autocompletion=complete.tasks),
    ] = None,
    as_json: Annotated[bool, option(None, FLAG, "Print the list as JSON.", "--json")] = False,
) -> None:
    """List the tables that tasks use, and whether they are fetched."""
    source_tasks, has_failures = _tables(task or ["all"])
    json_rows: list[dict[str, Any]] = []
    text_table = Table(box=None, pad_edge=False, header_style="bold")
    for column_title in ("task", "dataset", "table", "commit", "rows", "size"):
        is_numeric = column_title in ("rows", "size")
        text_table.add_column(column_title, overflow="fold", justify="right" if is_numeric else "left")
    for source, task_names in source_tasks.items():
        record = records.head(source, cache_dir())
        record_cells: tuple[str, ...] = ("not fetched",)
        if record:
            record_cells = (
                record.revision[:12] or "unknown",
                str(record.rows),
                decimal(record.bytes),
            )
        for task_name in task_names:
            text_table.add_row(*map(Text, (task_name, source.dataset, source.table, *record_cells)))
            json_rows.append(
                {
                    "leaf": task_name,
                    "dataset": source.dataset,
                    "table": source.table,
                    "pinned": source.revision,
                    "there": record is not None,
                    "revision": record and record.revision,
                    "rows": record and record.rows,
                    "bytes": record and record.bytes,
                    "path": str(records.path(source, cache_dir())),
                }
            )
    if as_json:
        print_json(json_rows)
    else:
        console().print(text_table)
        print(f"the records are in {cache_dir() / 'hub'}")
    if has_failures:
        raise typer.Exit(FAILED)


def _tables(task_specs: Sequence[str]) -> tuple[dict[Source, list[str]], bool]:
    """Return the tasks that use each table, and whether a benchmark failed to import.

    Raises:
        UserError: A task is unknown.
    """
    source_tasks: dict[Source, list[str]] = {}
    failures: list[str] = []
    for task_spec in split_names(task_specs):
        if task_spec == "all":
            benchmarks, failures = catalogue.benchmarks()
            task_pairs = [(task_name, benchmark) for benchmark in benchmarks.values() for task_name in benchmark.leaves]
        else:
            task_pairs = catalogue.resolve_task(task_spec)
            if isinstance(task_pairs[0][1], NamedBenchmark | LmmsBenchmark):
                harness = "lm-eval" if isinstance(task_pairs[0][1], NamedBenchmark) else "lmms-eval"
                raise UserError(
                    f"{task_spec} is {harness}'s, and the hub's own clients keep its data; "
                    f"`kvbench data fetch {task_spec}` gets it"
                )
        for task_name, benchmark in task_pairs:
            for source in benchmark.sources.get(task_name, ()):
                reader_tasks = source_tasks.setdefault(source, [])
                reader_tasks += [task_name] if task_name not in reader_tasks else []
    for failure in failures:
        complain(failure)
    return source_tasks, bool(failures)


def _report(
    task_specs: Sequence[str],
    check_source: Callable[[Source, str, str], str],
    empty_message: str,
    has_failures: bool = False,
) -> None:
    """Print what `check_source` returns for each table, or the error that it raises.

    Args:
        task_specs: Groups and tasks.
        check_source: Takes a table, its name and one of its tasks; "" prints nothing.
        empty_message: Printed if there is nothing else to print.
        has_failures: Whether something has failed before.
    """
    source_tasks, has_broken = _tables(task_specs)
    has_failures |= has_broken
    is_silent = not has_failures
    for source, task_names in source_tasks.items():
        source_label = f"{source.label} ({', '.join(task_names[:3])}{', ...' if len(task_names) > 3 else ''})"
        try:
            if source_line := check_source(source, source_label, task_names[0]):
                print(f"{source_label}: {source_line}", flush=True)
                is_silent = False
        except UserError as error:
            complain(f"{source_label}: {error}")
            has_failures, is_silent = True, False
    if is_silent:
        print(f"{', '.join(task_specs)}: {empty_message}")
    if has_failures:
        raise typer.Exit(FAILED)


def _described(record: Record) -> str:
    commit_text = f", commit {record.revision[:12]}" if record.revision else ""
    return f"{record.rows} rows, {decimal(record.bytes)}{commit_text}"
