"""The loop: transformers' Trainer, which saves and loads nothing but gates.

Checkpoints hold the gates as safetensors; the optimizer's and the scheduler's state and that of the
random numbers are the Trainer's own files, which it reads with `weights_only`: no pickle is run.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from kvbench.errors import UserError
from kvbench.progress import Reporter
from kvbench.training.data import Sequences, collate
from kvbench.training.student import Student

WEIGHTS = "gates.safetensors"
COMPLETE = "complete"
"""An empty file that is written last: without it a checkpoint is torn."""

LOG = "training.jsonl"


def arguments(settings: Mapping[str, Any], folder: Path, device: torch.device) -> TrainingArguments:
    """The Trainer's arguments; what is not here is its default, as in the papers.

    Args:
        settings: Of the run.
        folder: Where checkpoints go.
        device: Where to train. With torchrun every process has its own.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    made = TrainingArguments(
        output_dir=str(folder),
        max_steps=settings["steps"],
        per_device_train_batch_size=settings["batch_size"],
        gradient_accumulation_steps=settings["accumulate"],
        learning_rate=settings["lr"],
        lr_scheduler_type=settings["schedule"],
        warmup_steps=settings["warmup"],
        weight_decay=settings["weight_decay"],
        optim="adamw_torch",
        logging_steps=settings["log_steps"],
        save_steps=settings["save_steps"],
        save_total_limit=2,
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=device.type == "cuda",
        seed=settings["seed"],
    )
    if made.n_gpu > 1:  # one process, one GPU: several are torchrun's business
        made._n_gpu = 1
    return made


class GateTrainer(Trainer):
    """Trains a `Student`.

    Args:
        student: The student.
        args: As `arguments` makes them.
        data: The sequences, in the order they are taken.
        out: Folder of the log.
        pad: Token that shorter sequences of a batch are padded with.
    """

    def __init__(
        self, student: Student, args: TrainingArguments, data: Sequences, out: Path, pad: int
    ) -> None:
        super().__init__(
            model=student,
            args=args,
            train_dataset=data,
            data_collator=lambda items: collate(items, pad),
        )
        self._sums: dict[str, Tensor] = {}
        self._seen = 0
        self._tokens = 0
        self._began = time.monotonic()
        self._before = 0.0
        self._out = out

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        return SequentialSampler(data)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The student's loss; its parts are kept for the log."""
        found = model(**inputs)
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.detach().float()
        self._seen += 1
        self._tokens += inputs["input_ids"].numel()
        return (found["loss"], found) if return_outputs else found["loss"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write a line: means since the last one over all processes, learning rate, seconds."""
        if not self._seen:
            return
        names = sorted(self._sums)
        means = torch.stack([self._sums[name] for name in names]) / self._seen
        means = self.accelerator.reduce(means, "mean")
        record: dict[str, Any] = {"step": self.state.global_step}
        record |= {n: round(x, 6) for n, x in zip(names, means.tolist(), strict=True)}
        record["lr"] = logs.get("learning_rate", 0.0)
        record["grad_norm"] = round(float(logs.get("grad_norm", 0.0)), 6)
        record["tokens"] = self._tokens * self.accelerator.num_processes
        record["seconds"] = round(self._before + time.monotonic() - self._began, 1)
        self._sums.clear()
        self._seen = 0
        if not math.isfinite(record["loss"]):
            raise UserError(
                f"the loss is {record['loss']} at step {record['step']}: a smaller --lr or "
                "--dtype float32 may be right"
            )
        self.state.log_history.append(record)
        if self.is_world_process_zero():
            with (self._out / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def resumed(self, log: list[dict[str, Any]]) -> None:
        """Go on counting where a log ends."""
        if log:
            self._before = log[-1]["seconds"]
            self._tokens = log[-1]["tokens"] // self.accelerator.num_processes

    # --- checkpoints: gates alone ---

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        gates = self.accelerator.unwrap_model(self.model).gates
        state = {k: v.detach().cpu().contiguous() for k, v in gates.state_dict().items()}
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        student: Any = self.model if model is None else model
        student.gates.load_state_dict(load_file(Path(resume_from_checkpoint) / WEIGHTS))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.is_world_process_zero():
            folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
            for path in folder.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            (folder / COMPLETE).touch()


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint; torn ones are deleted."""
    whole: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        if (path / COMPLETE).is_file():
            whole[int(path.name.rpartition("-")[2])] = path
        else:
            shutil.rmtree(path)
    return whole[max(whole)] if whole else None


def cut_log(out: Path, step: int) -> list[dict[str, Any]]:
    """Drop what a log says of steps after `step`, and give the rest."""
    path = out / LOG
    kept: list[dict[str, Any]] = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # a torn last line
                continue
            if record.get("step", 0) <= step:
                kept.append(record)
    path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    return kept


class Told(TrainerCallback):
    """Tells a reporter how far the training is, with a line of losses now and then."""

    def __init__(self, reporter: Reporter, lines: int = 10) -> None:
        self._reporter = reporter
        self._lines = lines
        self._said: defaultdict[str, int] = defaultdict(int)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step; every tenth of the training say what the log says."""
        self._reporter.advance()
        if (
            not state.log_history
            or state.global_step * self._lines % state.max_steps >= self._lines
        ):
            return
        record = state.log_history[-1]
        if "loss" in record and record["step"] != self._said["step"]:
            self._said["step"] = record["step"]
            self._reporter.message(describe(record))


def describe(record: Mapping[str, Any]) -> str:
    """A line of the log for people."""
    names = ("loss", "kl", "ntp", "capacity", "retained", "fit", "smooth")
    parts = [f"{name} {record[name]:.4g}" for name in names if name in record]
    return f"step {record['step']}: {', '.join(parts)}"
