"""`kvbench data`: the tables of the Hugging Face hub that tasks read, and our copies of them."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from kvbench.cli.screen import FAILED, console

app = typer.Typer(
    help="Fetch, verify and list data of the Hugging Face hub.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TASKS = "Groups or leaves, or all. See: kvbench list tasks."


@app.callback()
def _root() -> None:
    """Fetch, verify and list data of the Hugging Face hub."""


@app.command()
def fetch(
    task: Annotated[list[str], typer.Argument(metavar="TASK...", help=_TASKS)],
    fresh: Annotated[bool, typer.Option("--fresh", help="Get also what is there.")] = False,
) -> None:
    """Get the data of tasks, so that runs do without the hub; what is there is kept."""
    from kvbench.data import command
    from kvbench.files import cache_dir

    screen = _Screen()
    try:
        good = command.fetch(
            task,
            cache_dir(),
            fresh=fresh,
            say=screen.say,
            complain=screen.complain,
            counted=screen.counted,
        )
    finally:
        screen.stop()
    _end(good)


@app.command()
def verify(
    task: Annotated[
        list[str] | None, typer.Argument(metavar="[TASK...]", help=f"{_TASKS} Default: all copies.")
    ] = None,
) -> None:
    """Hash our copies again; damaged and missing ones are named."""
    from kvbench.data import command
    from kvbench.files import cache_dir

    _end(command.verify(task or [], cache_dir(), say=_say, complain=_complain))


@app.command("list")
def list_(
    task: Annotated[
        list[str] | None, typer.Argument(metavar="[TASK...]", help=f"{_TASKS} Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """List what every task reads of the hub, and what is there of it."""
    from kvbench.data import command
    from kvbench.files import cache_dir

    rows, failed = command.records(task or [], cache_dir())
    if as_json:
        import json

        print(json.dumps(rows, indent=2))
    else:
        _table(rows)
        print(f"copies are in {cache_dir() / 'hub'}")
    for line in failed:
        _complain(line)
    _end(not failed)


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from kvbench.data.command import size

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("task", "dataset", "table", "commit", "rows", "size"):
        numbers = name in ("rows", "size")
        table.add_column(name, overflow="fold", justify="right" if numbers else "left")
    for row in rows:
        found = ("not there", "", "")
        if row["there"]:
            found = (row["revision"][:12] or "unknown", str(row["rows"]), size(row["bytes"]))
        table.add_row(*(Text(c) for c in (row["leaf"], row["dataset"], row["table"], *found)))
    console().print(table)


class _Screen:
    """Lines that stay, and on a terminal below them how many rows have come.

    Downloads have the bars of the hub's own client, on a terminal alone.
    """

    def __init__(self) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        self._status = console.status("") if console.is_terminal else None
        if self._status is None:
            from huggingface_hub.utils.tqdm import disable_progress_bars

            disable_progress_bars()

    def counted(self, table: str, rows: int) -> None:
        """Show how many rows of a table have come."""
        if self._status is not None and rows % 100 == 1:
            self._status.update(f"{rows} rows of {table}")
            self._status.start()

    def stop(self) -> None:
        """End the count."""
        if self._status is not None:
            self._status.stop()

    def say(self, line: str) -> None:
        """Say what is done."""
        self.stop()
        _say(line)

    def complain(self, line: str) -> None:
        """Say what failed."""
        self.stop()
        _complain(line)


def _say(line: str) -> None:
    print(line, flush=True)


def _complain(line: str) -> None:
    print(f"kvbench: {' '.join(line.split())}", file=sys.stderr, flush=True)


def _end(good: bool) -> None:
    if not good:
        raise typer.Exit(FAILED)
