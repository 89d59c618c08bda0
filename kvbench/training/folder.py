"""The folder of a training: which training it holds, and whether that is finished."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.training.command import Plan

RUN = "training.json"
PICTURE = "training.png"
CHECKPOINTS = "checkpoints"
MADE = "gates.json"
"""Written last."""


def wanted_of(planned: Plan) -> dict[str, Any]:
    """All that can change the gates, as the folder's `training.json` holds it."""
    from kvbench.named import model_digest

    return {
        "policy": planned.method.name,
        "model": planned.model,
        "revision": planned.revision or "",
        "weights": model_digest(planned.model),
        "data": planned.data,
        "device": planned.device.type,
        "dtype": str(planned.dtype).removeprefix("torch."),
        **planned.settings,
    }


def finished(planned: Plan) -> bool:
    """Whether the folder holds what this very training made, and nothing is left to do."""
    out = planned.out
    if (out / CHECKPOINTS).exists() or not (out / MADE).is_file():
        return False
    try:
        return bool(json.loads((out / RUN).read_text(encoding="utf-8")) == wanted_of(planned))
    except (OSError, ValueError):
        return False


def check_same(out: Path, wanted: Mapping[str, Any]) -> None:
    """Refuse a folder that holds another training, unless that has left nothing to lose.

    Args:
        out: The folder.
        wanted: All that can change the gates, from `wanted_of`.

    Raises:
        UserError: The folder holds gates or checkpoints of another training.
    """
    from kvbench.training.trainer import COMPLETE

    path = out / RUN
    valuable = (out / MADE).exists() or any((out / CHECKPOINTS).glob(f"*/{COMPLETE}"))
    if path.is_file() and valuable:
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(f"{path} cannot be read; --fresh begins anew") from None
        other = sorted(k for k in {*before, *wanted} if before.get(k) != wanted.get(k))
        if other:
            k = other[0]
            raise UserError(
                f"{out} holds a training with {k}={before.get(k)} and not {wanted.get(k)}: another "
                "--out would be right, or --fresh, which throws it away"
            )


def claim(out: Path, wanted: Mapping[str, Any], fresh: bool) -> None:
    """Begin the folder, or continue the same training in it.

    Called only once everything that can be wrong has been checked: a start that fails must not
    keep a corrected one out of its folder.

    Raises:
        UserError: The folder holds another training, or cannot be written.
    """
    from kvbench.training.trainer import LOG

    path = out / RUN
    if fresh:
        shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
        for name in (RUN, LOG, PICTURE):
            with suppress(OSError):
                (out / name).unlink()
    else:
        check_same(out, wanted)
    try:
        out.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
