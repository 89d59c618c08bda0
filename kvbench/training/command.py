"""`kvbench train gates`: plans a training, runs it, and writes gates, log and figure."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvbench import reference
from kvbench.engine.implementations import SDPA
from kvbench.engine.loading import (
    load_config,
    load_model,
    load_tokenizer,
    pick_attention,
    pick_device,
    pick_dtype,
)
from kvbench.engine.models import decoder_of, model_info
from kvbench.errors import UserError
from kvbench.named import model_digest
from kvbench.progress import Reporter, Silent
from kvbench.registry import TRAINERS, get
from kvbench.runs.planning import quiet_libraries
from kvbench.training.data import Sequences, SequenceStream, different, open_streams
from kvbench.training.folder import (
    CHECKPOINTS,
    GATES_FILE,
    LOG,
    PICTURE,
    RUN,
    check_same,
    claim,
    describe,
    draw,
    is_finished,
    latest_checkpoint,
    truncate_log,
)
from kvbench.training.method import Method
from kvbench.training.recipes import recipe_of
from kvbench.training.replays import ReplayStudent, agreement, describe_agreement
from kvbench.training.settings import complete
from kvbench.training.student import Student

_HELD_OUT = 16
"""Sequences after those of the training on which predictions are compared with their labels."""
_SHAPE = ("gate", "input", "hidden_dim", "bias", "kernel_size", "keep_rate", "mix")
_OF_BLOCKS = ("block", "gate_dim")
"""Settings that describe what is trained, where the method has them."""


@dataclass(frozen=True)
class GateTraining:
    """A training that is ready to run.

    Attributes:
        model: The model as the user named it.
        revision: Revision on the hub; None for the default.
        data: The data as the user named it.
        method: What is trained.
        settings: Everything else that can change the gates.
        out: The folder.
        device: The device.
        dtype: Data type of the base model's weights; gates are float32.
        attn: Attention implementation of the base model.
    """

    model: str
    revision: str | None
    data: str
    method: Method
    settings: dict[str, Any]
    out: Path
    device: torch.device
    dtype: torch.dtype
    attn: str = "auto"

    @property
    def sequences(self) -> int:
        """Number of sequences that all processes together train on, repetitions included."""
        process_count = int(os.environ.get("WORLD_SIZE", "1"))
        sequences_per_step = self.settings["batch_size"] * self.settings["accumulate"] * process_count
        return int(self.settings["steps"] * sequences_per_step)

    @property
    def passes(self) -> int:
        """How often every sequence comes."""
        return int(self.settings.get("passes", 1))

    @property
    def different(self) -> int:
        """Number of different sequences among those that it trains on."""
        return different(self.sequences, self.passes)

    @property
    def title(self) -> str:
        """What is trained, for messages and figures."""
        return f"{self.method.name} gates of {self.model}"

    def identity(self) -> dict[str, Any]:
        """Everything that can change the gates, as the folder's `training.json` stores it."""
        attention = pick_attention(self.attn, self.device, self.dtype)
        # Only what is not the default, so that earlier trainings can be resumed.
        recorded_attention = {} if attention == SDPA else {"attention": attention}
        return {
            "policy": self.method.name,
            "model": self.model,
            "revision": self.revision or "",
            "weights": model_digest(self.model),
            "data": self.data,
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            **recorded_attention,
            **self.settings,
        }

    def lines(self) -> list[str]:
        """A description for the user."""
        s = self.settings
        shape_names = _OF_BLOCKS if self.method.objective == "match" else _SHAPE
        shape_text = ", ".join(
            f"{setting_name} {s[setting_name]}" for setting_name in shape_names if s.get(setting_name) is not None
        )
        token_count = s["steps"] * s["batch_size"] * s["accumulate"] * s["length"]
        description = [
            f"{self.title} ({shape_text}) on {self.data}",
            f"{s['steps']} steps of {s['batch_size']} x {s['accumulate']} sequences of up to "
            f"{s['length']} tokens: up to {token_count} tokens",
            f"AdamW, learning rate {s['lr']:g} ({s['schedule']}), weight decay "
            f"{s['weight_decay']:g}, seed {s['seed']}, {str(self.dtype).removeprefix('torch.')} on "
            f"{self.device}",
        ]
        if self.method.objective == "replay":
            description.append(
                f"loss: squared error of the log of KVzip+ scores; {self.different} different "
                f"sequences, {self.passes} times each"
            )
        if self.method.objective == "distil":
            loss_terms = ["reverse KL" if s["reverse_kl"] else "KL"] if s["kl"] else []
            loss_terms += ["next token"] if s["ntp"] else []
            if s["with_capacity"]:
                loss_terms.append(f"{s['capacity_weight']:g} x capacity of {s['capacity']} tokens")
            description.append(f"loss: {' + '.join(loss_terms)}; {s['gating']} gating")
        if self.method.objective == "compress":
            description.append(
                f"loss: next token, after cuts to {s['capacity']} entries before every chunk of {s['chunk']} tokens"
            )
        return [*description, f"to {self.out}"]


def plan(
    model: str,
    policy: str,
    data: str | None,
    options: Mapping[str, Any],
    *,
    out: Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    attn: str = "auto",
    revision: str | None = None,
) -> GateTraining:
    """Check what was given and fill in the rest.

    Args:
        model: `reference`, a folder or a hub id.
        policy: Name of a trainer.
        data: Data, as described in `kvbench.training.data`; None for that of the model's recipe.
        options: Settings by name; see `kvbench.training.settings.complete`.
        out: The folder; None for the one where the policy looks.
        device: Device, as for a run.
        dtype: Data type, as for a run; `auto` is that of the model's recipe, where it names one.
        attn: Attention implementation, as for a run.
        revision: Revision of a hub model.

    Raises:
        UserError: Something is unknown or out of range.
    """
    method: Method = get(TRAINERS, policy)
    text_config = load_config(model, revision).get_text_config()
    window = int(getattr(text_config, "max_position_embeddings", 0) or 0)
    settings = complete(method, model, window, options)
    recipe = recipe_of(model, policy)
    data = data or recipe.get("data")
    if data is None:
        raise UserError(f"there is no recipe for {policy} gates of {model}; name data, such as --data chats")
    target_device = pick_device(device)
    if target_device.type == "cuda" and "LOCAL_RANK" in os.environ:  # torchrun: one GPU per process
        target_device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
    if settings["checkpointing"] is None:  # on a CPU, memory is seldom short: it only takes time
        settings["checkpointing"] = target_device.type == "cuda"
    output_folder = (out or method.place(model)).expanduser()
    if dtype == "auto":
        dtype = recipe.get("dtype", dtype)
    model_dtype = pick_dtype(dtype, target_device)
    pick_attention(attn, target_device, model_dtype)  # refused before anything is loaded
    return GateTraining(
        model,
        revision,
        data,
        method,
        settings,
        output_folder,
        target_device,
        model_dtype,
        attn,
    )


def train(training: GateTraining, reporter: Reporter, *, fresh: bool = False) -> list[str]:
    """Train gates, continuing an earlier training with the same settings.

    Args:
        training: What to train.
        reporter: Told of the progress.
        fresh: Throw away an earlier training.

    Returns:
        Lines for the user.

    Raises:
        UserError: The folder holds another training, the data does not fit, or the loss diverged.
    """
    if importlib.util.find_spec("accelerate") is None:
        raise UserError("training needs accelerate; run: pip install 'kvbench[train]'")
    # transformers' Trainer imports slowly, and fails without accelerate.
    from kvbench.training.trainer import GateTrainer, ReportProgress, arguments

    quiet_libraries()
    settings, folder = training.settings, training.out
    identity = training.identity()
    is_main = os.environ.get("RANK", "0") == "0"  # under torchrun, only the first process reports
    if not fresh and is_finished(folder, identity):
        message = f"{folder} already holds these gates; use --fresh to train them again"
        return [message] if is_main else []
    if not is_main:
        reporter = Silent()
    elif not fresh:
        check_same(folder, identity)

    tokenizer = load_tokenizer(training.model, training.revision)
    data_streams = _streams(training, tokenizer, reporter)
    sequences = Sequences(data_streams, training.sequences, training.passes, settings["seed"])
    sequences[0]  # data that does not fit fails here, before the model is loaded
    base_model = load_model(training.model, training.revision, training.device, training.dtype, attn=training.attn)
    student = _student(training, base_model)
    training_args = arguments(settings, folder / CHECKPOINTS, training.device)
    with training_args.main_process_first(local=False):
        if is_main:
            claim(folder, identity, fresh)
        checkpoint, completed_steps = latest_checkpoint(folder)
        log_records = truncate_log(folder, completed_steps)
    trainer = GateTrainer(student, training_args, sequences, folder, tokenizer.pad_token_id or 0)
    trainer.add_callback(ReportProgress(reporter))
    trainer.continue_log(log_records)

    reporter.start(settings["steps"], training.title)
    reporter.advance(completed_steps)
    trainer.run(checkpoint, completed_steps)
    reporter.stop()
    if not trainer.is_world_process_zero():
        return []
    return _write(training, identity, student, sequences)


def _streams(training: GateTraining, tokenizer: Any, reporter: Reporter) -> list[SequenceStream]:
    settings = training.settings
    sequence_count = training.different
    if training.method.objective == "replay":
        sequence_count += _HELD_OUT
    data_streams = open_streams(
        training.data,
        tokenizer,
        model=training.model,
        length=settings["length"],
        count=sequence_count,
        seed=settings["seed"],
        split=settings["split"],
        subset=settings["subset"],
        column=settings["column"],
        message=reporter.message,
    )
    if training.method.objective == "regress" and not all(stream.has_answers for stream in data_streams):
        raise UserError(
            f"--data {training.data}: {training.method.name} learns from answers; use rows with "
            "context, question and answers"
        )
    return data_streams


def _student(training: GateTraining, base_model: nn.Module) -> Student | ReplayStudent:
    method, settings = training.method, training.settings
    with torch.random.fork_rng():
        torch.manual_seed(settings["seed"])
        gates = method.build(model_info(base_model), decoder_of(base_model).config, settings)
    if method.objective == "replay":
        return ReplayStudent(base_model, gates, method)
    return Student(base_model, gates, method, settings)


def _write(
    training: GateTraining,
    identity: Mapping[str, Any],
    student: Student | ReplayStudent,
    sequences: Sequences,
) -> list[str]:
    """Write the gates and the figure, delete the checkpoints, and say so."""
    folder, method, model = training.out, training.method, training.model
    log_records = truncate_log(folder, training.settings["steps"])
    last_record = (
        {
            field_name: field_value
            for field_name, field_value in log_records[-1].items()
            if field_name not in ("lr", "grad_norm")
        }
        if log_records
        else {}
    )
    base_commit = str(getattr(student.base.config, "_commit_hash", None) or "")
    sources = [dict(stream.facts) for stream in sequences.streams]
    training_facts = {**identity, "sources": sources, "last": last_record}
    messages = [f"wrote {folder}: gates.safetensors, {GATES_FILE}, {RUN}, {LOG}"]
    if log_records:
        draw(log_records, folder / PICTURE, f"{training.title} on {training.data}")
        messages = [f"{messages[0]}, {PICTURE}", describe(log_records[-1])]
    if isinstance(student, ReplayStudent) and (held_out_items := sequences.held_out(_HELD_OUT)):
        training_facts["held_out"] = agreement(student.eval(), held_out_items)
        messages.append(describe_agreement(training_facts["held_out"]))
    gates_facts = {
        "base_model": reference.versioned(model),
        "base_revision": identity["weights"] or base_commit,
        "training": training_facts,
    }
    method.save(student.gates.cpu(), folder, gates_facts, training.settings["half"])
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    if folder != method.place(model) or recipe_of(model, method.name):  # shipped gates go first
        messages.append(f"policies read them with {method.name}:gates={folder}")
    return messages
