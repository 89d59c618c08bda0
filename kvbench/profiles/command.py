"""`kvbench profile heads`: plans the needle task, measures, writes the profile."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError, nearest
from kvbench.profiles.files import KINDS, HeadProfile, Kind, shipped_path, user_path
from kvbench.progress import Reporter

if TYPE_CHECKING:
    from kvbench.profiles.measure import Measured

TASK, SAMPLES = "niah_depth", 33
"""The needle at eleven depths, three times each."""


def profile_heads(
    model: str,
    kind: str,
    given: Mapping[str, Any],
    out: Path | None,
    reporter: Reporter,
) -> list[str]:
    """Measure one kind of profile of a model and write it.

    Args:
        model: `reference`, a folder or a hub id.
        kind: `reason` or `copy`.
        given: Further keys of a grid: tasks, lengths, samples, seed, device, dtype, revision,
            chat_template.
        out: The file; None for the user's cache.
        reporter: Told how far it is.

    Returns:
        Lines for the user: what was written, and what it says.

    Raises:
        UserError: An option is out of range, the model cannot be loaded, the task has no needle, or
            no head attends to one.
    """
    if kind not in KINDS:
        raise UserError(f"--kind {kind}{nearest(kind, KINDS)}: {' or '.join(KINDS)} would be right")
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; the path of a file would be right")
    path = out or user_path(model, kind)
    try:  # before the work and not after it
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
    made = profiles(model, (kind,), given, reporter)[kind]
    made.save(path)
    lines = [f"wrote {path}", describe(made)]
    shipped = shipped_path(model, kind)
    if out is None and shipped is not None:
        lines.append(f"the shipped profile goes before it: profile={path} makes a policy read it")
    elif out is not None:
        lines.append(f"a policy reads it by profile={path}")
    return lines


def profiles(
    model: str, kinds: tuple[str, ...], given: Mapping[str, Any], reporter: Reporter
) -> dict[str, HeadProfile]:
    """Measure profiles of a model, all kinds in one pass; arguments as in `profile_heads`."""
    import kvbench
    from kvbench import reference
    from kvbench.engine.loading import load_model
    from kvbench.engine.models import check_single, model_info
    from kvbench.profiles.measure import measure
    from kvbench.profiles.needles import find_needles
    from kvbench.runs.grid import Grid
    from kvbench.runs.planning import plan

    known = {key: value for key, value in given.items() if value is not None}
    grid = Grid.from_dict(
        {"tasks": TASK, "samples": 33, **known, "models": model, "policies": "full"}
    )
    (stage,) = plan(grid, reporter.message).stages
    needles = [n for job in stage.jobs for n in find_needles(stage.tokenizer, job.prompts)]
    network = load_model(
        model,
        grid.revision,
        stage.device,
        stage.dtype,
        device_map=grid.device_map,
        quantization=grid.quantization,
    )
    check_single(network, "a head profile")
    info = model_info(network)
    reporter.start(len(needles), f"head profile of {model}")
    try:
        found = measure(network, stage.tokenizer, needles, reporter)
    finally:
        reporter.stop()
    return {
        kind: HeadProfile(
            model=reference.NAME if model == "reference" else model,
            revision=stage.jobs[0].cells[0].model_revision,
            kind=kind,
            layers=info.layers,
            kv_heads=info.kv_heads,
            query_heads=info.query_heads,
            scores=normalised(found, kind, info.kv_heads),
            task=",".join(dict.fromkeys(job.task.name for job in stage.jobs)),
            lengths=tuple(dict.fromkeys(job.task.length for job in stage.jobs)),
            samples=grid.samples,
            seed=grid.seed,
            answered=round(found.answered, 4),
            kvbench=kvbench.__version__,
        )
        for kind in kinds
    }


def normalised(found: Measured, kind: str, kv_heads: int) -> tuple[tuple[float, ...], ...]:
    """Scores of the KV heads `[L][H]`: the group's query heads summed, together 1.

    Raises:
        UserError: They are all 0.
    """
    scores = {str(name): x for name, x in found.scores.items()}
    summed = scores[kind].unflatten(1, (kv_heads, -1)).sum(-1)
    total = float(summed.sum())
    if total <= 0:
        other: Kind = "reason" if kind == "copy" else "copy"
        raise UserError(
            f"no head of the model attends to a needle as the {kind} profile counts it "
            f"({found.answered:.0%} of the samples were answered rightly); "
            f"--kind {other} or more --samples may be right"
        )
    return tuple(tuple(row) for row in (summed / total).tolist())


def describe(made: HeadProfile) -> str:
    """What a profile says, in one line."""
    flat = sorted(
        ((x, i, h) for i, row in enumerate(made.scores) for h, x in enumerate(row)),
        key=lambda entry: (-entry[0], entry[1:]),
    )
    shown = ", ".join(f"layer {i} head {h} {x:.1%}" for x, i, h in flat[:4])
    held = itertools.accumulate(x for x, *_ in flat)
    half = next(n for n, sum_so_far in enumerate(held, 1) if sum_so_far >= 0.499999)
    text = (
        f"{made.kind} profile of {made.model}: {made.layers} layers by {made.kv_heads} KV heads; "
        f"half of it lies in {half} of the {len(flat)} heads ({shown})"
    )
    if made.answered is not None:
        text += f"; the model answered {made.answered:.0%} of the samples rightly"
        if made.answered < 0.5:
            text += ", which is little for a profile to rest on"
    return text
