"""Asking the Hugging Face hub for a table: once whether it answers, never for code."""

from __future__ import annotations

import contextlib
import errno
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvbench.benchmark import Source
from kvbench.data.formats import file_rows, split_member
from kvbench.data.sources import NotFetched, Row, keep, locked, scratch, verify
from kvbench.errors import UserError

HUB = "the Hugging Face hub"

_LOCAL = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}
"""What keeps this machine, and not the hub, from giving a file."""


@functools.cache
def unreachable() -> str:
    """Why the hub is not asked, or ""; goes on from its name. Tried once, for five seconds."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "is not asked: HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # whatever keeps the hub away, it is away
        return f"cannot be reached ({type(error).__name__} at {constants.ENDPOINT})"
    return ""


def fetch(
    source: Source,
    cache_dir: Path,
    *,
    fresh: bool = False,
    counted: Callable[[int], None] = lambda rows: None,
) -> Path:
    """Get a table from the hub and keep it.

    Args:
        source: The table.
        cache_dir: Where copies are.
        fresh: Whether to get it although there is a good copy.
        counted: Told how many rows there are so far.

    Raises:
        NotFetched: The hub cannot be reached or does not give it.
        UserError: It cannot be kept, for want of room, rights or a field.
    """
    if why := unreachable():
        raise NotFetched(f"needs the dataset {source.dataset} from {HUB}, which {why}")
    with locked(source, cache_dir):
        if not fresh:
            with contextlib.suppress(FileNotFoundError, UserError):
                return verify(source, cache_dir).path
        with _reasons(source, cache_dir):
            commit = _commit(source)
        raw = _rows(source, commit, cache_dir)
        with contextlib.closing(raw):
            return keep(source, _counting(raw, counted), cache_dir, revision=commit)


def _counting(rows: Iterator[Row], counted: Callable[[int], None]) -> Iterator[Row]:
    for number, row in enumerate(rows, 1):
        yield row
        counted(number)


def _commit(source: Source) -> str:
    """The commit that a revision names now; the table is then read at that commit."""
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(source.dataset, revision=source.revision, timeout=30)
    return str(info.sha)


def _rows(source: Source, commit: str, cache_dir: Path) -> Any:
    """The raw rows, one at a time."""
    if source.file is not None:
        for file in _files(source, commit, cache_dir):
            yield from _each(file_rows(file, split_member(source.file)[1]), source, cache_dir)
        return
    folder = scratch(source, cache_dir)
    try:
        with _reasons(source, cache_dir), _quiet():
            import datasets

            # Arrow's files are needed while they are copied, and not afterwards.
            table = datasets.load_dataset(
                source.dataset,
                source.config,
                split=source.split,
                revision=commit,
                cache_dir=str(folder),
            )
        yield from _each(iter(table), source, cache_dir)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _files(source: Source, commit: str, cache_dir: Path) -> list[Path]:
    """The raw files of a source, downloaded by the hub's own client."""
    import fnmatch

    from huggingface_hub import HfApi, hf_hub_download

    assert source.file is not None
    wanted = split_member(source.file)[0]
    names = [wanted]
    with _reasons(source, cache_dir):
        if "*" in wanted:
            have = HfApi().list_repo_files(source.dataset, repo_type="dataset", revision=commit)
            names = sorted(fnmatch.filter(have, wanted))
            if not names:
                raise FileNotFoundError(f"no file {wanted} in it; it has {', '.join(have[:8])}")
        return [
            Path(hf_hub_download(source.dataset, name, repo_type="dataset", revision=commit))
            for name in names
        ]


def _each(rows: Iterator[Row], source: Source, cache_dir: Path) -> Iterator[Row]:
    """The same rows; what fails between them is told as `fetch` tells it."""
    while True:
        with _reasons(source, cache_dir):
            try:
                row = next(rows)
            except StopIteration:
                return
        yield row


@contextlib.contextmanager
def _reasons(source: Source, cache_dir: Path) -> Iterator[None]:
    """Turn what the hub's libraries raise into one line that says what to do.

    Raises:
        NotFetched: The hub does not give the table.
        UserError: This machine cannot hold it.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        for step in _chain(error):
            if isinstance(step, OSError) and step.errno in _LOCAL:
                where = step.filename or cache_dir
                raise UserError(
                    f"the dataset {source.dataset} cannot be kept: {step.strerror} ({where}); make "
                    "room, or set KVBENCH_CACHE (copies) or HF_HOME (downloads) to another folder"
                ) from error
        raise NotFetched(_reason(source, error)) from error


def _reason(source: Source, error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/datasets/{source.dataset}"
    chain = _chain(error)
    login = "log in with `hf auth login`, or set HF_TOKEN"
    text = str(error)
    # `datasets` does not always say what its own error was raised from.
    if any(isinstance(e, GatedRepoError) for e in chain) or "is a gated dataset" in text:
        return (
            f"needs the dataset {source.dataset}, which is gated: accept its terms on {page}, "
            f"then {login}"
        )
    if any(isinstance(e, RepositoryNotFoundError) for e in chain):
        return (
            f"needs the dataset {source.dataset}, which the hub does not show: there is no {page}, "
            f"or it is private, and then {login}"
        )
    if any(isinstance(e, RevisionNotFoundError) for e in chain):
        return f"needs the dataset {source.dataset}, which has no revision {source.revision}"
    if "scripts are no longer supported" in text:
        return (
            f"needs the dataset {source.dataset}, whose repository holds a loading script, which "
            "is never run; a raw file of it, or of its branch refs/convert/parquet, would be right"
        )
    told: BaseException = error
    if type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        told = error.__cause__  # of itself it only says that there was an error
    line = next((s for s in str(told).splitlines() if s.strip()), "")
    return f"needs {source.label} from {HUB}: {type(told).__name__}: {line}"


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what it was raised from: `datasets` wraps the hub's own."""
    found: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in found:
        found.append(step)
        step = step.__cause__ or step.__context__
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the bars of `datasets` away: it counts what it converts, which the user did not ask."""
    import datasets

    shown = not datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
