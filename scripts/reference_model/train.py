"""Train the reference model from random weights.

    python -m scripts.reference_model.train --out DIR

The default curriculum is the one that produced the shipped weights. Stages are measured in tokens,
and every batch is a pure function of seed and step. A run that was killed therefore continues from
its last checkpoint to the same result. `DIR/latest` is always a complete model folder with its
tokenizer; every checkpoint replaces it in one step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from kvbench.reference import grammar, samples
from scripts.reference_model.batches import Batch, make_batch
from scripts.reference_model.curriculum import CURRICULUM, Stage
from scripts.stages import stage_at

_WARMUP_STEPS = 50
_LOG_STEPS = 50
_STATE = "state.pt"


def model_config() -> Qwen3Config:
    """The configuration of the shipped model: 1.02 million parameters."""
    return Qwen3Config(
        vocab_size=len(grammar.VOCABULARY),
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        initializer_range=0.02,
        pad_token_id=samples.IDS[grammar.PAD],
        bos_token_id=samples.IDS[grammar.BOS],
        eos_token_id=samples.IDS[grammar.EOS],
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer: one id per word of the vocabulary, words separated by white space."""
    core = Tokenizer(models.WordLevel(vocab=samples.IDS, unk_token=grammar.UNK))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single=f"{grammar.BOS} $A",
        pair=f"{grammar.BOS} $A $B",
        special_tokens=[(grammar.BOS, samples.IDS[grammar.BOS])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=grammar.PAD,
        bos_token=grammar.BOS,
        eos_token=grammar.EOS,
        unk_token=grammar.UNK,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by a Newton-Schulz iteration, as in `torch.optim.Muon`.

    torch's optimizer processes matrices one by one in bfloat16, which took a fifth of the time of a
    step on processors without bfloat16 units. This one stacks the matrices of each shape and keeps
    their precision; the update is otherwise the same.

    Args:
        params: Matrices.
        lr: Learning rate; scaled by sqrt(rows / columns) for tall matrices.
        momentum: Decay of the (Nesterov) momentum.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(list(params), defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[tuple[torch.nn.Parameter, torch.Tensor]]]
            shapes = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[p.shape].append((p, p.grad))
            for shape, params in shapes.items():
                updates = []
                for p, gradient in params:
                    if "momentum_buffer" not in self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                    buffer = self.state[p]["momentum_buffer"]
                    buffer.lerp_(gradient, 1 - group["momentum"])
                    updates.append(gradient.lerp(buffer, group["momentum"]))
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for (p, _), update in zip(params, _orthogonal(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-scale)


def _orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """Move all singular values of matrices `[n, rows, columns]` to about 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x


def optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the embedding and the norms."""
    hidden: list[torch.nn.Parameter] = []
    other: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (hidden if parameter.ndim == 2 and "embed" not in name else other).append(parameter)
    return [
        Muon(hidden, lr=0.02),
        torch.optim.AdamW(other, lr=2e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def answer_loss(
    model: Qwen3ForCausalLM,
    batch: Batch,
    rng: np.random.Generator,
    language_share: float = 0.1,
    language_weight: float = 0.05,
    any_of: bool = False,
) -> tuple[torch.Tensor, float, dict[str, list[float]]]:
    """The loss on a batch, its part on answers, and the accuracy by task.

    The loss is the cross-entropy of the answer tokens, plus `language_weight` times that of a
    random `language_share` of all other tokens. If an answer token has several targets, the loss is
    lowest when all are equally likely; with `any_of`, when their total probability is 1.
    The accuracy of a question is 1 if all its answer tokens were predicted correctly, otherwise 0;
    for tasks with long or unordered answers, it is the share of correct tokens.
    """
    device = model.device
    ids = torch.from_numpy(batch.ids).to(device)
    hidden = model.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)
    positions, slots, targets, weights = (
        torch.from_numpy(a).to(device) for a in (batch.positions, batch.slots, batch.targets, batch.weights)
    )
    logits = model.lm_head(hidden[positions])
    scores = functional.log_softmax(logits.float(), dim=-1)
    if any_of:
        mass = torch.zeros(len(positions), device=device)
        mass = mass.index_add(0, slots, scores[slots, targets].exp())
        answers = -mass.clamp(min=1e-9).log().mean()
    else:
        answers = -(weights * scores[slots, targets]).sum() / len(positions)

    others = rng.random(batch.ids.size) < language_share
    others[batch.positions] = False
    following = np.roll(batch.ids, -1, axis=1)
    following[:, -1] = samples.IDS[grammar.PAD]
    others &= following.reshape(-1) != samples.IDS[grammar.PAD]
    chosen = torch.from_numpy(np.flatnonzero(others)).to(device)
    after = torch.from_numpy(following.reshape(-1)[others]).to(device)
    language = functional.cross_entropy(model.lm_head(hidden[chosen]).float(), after)

    hits = np.zeros(len(batch.positions))
    right = (logits.argmax(-1)[slots] == targets).cpu().numpy()
    np.maximum.at(hits, batch.slots, right)
    accuracy: dict[str, list[float]] = defaultdict(list)
    for task, first, last in batch.spans:
        part = hits[first:last]
        partial = task in ("repeat", "list", "copy", "cwe")
        accuracy[task].append(float(part.mean() if partial else part.all()))
    return answers + language_weight * language, float(answers.detach()), accuracy


@dataclasses.dataclass
class Progress:
    """Progress of a run: optimizer steps, tokens seen, and seconds spent."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def save(
    out: Path,
    model: Qwen3ForCausalLM,
    optims: Sequence[torch.optim.Optimizer],
    progress: Progress,
) -> None:
    """Write a checkpoint, then make `out/latest` point to it in one step."""
    folder = out / f"step-{progress.step:06d}"
    save_model(folder, model)
    state = {
        "progress": dataclasses.asdict(progress),
        "optimizers": [o.state_dict() for o in optims],
    }
    torch.save(state, folder / _STATE)
    link = out / "latest.new"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    os.replace(link, out / "latest")
    for old in sorted(out.glob("step-*"))[:-3]:
        shutil.rmtree(old)


def save_model(folder: Path, model: Qwen3ForCausalLM) -> None:
    """Write weights, configuration and tokenizer so that the Auto classes load them."""
    greedy = GenerationConfig(
        do_sample=False,
        pad_token_id=samples.IDS[grammar.PAD],
        bos_token_id=samples.IDS[grammar.BOS],
        eos_token_id=samples.IDS[grammar.EOS],
    )
    model.generation_config = greedy
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def train(
    out: Path,
    curriculum: Sequence[Stage] = CURRICULUM,
    config: Qwen3Config | None = None,
    seed: int = 1,
    device: str = "cpu",
    checkpoint_seconds: float = 180.0,
    max_steps: int | None = None,
    stop: threading.Event | None = None,
) -> Path:
    """Train the model, continuing from `out/latest` if it exists.

    Args:
        out: Folder of the checkpoints and of the log `training.jsonl`.
        curriculum: The stages, in order.
        config: Configuration of the model; None is the shipped model's.
        seed: Seed of the initial weights and of every batch.
        device: torch device.
        checkpoint_seconds: Time between checkpoints.
        max_steps: Number of steps of the whole run after which training stops with a checkpoint;
            None is the end of the curriculum.
        stop: When it is set, training stops with a checkpoint.

    Returns:
        The folder of the last checkpoint.
    """
    out.mkdir(parents=True, exist_ok=True)
    stop = stop or threading.Event()
    torch.manual_seed(seed)
    progress = Progress()
    latest = out / "latest"
    if latest.exists():
        model = Qwen3ForCausalLM.from_pretrained(latest, dtype=torch.float32)
    else:
        model = Qwen3ForCausalLM(config or model_config())
    torch.nn.Module.to(model, device).train()
    optims = optimizers(model)
    if latest.exists():
        state = torch.load(latest / _STATE, map_location=device, weights_only=True)
        progress = Progress(**state["progress"])
        for optimizer, saved in zip(optims, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    rates = [float(o.param_groups[0]["initial_lr"]) for o in _with_initial(optims)]

    started = time.monotonic() - progress.seconds
    saved_at = time.monotonic()
    losses: list[float] = []
    scores: dict[str, list[float]] = defaultdict(list)
    while not stop.is_set() and (max_steps is None or progress.step < max_steps):
        stage, done = stage_at(curriculum, progress.tokens)
        if stage is None:
            break
        warm = min(1.0, (progress.step + 1) / _WARMUP_STEPS)
        level = warm * (stage.rate[0] + (stage.rate[1] - stage.rate[0]) * done)
        for optimizer, rate in zip(optims, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * level
        rng = np.random.default_rng([seed, progress.step])
        total = sum(feed.weight for feed in stage.feeds)
        answers = 0.0
        for feed in stage.feeds:
            length = int(rng.choice(feed.lengths))
            rows = max(1, feed.tokens // length)
            batch = make_batch(rng, rows, length, feed.mix, stage.knobs)
            loss, part, accuracy = answer_loss(model, batch, rng, *feed.language, feed.any_of)
            (loss * (feed.weight / total)).backward()
            answers += part * feed.weight / total
            progress.tokens += batch.ids.size
            for task, hits in accuracy.items():
                scores[task] += hits
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optims:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        losses.append(answers)
        now = time.monotonic()
        progress.seconds = now - started
        if progress.step % _LOG_STEPS == 0:
            _log(out, progress, stage, level, losses, scores)
            losses.clear()
            scores.clear()
        if now - saved_at > checkpoint_seconds:
            save(out, model, optims, progress)
            saved_at = now
    save(out, model, optims, progress)
    return latest.resolve()


def _with_initial(optims: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
    """Store the full learning rate in the optimizer, from which a resumed run reads it."""
    for optimizer in optims:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
    return optims


def _log(
    out: Path,
    progress: Progress,
    stage: Stage,
    level: float,
    losses: Sequence[float],
    scores: Mapping[str, Sequence[float]],
) -> None:
    """Append a line to the training log: means since the last line."""
    record = {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "stage": stage.name,
        "level": round(level, 4),
        "loss": round(float(np.mean(losses)), 4),
        "right": {task: round(float(np.mean(hits)), 3) for task, hits in sorted(scores.items())},
    }
    with (out / "training.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps(record) + "\n")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the reference model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None, help="processor threads")
    parser.add_argument("--checkpoint-seconds", type=float, default=180.0)
    options = parser.parse_args()
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.threads:
        torch.set_num_threads(options.threads)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    seconds = options.checkpoint_seconds
    last = train(options.out, seed=options.seed, device=device, checkpoint_seconds=seconds, stop=stop)
    print(f"done: {last}")


if __name__ == "__main__":
    main()
