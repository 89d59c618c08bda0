"""The caches of `huggingface_hub` and `datasets`: filling, searching and reading them."""

from __future__ import annotations

import contextlib
import errno
import glob
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import datasets
from datasets.arrow_reader import ArrowReader
from datasets.naming import camelcase_to_snakecase
from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
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


def download(source: Source, *, force: bool = False) -> str:
    """Download a table with the hub's clients into their caches.

    Args:
        force: Whether to download cached files again.

    Returns:
        The commit.
    """
    dataset_info = HfApi().dataset_info(source.dataset, revision=source.revision, timeout=30)
    commit = str(dataset_info.sha)
    if source.file is None:
        _convert(source.dataset, source, commit, force)
        return commit
    pattern = split_member(source.file)[0]
    file_names = [file.rfilename for file in dataset_info.siblings or ()]
    matching_files = [file_name for file_name in file_names if _matches(file_name, pattern)]
    if not matching_files:
        raise FileNotFoundError(f"it has no file {pattern}; it has {', '.join(file_names[:8])}")
    for file_name in matching_files:
        hf_hub_download(source.dataset, file_name, repo_type="dataset", revision=commit, force_download=force)
    return commit


def cached_commits(source: Source) -> list[str]:
    """Return the cached commits of a dataset that match its revision, best first.

    A branch or tag means the commit that it named when the hub was last asked. No revision means `main` or, after that,
    any unnamed commit, the latest download first.
    """
    folder = repo_folder_name(repo_id=source.dataset, repo_type="dataset")
    refs_folder = Path(constants.HF_HUB_CACHE, folder, "refs")
    commits_by_ref = {
        str(path.relative_to(refs_folder)): path.read_text() for path in refs_folder.rglob("*") if path.is_file()
    }
    folders = [*refs_folder.parent.glob("snapshots/*"), *_arrow_folders(source, "*", source.config)]
    newest_folders = sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)
    present_commits = [folder.name for folder in newest_folders if _COMMIT.fullmatch(folder.name)]
    revision = source.revision or constants.DEFAULT_REVISION
    candidates = [commits_by_ref.get(revision, revision)]
    if source.revision is None:
        candidates += [commit for commit in present_commits if commit not in commits_by_ref.values()]
    return list(dict.fromkeys(commit for commit in candidates if commit in present_commits))


def read(source: Source, commit: str) -> Iterator[Row]:
    """Read the raw rows of a table from the caches, one at a time.

    Raises:
        FileNotFoundError: The caches do not hold the table, or only parts of it.
    """
    if source.file is None:
        folder = _arrow_folder(source, commit)
        dataset_info = datasets.DatasetInfo.from_directory(str(folder))
        reader = ArrowReader(str(folder), dataset_info)
        read_options = reader.read(dataset_info.dataset_name, source.split, (dataset_info.splits or {}).values())
        dataset = datasets.Dataset(**read_options)
        if source.columns:
            dataset = dataset.select_columns([column for column in source.columns if column in dataset.column_names])
        for batch in dataset.with_format("arrow").iter(batch_size=64):  # leaves images encoded
            yield from batch.to_pylist()
        return
    pattern, member = split_member(source.file)
    folder = _snapshot(source, commit, pattern)
    file_names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    matching_files = sorted(file_name for file_name in file_names if _matches(file_name, pattern))
    if not matching_files:
        raise FileNotFoundError(_MISSING)
    _check_shards(matching_files)
    for file_name in matching_files:
        yield from file_rows(folder / file_name, member)


def _matches(file_name: str, pattern: str) -> bool:
    return fnmatch(file_name, pattern) if "*" in pattern else file_name == pattern


def _snapshot(source: Source, commit: str, pattern: str) -> Path:
    """Return the folder of a commit's cached files, which may lack some that match the pattern."""
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


def _check_shards(file_names: Iterable[str]) -> None:
    """Check that no shard is missing if names such as `x-00000-of-00002.parquet` count them."""
    shards = [match.groups() for file_name in file_names if (match := _SHARD.fullmatch(file_name))]
    for shard_set in set(shards):
        if shards.count(shard_set) < int(shard_set[1]):
            raise FileNotFoundError(f"the cache holds {shards.count(shard_set)} of {int(shard_set[1])} files")


def _arrow_folder(source: Source, commit: str) -> Path:
    """Return the cache folder of `datasets` that holds a table, converting it first if necessary."""
    try:
        snapshot = str(_snapshot(source, commit, "README.md"))
        config = source.config or datasets.get_dataset_default_config_name(snapshot)
    except FileNotFoundError:  # converted files can exist without the raw ones
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
    *organisation, dataset_name = source.dataset.split("/")
    folder_name = "___".join([*organisation, camelcase_to_snakecase(dataset_name)])
    datasets_root = Path(datasets.config.HF_DATASETS_CACHE, folder_name)
    config = glob.escape(config) if config else "*"
    return [info_path.parent for info_path in datasets_root.glob(f"{config}/*/{commit}/dataset_info.json")]


def _convert(dataset_path: str, source: Source, commit: str | None = None, force: bool = False) -> Path:
    """Convert a table of the hub, or of a local folder, to Arrow in the cache of `datasets`."""
    download_mode = "force_redownload" if force else None
    shows_bars = not datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()  # they count internal conversions
    try:
        builder = datasets.load_dataset_builder(
            dataset_path, source.config, revision=commit, download_mode=download_mode
        )
        if commit is None:
            for shard_names in (builder.config.data_files or {}).values():
                _check_shards(shard_names)
        elif builder.hash != commit:  # `datasets` falls back to another cached commit
            raise ConnectionError(f"`datasets` cannot load commit {commit}")
        builder.download_and_prepare(download_mode=download_mode)
    finally:
        if shows_bars:
            datasets.enable_progress_bars()
    return Path(builder.cache_dir)


# --- reasons --------------------------------------------------------------------------------------


@contextlib.contextmanager
def reasons(source: Source) -> Iterator[None]:
    """Turn exceptions of the hub's clients into one-line errors that say what to do.

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
    causes: list[BaseException] = [error]  # `datasets` wraps the errors of `huggingface_hub`
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    requirement = f"needs the dataset {source.dataset}"
    dataset_url = f"{constants.ENDPOINT}/datasets/{source.dataset}"
    login_hint = "log in with `hf auth login` or set HF_TOKEN"
    error_text = str(error)
    for exception in causes:
        if isinstance(exception, OSError) and exception.errno in _LOCAL:
            location = exception.filename or constants.HF_HOME
            return UserError(
                f"cannot store or read the dataset {source.dataset}: {exception.strerror} ({location}); "
                "free some space, or set HF_HOME to another folder"
            )
        if isinstance(exception, GatedRepoError) or "is a gated dataset" in error_text:
            return NotFetched(f"{requirement}, which is gated: accept its terms on {dataset_url}, then {login_hint}")
        if isinstance(exception, RepositoryNotFoundError):
            return NotFetched(f"{requirement}, but {dataset_url} does not exist or is private; {login_hint}")
        if isinstance(exception, RevisionNotFoundError):
            return NotFetched(f"{requirement}, which has no revision {source.revision}")
    if "scripts are no longer supported" in error_text:
        return NotFetched(
            f"{requirement}, which needs a loading script, and kvbench never runs one; "
            "name a raw file of its repository, or of its branch refs/convert/parquet"
        )
    wrapped_cause = type(error).__name__ == "DatasetGenerationError" and error.__cause__
    cause = wrapped_cause or error  # the wrapper itself has no details
    first_line = next((text_line for text_line in str(cause).splitlines() if text_line.strip()), "")
    return NotFetched(f"needs {source.label} from {HUB}: {type(cause).__name__}: {first_line}")
