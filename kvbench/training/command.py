"""`kvbench train gates`: resolves what was given, trains, writes gates, log and picture."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError, nearest
from kvbench.progress import Reporter, Silent
from kvbench.registry import TRAINERS, get
from kvbench.training.folder import CHECKPOINTS, MADE, PICTURE, check_same, claim, wanted_of

if TYPE_CHECKING:
    import torch

    from kvbench.training.method import Method

_OURS: dict[str, Any] = {
    "steps": None,
    "tokens": None,
    "batch_size": 1,
    "accumulate": 4,
    "warmup": 0,
    "capacity_weight": 1.0,
    "capacity_reduce": "mean",
    "kl": True,
    "ntp": True,
    "with_capacity": True,
    "reverse_kl": False,
    "seed": 0,
    "split": "train",
    "subset": None,
    "column": None,
    "log_steps": None,
    "save_steps": None,
    "checkpointing": None,
}
_STEPS = 1000
_CHOICES = {
    "schedule": ("linear", "cosine", "constant"),
    "gate": ("mlp", "linear"),
    "input": ("hidden", "kv"),
    "gating": ("additive", "multiplicative"),
    "capacity_reduce": ("mean", "sum"),
}
_COUNTS = (
    *("steps", "tokens", "batch_size", "accumulate", "length", "capacity", "hidden_dim"),
    *("gate_dim", "log_steps", "save_steps"),
)
_DISTILLED = (
    *("kl", "ntp", "with_capacity", "reverse_kl", "capacity", "capacity_weight"),
    *("capacity_reduce", "gating", "input", "tied", "gate_dim", "bias"),
)


@dataclass(frozen=True)
class Plan:
    """A training that is ready to run.

    Attributes:
        model: As the user named it.
        revision: Of the hub; None for the default.
        data: As the user named it.
        method: What is trained.
        settings: Everything that can change the gates.
        out: The folder.
        device: Where.
        dtype: Of the base model's weights; gates are float32.
    """

    model: str
    revision: str | None
    data: str
    method: Method
    settings: dict[str, Any]
    out: Path
    device: torch.device
    dtype: torch.dtype

    @property
    def sequences(self) -> int:
        """Sequences that this process takes."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        per_step = self.settings["batch_size"] * self.settings["accumulate"] * world
        return int(self.settings["steps"] * per_step)

    def lines(self) -> list[str]:
        """What would be done, for the user."""
        s = self.settings
        shape = ", ".join(f"{k} {s[k]}" for k in ("gate", "input", "hidden_dim", "bias"))
        lines = [
            f"{self.method.name} gates of {self.model} ({shape}) on {self.data}",
            f"{s['steps']} steps of {s['batch_size']} x {s['accumulate']} sequences of at most "
            f"{s['length']} tokens: {s['steps'] * s['batch_size'] * s['accumulate'] * s['length']} "
            "tokens at most",
            f"AdamW, learning rate {s['lr']:g} ({s['schedule']}), weight decay "
            f"{s['weight_decay']:g}, seed {s['seed']}, {str(self.dtype).removeprefix('torch.')} on "
            f"{self.device}",
        ]
        if self.method.objective == "distil":
            parts = ["reverse KL" if s["reverse_kl"] else "KL"] if s["kl"] else []
            parts += ["next token"] if s["ntp"] else []
            if s["with_capacity"]:
                parts.append(f"{s['capacity_weight']:g} x capacity of {s['capacity']} tokens")
            lines.append(f"loss: {' + '.join(parts)}; {s['gating']} gating")
        return [*lines, f"to {self.out}"]


def plan(
    model: str,
    policy: str,
    data: str,
    given: Mapping[str, Any],
    *,
    out: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
) -> Plan:
    """Check what was given and fill in the rest.

    Settings that are not given are the paper's; of the reference model, those of its recipe.

    Args:
        model: `reference`, a folder or a hub id.
        policy: The name of a trainer.
        data: As `kvbench.training.data` spells it.
        given: Settings by name.
        out: The folder; None for where the policy looks.
        device: As for a run.
        dtype: As for a run.
        revision: Of a hub model.

    Raises:
        UserError: Something is unknown or out of range.
    """
    method: Method = get(TRAINERS, policy)
    from kvbench.engine.loading import load_config, pick_device, pick_dtype
    from kvbench.training.recipes import RECIPES

    explicit = {key: value for key, value in given.items() if value is not None}
    names = {*_OURS, *method.defaults}
    for key in explicit:
        if key not in names:
            raise UserError(f"{policy} is trained with no setting {key}{nearest(key, names)}")
    if method.objective == "regress":
        odd = sorted(set(explicit) & set(_DISTILLED))
        if odd:
            raise UserError(
                f"--{_flag(odd[0])} is not for {policy}, whose gates are fitted to logits"
            )
    recipe = RECIPES.get(policy, {}) if model == "reference" else {}
    settings = {**_OURS, **method.defaults, **recipe, **explicit}
    if "tokens" in explicit and "steps" in explicit:
        raise UserError("--tokens and --steps say the same: give one of them")
    config = load_config(model, revision).get_text_config()
    window = int(getattr(config, "max_position_embeddings", 0) or 0)
    if window and settings["length"] > window:
        if "length" in explicit:
            raise UserError(
                f"--length {settings['length']}: model {model} takes {window}; nothing is cut off"
            )
        settings["length"] = window
    _check(settings, method)
    if "tokens" in explicit:
        per_step = settings["batch_size"] * settings["accumulate"] * settings["length"]
        settings["steps"] = max(1, round(settings["tokens"] / per_step))
    settings["steps"] = settings["steps"] or _STEPS
    settings["log_steps"] = settings["log_steps"] or max(1, settings["steps"] // 100)
    settings["save_steps"] = settings["save_steps"] or max(1, min(200, settings["steps"] // 5))
    where = pick_device(device)
    if where.type == "cuda" and "LOCAL_RANK" in os.environ:  # torchrun gives every process its GPU
        where = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
    if settings["checkpointing"] is None:  # it halves the speed of what fits anyway
        settings["checkpointing"] = where.type == "cuda"
    del settings["tokens"]
    return Plan(
        model,
        revision,
        data,
        method,
        settings,
        (out or method.place(model)).expanduser(),
        where,
        pick_dtype(dtype, where),
    )


def _check(settings: Mapping[str, Any], method: Method) -> None:
    for name, options in _CHOICES.items():
        value = settings[name]
        if value not in (*options, method.defaults.get(name)):
            raise UserError(f"--{_flag(name)} {value}: {', '.join(options)} would be right")
    for name in _COUNTS:
        value = settings[name]
        if value is not None and value < 1:
            raise UserError(f"--{_flag(name)} {value}: 1 or more would be right")
    for name in ("lr", "weight_decay", "capacity_weight", "warmup", "seed", "bias"):
        value = settings[name]
        least = -math.inf if name == "bias" else 0
        if not math.isfinite(value) or value < least or (name == "lr" and value == 0):
            raise UserError(f"--{_flag(name)} {value}: more than 0 would be right")
    if settings["length"] < 2:
        raise UserError(f"--length {settings['length']}: 2 or more would be right")
    if method.objective != "distil":
        return
    weighs = settings["with_capacity"] and settings["capacity_weight"]
    if not (settings["kl"] or settings["ntp"] or weighs):
        raise UserError("--no-kl --no-ntp --no-capacity leaves nothing to train with")
    if settings["reverse_kl"] and not settings["kl"]:
        raise UserError("--reverse-kl and --no-kl: one of them would be right")
    if weighs and settings["capacity"] >= settings["length"]:
        raise UserError(
            f"--capacity {settings['capacity']} is not below --length {settings['length']}: the "
            "capacity loss would be 0; a smaller capacity, longer data or --no-capacity is right"
        )


def _flag(name: str) -> str:
    known = {"kl": "no-kl", "ntp": "no-ntp", "with_capacity": "no-capacity"}
    return known.get(name, name.replace("_", "-"))


def train(planned: Plan, reporter: Reporter, *, fresh: bool = False) -> list[str]:
    """Train gates, going on where an earlier run with the same settings stopped.

    Args:
        planned: What to do.
        reporter: Told how far it is.
        fresh: Throw away what an earlier run left.

    Returns:
        Lines for the user.

    Raises:
        UserError: The folder holds another training, the data does not fit, the loss diverged.
    """
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise UserError(
            "training needs accelerate: pip install 'kvbench[train]' brings it"
        ) from None
    from kvbench.runs.planning import _quiet_libraries

    _quiet_libraries()
    wanted = wanted_of(planned)
    if os.environ.get("RANK", "0") != "0":  # one of torchrun's others: the first does the talking
        reporter = Silent()
    elif not fresh:
        check_same(planned.out, wanted)
    return _trained(planned, wanted, reporter, fresh)


def _trained(
    planned: Plan, wanted: Mapping[str, Any], reporter: Reporter, fresh: bool
) -> list[str]:
    import torch

    from kvbench import reference
    from kvbench.engine.loading import load_model, load_tokenizer
    from kvbench.engine.models import decoder_of, model_info
    from kvbench.training.data import Sequences, sources
    from kvbench.training.plot import draw
    from kvbench.training.student import Student
    from kvbench.training.trainer import GateTrainer, Told, arguments, cut_log, describe, latest

    settings, out, method = planned.settings, planned.out, planned.method
    tokenizer = load_tokenizer(planned.model, planned.revision)
    found = sources(
        planned.data,
        tokenizer,
        model=planned.model,
        length=settings["length"],
        count=planned.sequences,
        seed=settings["seed"],
        split=settings["split"],
        subset=settings["subset"],
        column=settings["column"],
        message=reporter.message,
    )
    if method.objective == "regress" and not all(source.answers for source in found):
        raise UserError(
            f"--data {planned.data}: {method.name} learns from answers: rows with context, "
            "question and answers would be right"
        )
    data = Sequences(found, planned.sequences)
    data[0]  # what does not fit is said before the model is loaded
    network = load_model(planned.model, planned.revision, planned.device, planned.dtype)
    config = decoder_of(network).config
    with torch.random.fork_rng():
        torch.manual_seed(settings["seed"])
        gates = method.build(model_info(network), config, settings)
    student = Student(network, gates, method, settings)
    args = arguments(settings, out / CHECKPOINTS, planned.device)
    with args.main_process_first(local=False):
        if os.environ.get("RANK", "0") == "0":
            claim(out, wanted, fresh)
    pad = tokenizer.pad_token_id
    trainer = GateTrainer(student, args, data, out, 0 if pad is None else int(pad))
    trainer.add_callback(Told(reporter))
    for callback in _noisy():
        trainer.remove_callback(callback)
    with args.main_process_first(local=False):
        start = latest(out / CHECKPOINTS)
        step = 0 if start is None else int(start.name.rpartition("-")[2])
        trainer.resumed(cut_log(out, step))
    reporter.start(settings["steps"], f"{method.name} gates of {planned.model}")
    reporter.advance(step)
    if step < settings["steps"]:
        trainer.train(resume_from_checkpoint=None if start is None else str(start))
    else:
        trainer._load_from_checkpoint(str(start))
    reporter.stop()
    if not trainer.is_world_process_zero():
        return []
    log = cut_log(out, settings["steps"])
    last = {k: v for k, v in log[-1].items() if k not in ("lr", "grad_norm")} if log else {}
    facts = {
        "base_model": reference.NAME if planned.model == "reference" else planned.model,
        "base_revision": wanted["weights"]
        or str(getattr(network.config, "_commit_hash", None) or ""),
        "training": {**wanted, "sources": [dict(s.facts) for s in found], "last": last},
    }
    method.save(student.gates.cpu(), out, facts)
    lines = [f"wrote {out}: gates.safetensors, {MADE}, {out / 'training.jsonl'}"]
    if log:
        draw(log, out / PICTURE, f"{method.name} gates of {planned.model} on {planned.data}")
        lines = [f"wrote {out}: gates.safetensors, gates.json, training.jsonl, {PICTURE}"]
        lines.append(describe(log[-1]))
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    if out != method.place(planned.model) or planned.model == "reference":
        lines.append(f"a policy reads them by {method.name}:gates={out}")
    return lines


def _noisy() -> tuple[type[Any], ...]:
    from transformers import PrinterCallback, ProgressCallback

    return (PrinterCallback, ProgressCallback)
