"""The settings of a training. Each is declared once, as a field of `TrainingOptions`.

The flags of `kvbench train gates`, the defaults, the checks and what a method accepts are read from
these fields. Nothing heavy is imported here, so that the help is fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from kvbench.errors import UserError
from kvbench.runs.options import FLAG, OPTION, OUTPUT, WHAT, Option, Options

GATES, LOSS, TRAINING = "Gates", "Loss", "Training"
"""Headings under which the help groups settings."""


@dataclass(frozen=True)
class TrainingSetting(Option):
    """How a setting is given and read.

    Attributes:
        default: Its value where neither the user, a recipe nor the method gives one; `...` if only
            methods that it applies to have it.
        objectives: Objectives of `Method` that it applies to; () for all.
        check: Returns a valid value; receives the flag as well, for its message.
    """

    check: Callable[[str, Any], Any] = lambda flag, value: value
    default: Any = ...
    objectives: tuple[str, ...] = ()


def _setting(kind: type, panel: str, metavar: str, help: str, check: Callable[[str, Any], Any], **more: Any) -> Any:
    """Declare a setting; a field that is None was not given."""
    setting = TrainingSetting(lambda value: value, kind, panel, metavar, help, check=check, **more)
    return field(default=None, metadata={OPTION: setting})


def _any(flag: str, value: Any) -> Any:
    return value


def _count(minimum: int = 1) -> Callable[[str, Any], int]:
    def check(flag: str, value: Any) -> int:
        if value < minimum:
            raise UserError(f"{flag} {value} is too small; use {minimum} or more")
        return int(value)

    return check


def _odd(flag: str, value: Any) -> int:
    if value % 2 == 0:
        raise UserError(f"{flag} {value} is even; use an odd number")
    return _count()(flag, value)


def _number(advice: str, accepts: Callable[[float], bool]) -> Callable[[str, Any], Any]:
    def check(flag: str, value: Any) -> Any:
        if not (math.isfinite(value) and accepts(value)):
            raise UserError(f"{flag} {value} is invalid; use {advice}")
        return value

    return check


def _choice(*choices: str) -> Callable[[str, Any], str]:
    def check(flag: str, value: Any) -> str:
        if value not in choices:
            raise UserError(f"{flag} {value} is unknown; use {' or '.join(choices)}")
        return str(value)

    return check


_FINITE = _number("a finite number", lambda value: True)
_POSITIVE = _number("a number above 0", lambda value: value > 0)
_NOT_NEGATIVE = _number("0 or more", lambda value: value >= 0)
_FRACTION = _number("a number from 0 to 1", lambda value: 0 <= value <= 1)


@dataclass(frozen=True)
class TrainingOptions(Options):
    """The settings that a user can give; `kvbench train gates --help` says what each means."""

    column: str | None = _setting(
        str, WHAT, "NAME", "Column with the text.", _any, spelling="--text-column", default=None
    )
    split: str | None = _setting(str, WHAT, "NAME", "Split of a hub data set. Default: train.", _any, default="train")
    subset: str | None = _setting(str, WHAT, "NAME", "Configuration of a hub data set.", _any, default=None)
    gate: str | None = _setting(
        str, GATES, "KIND", "mlp (the default) or linear.", _choice("mlp", "linear"),
        objectives=("distil", "regress", "replay"),
    )  # fmt: skip
    input: str | None = _setting(
        str, GATES, "WHAT", "Input of the gates: hidden (the default) or kv.", _choice("hidden", "kv"),
        objectives=("distil",),
    )  # fmt: skip
    hidden_dim: int | None = _setting(
        int, GATES, "N", "Width of the MLP. Default: 512; for locret 1024.", _count(),
        objectives=("distil", "regress", "replay"),
    )  # fmt: skip
    gate_dim: int | None = _setting(
        int, GATES, "N",
        "Input width of a tied readout (default: 64), or width of a block's summary (default: the head dim).",
        _count(), objectives=("distil", "match"),
    )  # fmt: skip
    block: int | None = _setting(
        int, GATES, "N", "Entries per block, for seerattn_r. Default: 64.", _count(), objectives=("match",)
    )
    tied: bool | None = _setting(
        bool, GATES, FLAG, "Use one readout for all heads. Default: only for dbtrimkv.", _any,
        spelling="--tied/--untied", objectives=("distil",),
    )  # fmt: skip
    bias: float | None = _setting(
        float, GATES, "X", "Initial bias. Default: 8; for dbtrimkv 18, for kvzap -4.", _FINITE,
        objectives=("distil", "replay"),
    )  # fmt: skip
    gating: str | None = _setting(
        str, GATES, "KIND", "additive (the default), or multiplicative as in Eq. 3 of TRIM-KV.",
        _choice("additive", "multiplicative"), objectives=("distil",),
    )  # fmt: skip
    kernel_size: int | None = _setting(
        int, GATES, "N", "Kernel width of lococo in entries; odd. Default: 21.", _odd, objectives=("compress",)
    )
    keep_rate: float | None = _setting(
        float, GATES, "X", "Fraction of --capacity that lococo keeps unchanged. Default: 0.5.", _FRACTION,
        objectives=("compress",),
    )  # fmt: skip
    mix: float | None = _setting(
        float, GATES, "X", "Initial weight of lococo's convolution in a merged entry. Default: 0.5.", _FRACTION,
        objectives=("compress",),
    )  # fmt: skip
    kl: bool | None = _setting(
        bool, LOSS, FLAG, "Omit the distillation loss.", _any, spelling=" /--no-kl", default=True,
        objectives=("distil",),
    )  # fmt: skip
    ntp: bool | None = _setting(
        bool, LOSS, FLAG, "Omit the next-token loss.", _any, spelling=" /--no-ntp", default=True,
        objectives=("distil",),
    )  # fmt: skip
    with_capacity: bool | None = _setting(
        bool, LOSS, FLAG, "Omit the capacity loss.", _any, spelling=" /--no-capacity", default=True,
        objectives=("distil",),
    )  # fmt: skip
    reverse_kl: bool | None = _setting(
        bool, LOSS, FLAG, "Use KL(student, teacher), not KL(teacher, student).", _any, spelling="--reverse-kl",
        default=False, objectives=("distil",),
    )  # fmt: skip
    capacity: int | None = _setting(
        int, LOSS, "TOKENS", "Tokens retained per head without penalty.", _count(), objectives=("distil", "compress")
    )
    chunk: int | None = _setting(
        int,
        LOSS,
        "TOKENS",
        "Tokens between two eviction steps of lococo. Default: 512.",
        _count(),
        objectives=("compress",),
    )
    capacity_weight: float | None = _setting(
        float, LOSS, "X", "Weight of the capacity loss. Default: 1.", _NOT_NEGATIVE, default=1.0,
        objectives=("distil",),
    )  # fmt: skip
    capacity_reduce: str | None = _setting(
        str, LOSS, "HOW", "Reduce the capacity loss over heads by mean (the default) or sum.", _choice("mean", "sum"),
        default="mean", objectives=("distil",),
    )  # fmt: skip
    steps: int | None = _setting(int, TRAINING, "N", "Optimizer steps. Default: 1000.", _count(), default=None)
    tokens: int | None = _setting(
        int, TRAINING, "N", "Train on about this many tokens. Replaces --steps.", _count(), default=None
    )
    passes: int | None = _setting(
        int, TRAINING, "N", "Passes over each sequence, for kvzap. Default: 15.", _count(),
        objectives=("replay",),
    )  # fmt: skip
    length: int | None = _setting(
        int, TRAINING, "TOKENS", "Maximum length of a sequence. Default: the paper's.", _count(2)
    )
    batch_size: int | None = _setting(
        int, TRAINING, "N", "Sequences per batch and device. Default: 1.", _count(), default=1
    )
    accumulate: int | None = _setting(int, TRAINING, "N", "Batches per step. Default: 4.", _count(), default=4)
    lr: float | None = _setting(
        float, TRAINING, "X", "Learning rate of AdamW. Default: 2e-4; for lococo 0.05.", _POSITIVE
    )
    schedule: str | None = _setting(
        str, TRAINING, "KIND", "Schedule of the learning rate: linear, cosine or constant.",
        _choice("linear", "cosine", "constant"),
    )  # fmt: skip
    warmup: int | None = _setting(int, TRAINING, "STEPS", "Warm-up steps. Default: 0.", _NOT_NEGATIVE, default=0)
    weight_decay: float | None = _setting(float, TRAINING, "X", "Weight decay of AdamW.", _NOT_NEGATIVE)
    checkpointing: bool | None = _setting(
        bool, TRAINING, FLAG, "Recompute activations to save memory. Default: on a GPU.", _any,
        spelling="--checkpointing/--no-checkpointing", default=None,
    )  # fmt: skip
    seed: int | None = _setting(
        int, TRAINING, "N", "Seed of the data and the initial weights. Default: 0.", _NOT_NEGATIVE, default=0
    )
    save_steps: int | None = _setting(int, OUTPUT, "N", "Steps between checkpoints.", _count(), default=None)
    log_steps: int | None = _setting(int, OUTPUT, "N", "Steps between log records.", _count(), default=None)

    def __post_init__(self) -> None:
        """Check the settings that were given.

        Raises:
            UserError: A value is out of range; the message begins with its flag.
        """
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None:
                setting: TrainingSetting = entry.metadata[OPTION]
                object.__setattr__(self, entry.name, setting.check(_flag(entry.name, setting), value))


def settings_table() -> Iterator[tuple[str, TrainingSetting]]:
    """Yield each setting with its name."""
    for entry in fields(TrainingOptions):
        yield entry.name, entry.metadata[OPTION]


def flag_of(name: str) -> str:
    """Return the flag of a setting as a user types it, such as `--no-kl` for `kl`."""
    return _flag(name, dict(settings_table())[name])


def _flag(name: str, setting: TrainingSetting) -> str:
    return setting.spelling.lstrip(" /").partition("/")[0] or f"--{name.replace('_', '-')}"
