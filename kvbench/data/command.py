"""What `kvbench data` does: fetch, verify and list the tables of the hub that tasks read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.benchmark import Source
from kvbench.data import fetching, sources
from kvbench.data.sources import Copy, Damaged
from kvbench.errors import UserError
from kvbench.harness import catalogue

ALL = "all"
"""Names every leaf of every installed benchmark."""


@dataclass(frozen=True)
class Table:
    """A table of the hub and the leaves that read it."""

    source: Source
    leaves: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.leaves[:3]) + (", ..." if len(self.leaves) > 3 else "")
        return f"{self.source.label} ({shown})"


def tables(tasks: Sequence[str]) -> tuple[list[Table], list[str], list[str]]:
    """The tables that tasks read.

    Args:
        tasks: Groups and leaves, separated by commas or apart, or `all`.

    Returns:
        The tables, each once; the leaves that read none; and a line for each benchmark that does
        not import.

    Raises:
        UserError: A task is unknown.
    """
    names = [name.strip() for text in tasks for name in text.split(",") if name.strip()]
    found: dict[Source, list[str]] = {}
    without: list[str] = []
    failed: list[str] = []
    pairs = []
    for name in names:
        if name == ALL:
            groups, failed = catalogue.benchmarks()
            pairs += [(leaf, group) for group in groups.values() for leaf in group.leaves]
        else:
            pairs += catalogue.resolve_task(name)
    for leaf, group in pairs:
        for source in group.sources.get(leaf, ()):
            readers = found.setdefault(source, [])
            if leaf not in readers:
                readers.append(leaf)
        if not group.sources.get(leaf):
            without.append(leaf)
    return [Table(k, tuple(v)) for k, v in found.items()], list(dict.fromkeys(without)), failed


def fetch(
    tasks: Sequence[str],
    folder: Path,
    *,
    fresh: bool,
    say: Callable[[str], None],
    complain: Callable[[str], None],
    counted: Callable[[str, int], None] = lambda table, rows: None,
) -> bool:
    """Get every table that tasks read, and keep it.

    Args:
        tasks: As `tables` takes them.
        folder: The cache folder.
        fresh: Whether to get also what is there.
        say: Takes what is done, a line each.
        complain: Takes what failed, a line each.
        counted: Told how many rows of a table have come.

    Returns:
        Whether nothing failed.

    Raises:
        UserError: A task is unknown.
    """
    wanted, without, failed = tables(tasks)
    for line in failed:
        complain(line)
    if without and not wanted:
        say(f"{', '.join(without)}: no data of the hub, nothing to fetch")
    missing = []
    for table in wanted:
        there = None if fresh else _good(table.source, folder)
        if there:
            say(f"{table}: is there, {describe(there)}")
        else:
            missing.append(table)
    if missing and (why := fetching.unreachable()):
        complain(f"{fetching.HUB} {why}; not fetched: {', '.join(map(str, missing))}")
        return False
    good = not failed
    for table in missing:
        name = str(table)
        say(f"{name}: fetching")
        try:
            fetching.fetch(table.source, folder, fresh=fresh, counted=partial(counted, name))
            there = sources.head(table.source, folder)
            assert there is not None
        except UserError as error:
            complain(f"{name}: {error}")
            good = False
        else:
            say(f"{name}: fetched, {describe(there)}")
    return good


def verify(
    tasks: Sequence[str],
    folder: Path,
    *,
    say: Callable[[str], None],
    complain: Callable[[str], None],
) -> bool:
    """Hash our copies again.

    Args:
        tasks: Whose copies, as `tables` takes them; none: every copy that is there.
        folder: The cache folder.
        say: Takes what is well, a line each.
        complain: Takes what is damaged or missing, a line each.

    Returns:
        Whether nothing is damaged, and nothing of the named tasks missing.

    Raises:
        UserError: A task is unknown.
    """
    wanted, _, failed = tables(tasks or [ALL])
    good = True
    checked = 0
    for table in wanted:
        try:
            say(f"{table}: well, {describe(sources.verify(table.source, folder))}")
            checked += 1
        except FileNotFoundError:
            if tasks:
                complain(f"{table}: missing; kvbench data fetch {table.leaves[0]}")
                good = False
        except Damaged as error:
            complain(f"{table}: {error}; kvbench data fetch {table.leaves[0]} gets it again")
            good = False
        except UserError as error:
            complain(f"{table}: {error}")
            good = False
    for line in failed:
        complain(line)
        good = False
    if not wanted and good:
        say(f"{', '.join(tasks or [ALL])}: nothing of the hub is read")
    elif not checked and good:
        say(f"there are no copies in {folder / 'hub'}")
    return good


def records(tasks: Sequence[str], folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """A record for every leaf and table of it.

    Args:
        tasks: As `tables` takes them; none: all.
        folder: The cache folder.

    Returns:
        The records, and a line for each benchmark that does not import.

    Raises:
        UserError: A task is unknown.
    """
    found, _, failed = tables(tasks or [ALL])
    rows = []
    for table in found:
        copy = sources.head(table.source, folder)
        rows += [
            {
                "leaf": leaf,
                "dataset": table.source.dataset,
                "table": table.source.table,
                "pinned": table.source.revision,
                "there": copy is not None,
                "revision": copy.revision if copy else None,
                "rows": copy.rows if copy else None,
                "bytes": copy.bytes if copy else None,
                "path": str(sources.path(table.source, folder)),
            }
            for leaf in table.leaves
        ]
    return rows, failed


def describe(copy: Copy) -> str:
    """A copy in a few words."""
    commit = f", commit {copy.revision[:12]}" if copy.revision else ""
    return f"{copy.rows} rows, {size(copy.bytes)}{commit}"


def size(count: int) -> str:
    """Bytes as a reader reads them."""
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def _good(source: Source, folder: Path) -> Copy | None:
    try:
        return sources.verify(source, folder)
    except (FileNotFoundError, UserError):
        return None
