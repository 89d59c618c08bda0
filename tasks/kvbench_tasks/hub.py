"""Data from the Hugging Face hub: fetched once, kept as JSONL, and never waited for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvbench.harness.data import load_hashed, save_hashed
from kvbench.harness.protocol import NeedsHub


@functools.cache
def reachable() -> bool:
    """Whether the hub answers; asked once, for three seconds. `HF_HUB_OFFLINE` is obeyed."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=3)
    except Exception:  # whatever keeps the hub away, it is away
        return False
    return True


def fetch(
    dataset: str,
    config: str | None,
    split: str,
    *,
    cache_dir: Path,
    convert: Callable[[Any], list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Give a dataset's content, from our copy or from the hub.

    Args:
        dataset: Its id on the hub.
        config: Its configuration.
        split: Its split.
        cache_dir: Our copy is in `hub/` below it.
        convert: Takes from the loaded split what is to be kept, as JSON rows.

    Raises:
        NeedsHub: There is neither a copy nor a hub.
    """
    name = "-".join(part for part in (dataset.replace("/", "--"), config, split) if part)
    path = cache_dir / "hub" / f"{name}.jsonl"
    rows = load_hashed(path)
    if rows:
        return rows
    message = f"needs the dataset {dataset} from the Hugging Face hub, which cannot be reached"
    if not reachable():
        raise NeedsHub(message)
    import datasets

    try:
        loaded = datasets.load_dataset(
            dataset, config, split=split, cache_dir=str(cache_dir / "datasets")
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise NeedsHub(f"{message} ({reason})") from error
    rows = convert(loaded)
    save_hashed(path, rows)
    return rows
