"""Training loop: transformers' Trainer, restricted to saving and loading gates.

Checkpoints hold the gates as safetensors. The states of the optimizer, the scheduler and the random number generators
are the Trainer's files, which it reads with `weights_only`, so no pickled code runs.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from kvbench.errors import UserError
from kvbench.progress import Reporter
from kvbench.training.data import Sequences, collate
from kvbench.training.folder import COMPLETE, LOG, describe
from kvbench.training.replays import ReplayStudent
from kvbench.training.student import Student

WEIGHTS = "gates.safetensors"


def arguments(settings: Mapping[str, Any], folder: Path, device: torch.device) -> TrainingArguments:
    """Return the Trainer's arguments; all others keep their defaults, as in the papers.

    Args:
        settings: Training settings.
        folder: Checkpoint folder.
        device: Device; under torchrun, that of this process.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    training_args = TrainingArguments(
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
    if training_args.n_gpu > 1:  # one GPU per process; torchrun starts several processes
        training_args._n_gpu = 1
    return training_args


class GateTrainer(Trainer):
    """Trainer of a student's gates.

    Args:
        student: Frozen model with gates.
        args: Output of `arguments`.
        sequences: Training sequences, in order.
        log_folder: Folder of the log.
        pad_token: Token id that pads shorter sequences of a batch.
    """

    def __init__(
        self,
        student: Student | ReplayStudent,
        args: TrainingArguments,
        sequences: Sequences,
        log_folder: Path,
        pad_token: int,
    ) -> None:
        super().__init__(
            model=student,
            args=args,
            train_dataset=sequences,
            data_collator=lambda items: collate(items, pad_token),
        )
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self._sums: dict[str, Tensor] = {}
        self._batches = 0
        self._tokens = 0
        self._started = time.monotonic()
        self._log_file = log_folder / LOG

    def run(self, checkpoint: Path | None, completed_steps: int) -> None:
        """Train to the end, from a checkpoint with `completed_steps` steps if given."""
        if checkpoint is None:
            self.train()
        elif completed_steps < self.args.max_steps:
            self.train(resume_from_checkpoint=str(checkpoint))
        else:
            self._load_from_checkpoint(str(checkpoint))

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
        """Compute the student's loss and accumulate its terms for the log."""
        losses = model(**inputs)
        for loss_name, loss_value in losses.items():
            self._sums[loss_name] = self._sums.get(loss_name, 0.0) + loss_value.detach().float()
        self._batches += 1
        self._tokens += inputs["input_ids"].numel()
        return (losses["loss"], losses) if return_outputs else losses["loss"]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write a log record: means since the last one over all processes, learning rate, seconds."""
        if not self._batches:
            return
        loss_names = sorted(self._sums)
        loss_means = torch.stack([self._sums[loss_name] for loss_name in loss_names]) / self._batches
        loss_means = self.accelerator.reduce(loss_means, "mean")
        record: dict[str, Any] = {"step": self.state.global_step}
        record |= {
            field_name: round(mean_value, 6)
            for field_name, mean_value in zip(loss_names, loss_means.tolist(), strict=True)
        }
        record["lr"] = logs.get("learning_rate", 0.0)
        record["grad_norm"] = round(float(logs.get("grad_norm", 0.0)), 6)
        record["tokens"] = self._tokens * self.accelerator.num_processes
        record["seconds"] = round(time.monotonic() - self._started, 1)
        self._sums.clear()
        self._batches = 0
        if not math.isfinite(record["loss"]):
            raise UserError(
                f"the loss is {record['loss']} at step {record['step']}; try a smaller --lr or --dtype float32"
            )
        self.state.log_history.append(record)
        if self.is_world_process_zero():
            with self._log_file.open("a", encoding="utf-8") as log_file:
                log_file.write(json.dumps(record) + "\n")

    def continue_log(self, log_records: list[dict[str, Any]]) -> None:
        """Resume the counts of tokens and seconds from the end of a log."""
        if log_records:
            self._started -= log_records[-1]["seconds"]
            self._tokens = log_records[-1]["tokens"] // self.accelerator.num_processes

    # --- checkpoints hold only gates ---

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        checkpoint_folder = Path(output_dir or str(self.args.output_dir))
        checkpoint_folder.mkdir(parents=True, exist_ok=True)
        gates = self.accelerator.unwrap_model(self.model).gates
        gate_state = {
            tensor_name: tensor.detach().cpu().contiguous() for tensor_name, tensor in gates.state_dict().items()
        }
        save_file(gate_state, checkpoint_folder / WEIGHTS, metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        student: Any = self.model if model is None else model
        student.gates.load_state_dict(load_file(Path(resume_from_checkpoint) / WEIGHTS))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.is_world_process_zero():
            checkpoint_folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
            for file_path in checkpoint_folder.iterdir():
                with file_path.open("rb") as handle:
                    os.fsync(handle.fileno())
            (checkpoint_folder / COMPLETE).touch()


class ReportProgress(TrainerCallback):
    """Progress callback: reports every step, and the losses after every tenth of the run."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._reported = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step; after every tenth of the run, report the last log record."""
        self._reporter.advance()
        if state.global_step * 10 % state.max_steps >= 10 or not state.log_history:
            return
        record = state.log_history[-1]
        if record["step"] > self._reported:
            self._reported = record["step"]
            self._reporter.message(describe(record))
