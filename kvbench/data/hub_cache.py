"""The caches of `huggingface_hub` and `datasets`: fill them, search them, read from them."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import datasets
from datasets.arrow_reader import ArrowReader
from datasets.naming import camelcase_to_snakecase
from huggingface_hub import HfApi, constants, get_session, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from kvbench.benchmark import Source
from kvbench.data.formats import file_rows, split_member
from kvbench.data.records import NotFetched, Row
from kvbench.errors import UserError

HUB = "the Hugging Face hub"

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})(.*)", re.DOTALL)

_MISSING = "the cache does not hold all of its files"

_LOCAL = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}
"""Errors of this machine rather than of the hub."""


@functools.cache
def unreachable() -> str:
    """Why the hub cannot be used, or ""; completes "the hub ...". Tried once, for five seconds."""
    if constants.HF_HUB_OFFLINE:
        return "is not contacted because HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # whatever the reason, there is no hub
        return f"cannot be reached ({type(error).__name__} at {constants.ENDPOINT})"
    return ""


def download(source: Source, *, force: bool = False) -> str:
    """Have the hub's clients download a table into their caches.

    Args:
        source: The table.
        force: Whether to download again what the caches hold.

    Returns:
        The commit.
    """
    info = HfApi().dataset_info(source.dataset, revision=source.revision, timeout=30)
    commit = str(info.sha)
    if source.file is None:
        _convert(source.dataset, source, commit, force)
        return commit
    pattern = split_member(source.file)[0]
    names = [file.rfilename for file in info.siblings or ()]
    wanted = [name for name in names if _matches(name, pattern)]
    if not wanted:
        raise FileNotFoundError(f"it has no file {pattern}; it has {', '.join(names[:8])}")
    for name in wanted:
        hf_hub_download(
            source.dataset, name, repo_type="dataset", revision=commit, force_download=force
        )
    return commit


def cached_commits(source: Source) -> list[str]:
    """The cached commits of a dataset that a revision can mean, best first.

    A branch or tag means the commit that it named when the hub was last asked. No revision means
    `main` or, after that, any commit without a name, the latest download first.
    """
    folder = repo_folder_name(repo_id=source.dataset, repo_type="dataset")
    refs = Path(constants.HF_HUB_CACHE, folder, "refs")
    named = {str(p.relative_to(refs)): p.read_text() for p in refs.rglob("*") if p.is_file()}
    folders = [*refs.parent.glob("snapshots/*"), *_arrow_folders(source, "*", source.config)]
    newest = sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)
    cached = [folder.name for folder in newest if _COMMIT.fullmatch(folder.name)]
    revision = source.revision or constants.DEFAULT_REVISION
    meant = [named.get(revision, revision)]
    if source.revision is None:
        meant += [commit for commit in cached if commit not in named.values()]
    return list(dict.fromkeys(commit for commit in meant if commit in cached))


def read(source: Source, commit: str) -> Iterator[Row]:
    """Read the raw rows of a table from the caches, one at a time.

    Raises:
        FileNotFoundError: The caches do not hold the table, or only parts of it.
    """
    if source.file is None:
        folder = _arrow_folder(source, commit)
        info = datasets.DatasetInfo.from_directory(str(folder))
        reader = ArrowReader(str(folder), info)
        content = reader.read(info.dataset_name, source.split, (info.splits or {}).values())
        table = datasets.Dataset(**content)
        if source.columns:
            table = table.select_columns([n for n in source.columns if n in table.column_names])
        for batch in table.with_format("arrow").iter(batch_size=64):  # leaves images encoded
            yield from batch.to_pylist()
        return
    pattern, member = split_member(source.file)
    folder = _snapshot(source, commit, pattern)
    names = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
    wanted = sorted(name for name in names if _matches(name, pattern))
    if not wanted:
        raise FileNotFoundError(_MISSING)
    _check_shards(wanted)
    for name in wanted:
        yield from file_rows(folder / name, member)


def _matches(name: str, pattern: str) -> bool:
    return fnmatch(name, pattern) if "*" in pattern else name == pattern


def _snapshot(source: Source, commit: str, pattern: str) -> Path:
    """The folder of a commit's cached files, which may lack some that match the pattern."""
    try:
        folder = snapshot_download(
            source.dataset,
            repo_type="dataset",
            revision=commit,
            allow_patterns=pattern,
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        raise FileNotFoundError(_MISSING) from None
    return Path(folder)


def _check_shards(names: Iterable[str]) -> None:
    """Check that no shard is missing where names such as `x-00000-of-00002.parquet` count them."""
    shards = [match.groups() for name in names if (match := _SHARD.fullmatch(name))]
    for group in set(shards):
        if shards.count(group) < int(group[1]):
            raise FileNotFoundError(
                f"the cache holds {shards.count(group)} of {int(group[1])} files"
            )


def _arrow_folder(source: Source, commit: str) -> Path:
    """The folder in the cache of `datasets` that holds a table; converted now if need be."""
    try:
        snapshot = str(_snapshot(source, commit, "README.md"))
        config = source.config or datasets.get_dataset_default_config_name(snapshot)
    except FileNotFoundError:  # without raw files, converted ones can still be there
        snapshot, config = "", source.config
    folders = _arrow_folders(source, commit, config)
    if len(folders) == 1:
        return folders[0]
    if not snapshot:
        raise FileNotFoundError(_MISSING)
    if Path(snapshot, f"{source.dataset.rpartition('/')[2]}.py").exists():
        raise RuntimeError("Dataset scripts are no longer supported")
    return _convert(snapshot, source)


def _arrow_folders(source: Source, commit: str, config: str | None) -> list[Path]:
    *organisation, name = source.dataset.split("/")
    words = "___".join([*organisation, camelcase_to_snakecase(name)])
    root = Path(datasets.config.HF_DATASETS_CACHE, words)
    config = glob.escape(config) if config else "*"
    return [info.parent for info in root.glob(f"{config}/*/{commit}/dataset_info.json")]


def _convert(place: str, source: Source, commit: str | None = None, force: bool = False) -> Path:
    """Have `datasets` convert a table of the hub, or of a local folder, to Arrow in its cache."""
    mode = "force_redownload" if force else None
    shown = not datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # they count internal conversions
    try:
        builder = datasets.load_dataset_builder(
            place, source.config, revision=commit, download_mode=mode
        )
        if commit is None:
            for files in (builder.config.data_files or {}).values():
                _check_shards(files)
        elif builder.hash != commit:  # `datasets` falls back on another commit that it has cached
            raise ConnectionError(f"`datasets` cannot load commit {commit}")
        builder.download_and_prepare(download_mode=mode)
    finally:
        if shown:
            datasets.enable_progress_bars()
    return Path(builder.cache_dir)


# --- reasons --------------------------------------------------------------------------------------


@contextlib.contextmanager
def reasons(source: Source) -> Iterator[None]:
    """Turn what the hub's clients raise into one line that says what to do.

    Raises:
        NotFetched: The hub does not provide the table.
        UserError: This machine cannot store it.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise _explained(source, error) from error


def _explained(source: Source, error: Exception) -> UserError:
    chain: list[BaseException] = [error]  # `datasets` wraps the errors of `huggingface_hub`
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    needs = f"needs the dataset {source.dataset}"
    page = f"{constants.ENDPOINT}/datasets/{source.dataset}"
    login = "log in with `hf auth login` or set HF_TOKEN"
    text = str(error)
    for step in chain:
        if isinstance(step, OSError) and step.errno in _LOCAL:
            place = step.filename or constants.HF_HOME
            return UserError(
                f"cannot store or read the dataset {source.dataset}: {step.strerror} ({place}); "
                "free some space, or set HF_HOME to another folder"
            )
        if isinstance(step, GatedRepoError) or "is a gated dataset" in text:
            return NotFetched(f"{needs}, which is gated: accept its terms on {page}, then {login}")
        if isinstance(step, RepositoryNotFoundError):
            return NotFetched(f"{needs}, but {page} does not exist or is private; {login}")
        if isinstance(step, RevisionNotFoundError):
            return NotFetched(f"{needs}, which has no revision {source.revision}")
    if "scripts are no longer supported" in text:
        return NotFetched(
            f"{needs}, which needs a loading script, and kvbench never runs one; name a raw file "
            "of its repository, or of its branch refs/convert/parquet"
        )
    wrapped = type(error).__name__ == "DatasetGenerationError" and error.__cause__
    cause = wrapped or error  # the wrapper only says that there was an error
    line = next((s for s in str(cause).splitlines() if s.strip()), "")
    return NotFetched(f"needs {source.label} from {HUB}: {type(cause).__name__}: {line}")
