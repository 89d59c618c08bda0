"""Training folder: the record of its run, checkpoints and log."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvbench.errors import UserError
from kvbench.files import cannot, replacing
from kvbench.tables.plot_style import marker_styles, plot_style

RUN = "training.json"
"""All settings that affect the gates."""

LOG = "training.jsonl"
PICTURE = "training.png"
GATES_FILE = "gates.json"
"""Written last, so it marks a finished run."""

CHECKPOINTS = "checkpoints"
COMPLETE = "complete"
"""Empty file written last; a checkpoint without it is incomplete."""


def is_finished(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Return whether a folder holds the finished gates of exactly this run."""
    if (folder / CHECKPOINTS).exists() or not (folder / GATES_FILE).is_file():
        return False
    try:
        return bool(json.loads((folder / RUN).read_text(encoding="utf-8")) == identity)
    except (OSError, ValueError, RecursionError):
        return False


def check_same(folder: Path, identity: Mapping[str, Any]) -> None:
    """Reject a folder with gates or checkpoints of another training run.

    Args:
        folder: Training folder.
        identity: All settings that affect the gates.

    Raises:
        UserError: The folder holds another run.
    """
    record_path = folder / RUN
    has_progress = (folder / GATES_FILE).exists() or any((folder / CHECKPOINTS).glob(f"*/{COMPLETE}"))
    if not record_path.is_file() or not has_progress:
        return
    try:
        earlier = json.loads(record_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise UserError(f"cannot read {record_path}; use --fresh to start again") from None
    for setting in sorted({*earlier, *identity}):
        if earlier.get(setting) != identity.get(setting):
            raise UserError(
                f"{folder} holds a training run with {setting}={earlier.get(setting)} instead of "
                f"{identity.get(setting)}; use another --out, or --fresh to discard it"
            )


def claim(folder: Path, identity: Mapping[str, Any], fresh: bool) -> None:
    """Start a run in the folder, or continue the same run.

    Call it only after all other checks: a failed start must not block a corrected one from the same folder.

    Raises:
        UserError: The folder holds another run, or is not writable.
    """
    if fresh:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    else:
        check_same(folder, identity)
    try:
        if fresh:  # also GATES_FILE: a new RUN next to old gates would look finished
            for file_name in (GATES_FILE, RUN, LOG, PICTURE):
                (folder / file_name).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot("write", folder, error) from None
    with replacing(folder / RUN) as temporary_path:
        temporary_path.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")


def latest_checkpoint(folder: Path) -> tuple[Path | None, int]:
    """Return the newest complete checkpoint and its step, or None and 0; delete incomplete ones."""
    latest_path, latest_step = None, 0
    for checkpoint in (folder / CHECKPOINTS).glob("checkpoint-*"):
        step_number = int(checkpoint.name.rpartition("-")[2])
        if not (checkpoint / COMPLETE).is_file():
            shutil.rmtree(checkpoint)
        elif step_number > latest_step:
            latest_path, latest_step = checkpoint, step_number
    return latest_path, latest_step


def truncate_log(folder: Path, max_step: int) -> list[dict[str, Any]]:
    """Remove the log records after `max_step` and an incomplete last line; return the rest."""
    log_path = folder / LOG
    records: list[dict[str, Any]] = []
    if log_path.is_file():
        for log_line in log_path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(log_line)
            except (ValueError, RecursionError):
                continue
            if record.get("step", 0) <= max_step:
                records.append(record)
    with replacing(log_path) as temporary_path:
        temporary_path.write_text("".join(json.dumps(entry) + "\n" for entry in records), encoding="utf-8")
    return records


def describe(record: Mapping[str, Any]) -> str:
    """Format a log record as text."""
    loss_names = ("loss", "kl", "ntp", "capacity", "retained", "fit", "smooth")
    loss_texts = [f"{loss_name} {record[loss_name]:.4g}" for loss_name in loss_names if loss_name in record]
    return f"step {record['step']}: {', '.join(loss_texts)}"


_TITLES = {
    "kl": "KL",
    "ntp": "next token",
    "capacity": "capacity",
    "fit": "fit",
    "smooth": "neighbours",
    "retained": "fraction retained at the end",
}


def draw(log_records: Sequence[Mapping[str, Any]], figure_path: Path, title: str) -> None:
    """Draw a training log.

    Args:
        log_records: Log records, at least one.
        figure_path: Output PNG file.
        title: Figure title.
    """
    steps = [record["step"] for record in log_records]
    loss_names = [loss_name for loss_name in _TITLES if loss_name in log_records[0]]
    colour = marker_styles([title])[title][0]
    with plot_style():
        figure = Figure(figsize=(3.2 * len(loss_names), 2.6), layout="constrained", dpi=120)
        axes = figure.subplots(1, len(loss_names), squeeze=False)[0]
        for loss_axes, loss_name in zip(axes, loss_names, strict=True):
            loss_axes.plot(steps, [record[loss_name] for record in log_records], color=colour)
            loss_axes.set_title(_TITLES[loss_name])
            loss_axes.set_xlabel("step")
            loss_axes.set_ylim(bottom=0)
        figure.suptitle(title)
        figure.savefig(figure_path, metadata={"Software": None})
