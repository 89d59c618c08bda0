"""`kvbench data`: fetch, verify and list the tables of the Hugging Face hub that tasks read."""

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
from kvbench.runs.options import FLAG

# The commands import `kvbench.data.fetching` when they run: `kvbench --help` imports this module,
# and must not wait a second for `datasets`.

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
    task: Annotated[
        list[str], typer.Argument(metavar="TASK...", help=_TASKS, autocompletion=complete.tasks)
    ],
    fresh: Annotated[
        bool, option(None, FLAG, "Update data that was fetched before.", "--fresh")
    ] = False,
) -> None:
    """Fetch the data of tasks, so that runs work without the hub."""
    from kvbench.data import fetching

    screen = terminal.console(stderr=True)

    def fetched(source: Source, name: str, leaf: str) -> str:
        before = records.head(source, cache_dir())
        if fresh or before is None:
            print(f"{name}: fetching", flush=True)
        status, rows = screen.status(""), itertools.count(1)

        def counted() -> None:
            if (row := next(rows)) % 100 == 1:
                status.update(f"{row} rows of {name}")
                status.start()  # not earlier: downloads show the bars of the hub's client

        try:
            record = fetching.fetch(source, cache_dir(), fresh=fresh, on_row=counted)
        finally:
            status.stop()
        return f"{'already fetched' if record == before else 'fetched'}, {_described(record)}"

    _report(task, fetched, "nothing to fetch")


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
    """Check fetched data against its recorded hash; name what is damaged or missing."""
    from kvbench.data import fetching

    def verified(source: Source, name: str, leaf: str) -> str:
        if not task and not records.path(source, cache_dir()).exists():
            return ""
        try:
            return f"intact, {_described(fetching.verify(source, cache_dir()))}"
        except FileNotFoundError:
            raise UserError(f"missing; `kvbench data fetch {leaf}` gets it") from None
        except Damaged as error:
            raise UserError(f"{error}; `kvbench data fetch {leaf}` gets it again") from None

    _report(task or ["all"], verified, f"nothing is fetched into {cache_dir() / 'hub'}")


@app.command("list")
def list_(
    task: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TASK...", help=f"{_TASKS} Default: all.", autocompletion=complete.tasks
        ),
    ] = None,
    as_json: Annotated[bool, option(None, FLAG, "Print the list as JSON.", "--json")] = False,
) -> None:
    """List the tables that tasks read, and which of them are fetched."""
    tables, failed = _tables(task or ["all"])
    rows: list[dict[str, Any]] = []
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("task", "dataset", "table", "commit", "rows", "size"):
        right = name in ("rows", "size")
        shown.add_column(name, overflow="fold", justify="right" if right else "left")
    for source, leaves in tables.items():
        record = records.head(source, cache_dir())
        facts: tuple[str, ...] = ("not fetched",)
        if record:
            facts = (record.revision[:12] or "unknown", str(record.rows), decimal(record.bytes))
        for leaf in leaves:
            shown.add_row(*map(Text, (leaf, source.dataset, source.table, *facts)))
            rows.append(
                {
                    "leaf": leaf,
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
        print_json(rows)
    else:
        console().print(shown)
        print(f"the records are in {cache_dir() / 'hub'}")
    if failed:
        raise typer.Exit(FAILED)


def _tables(tasks: Sequence[str]) -> tuple[dict[Source, list[str]], bool]:
    """The leaves that read each table, and whether a benchmark failed to import.

    Raises:
        UserError: A task is unknown.
    """
    tables: dict[Source, list[str]] = {}
    failed: list[str] = []
    for name in split_names(tasks):
        if name == "all":
            groups, failed = catalogue.benchmarks()
            pairs = [(leaf, group) for group in groups.values() for leaf in group.leaves]
        else:
            pairs = catalogue.resolve_task(name)
        for leaf, group in pairs:
            for source in group.sources.get(leaf, ()):
                readers = tables.setdefault(source, [])
                readers += [leaf] if leaf not in readers else []
    for line in failed:
        complain(line)
    return tables, bool(failed)


def _report(tasks: Sequence[str], act: Callable[[Source, str, str], str], nothing: str) -> None:
    """Print what `act` returns for each table, or the error that it raises.

    Args:
        tasks: Groups and leaves.
        act: Takes a table, its name and one of its leaves; "" means that there is nothing to say.
        nothing: What to say if there is nothing to say of any table.
    """
    tables, failed = _tables(tasks)
    silent = not failed
    for source, leaves in tables.items():
        name = f"{source.label} ({', '.join(leaves[:3])}{', ...' if len(leaves) > 3 else ''})"
        try:
            if line := act(source, name, leaves[0]):
                print(f"{name}: {line}", flush=True)
                silent = False
        except UserError as error:
            complain(f"{name}: {error}")
            failed, silent = True, False
    if silent:
        print(f"{', '.join(tasks)}: {nothing}")
    if failed:
        raise typer.Exit(FAILED)


def _described(record: Record) -> str:
    commit = f", commit {record.revision[:12]}" if record.revision else ""
    return f"{record.rows} rows, {decimal(record.bytes)}{commit}"
