"""The folder of a training: which training it holds, its checkpoints and its log."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench.files import cannot, replacing

RUN = "training.json"
"""Everything that can change the gates."""

LOG = "training.jsonl"
PICTURE = "training.png"
MADE = "gates.json"
"""Written last."""

CHECKPOINTS = "checkpoints"
COMPLETE = "complete"
"""An empty file that is written last; a checkpoint without it is torn."""


def is_finished(out: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a folder holds the gates of exactly this training, and nothing is left to do."""
    if (out / CHECKPOINTS).exists() or not (out / MADE).is_file():
        return False
    try:
        return bool(json.loads((out / RUN).read_text(encoding="utf-8")) == identity)
    except (OSError, ValueError, RecursionError):
        return False


def check_same(out: Path, identity: Mapping[str, Any]) -> None:
    """Refuse a folder that holds another training, unless there is nothing to lose in it.

    Args:
        out: The folder.
        identity: Everything that can change the gates.

    Raises:
        UserError: The folder holds gates or checkpoints of another training.
    """
    path = out / RUN
    valuable = (out / MADE).exists() or any((out / CHECKPOINTS).glob(f"*/{COMPLETE}"))
    if not path.is_file() or not valuable:
        return
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise UserError(f"cannot read {path}; use --fresh to start again") from None
    for name in sorted({*earlier, *identity}):
        if earlier.get(name) != identity.get(name):
            raise UserError(
                f"{out} holds a training with {name}={earlier.get(name)} instead of "
                f"{identity.get(name)}; use another --out, or --fresh to throw it away"
            )


def claim(out: Path, identity: Mapping[str, Any], fresh: bool) -> None:
    """Start the folder, or continue the same training in it.

    Call it only after everything that can be wrong has been checked: a start that fails must not
    keep a corrected one out of its folder.

    Raises:
        UserError: The folder holds another training, or cannot be written.
    """
    if fresh:
        shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    else:
        check_same(out, identity)
    try:
        if fresh:  # MADE as well: a new RUN beside old gates would look finished
            for name in (MADE, RUN, LOG, PICTURE):
                (out / name).unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("write", out, error) from None
    with replacing(out / RUN) as part:
        part.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")


def latest_checkpoint(out: Path) -> tuple[Path | None, int]:
    """The newest complete checkpoint and its step, or None and 0; torn ones are deleted."""
    latest, step = None, 0
    for path in (out / CHECKPOINTS).glob("checkpoint-*"):
        number = int(path.name.rpartition("-")[2])
        if not (path / COMPLETE).is_file():
            shutil.rmtree(path)
        elif number > step:
            latest, step = path, number
    return latest, step


def truncate_log(out: Path, step: int) -> list[dict[str, Any]]:
    """Remove the records after `step` from the log, and a torn last line; return the others."""
    path = out / LOG
    records: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if record.get("step", 0) <= step:
                records.append(record)
    with replacing(path) as part:
        part.write_text("".join(json.dumps(x) + "\n" for x in records), encoding="utf-8")
    return records


def describe(record: Mapping[str, Any]) -> str:
    """A record of the log as text."""
    names = ("loss", "kl", "ntp", "capacity", "retained", "fit", "smooth")
    parts = [f"{name} {record[name]:.4g}" for name in names if name in record]
    return f"step {record['step']}: {', '.join(parts)}"
