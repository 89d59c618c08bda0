"""Train the vision-language reference model from random weights.

    python -m scripts.reference_vl.train --out DIR

Stages are measured in tokens, and every batch is a pure function of seed and step. A run that was
killed therefore continues from its last checkpoint. At the end, `DIR/reference-vl` is the folder
that ships.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Qwen2VLForConditionalGeneration,
)

from kvbench.reference_vl import NAME, dialogues
from kvbench.reference_vl.questions import KINDS
from kvbench.reference_vl.words import CELLS, COLOURS, EMPTY, END, IDS, NAMES, SHAPES, TAGS
from scripts.reference_model.train import optimizers
from scripts.reference_vl.batches import CUES, Batch, Encoded, encode, make_batch
from scripts.reference_vl.curriculum import CURRICULUM, Feed, Stage
from scripts.reference_vl.model import MERGE, model_config, save_model
from scripts.stages import stage_at

_WARMUP_STEPS = 50
_LOG_SECONDS = 15.0
_SAVE_SECONDS = 60.0
_NAMED_LAYER = 1
_POINTING = {2: 2, 3: 1}
"""Layers whose attention is trained to point, and the tokens from there to the answer."""
_ATTENTION = "reference_vl_training"
_STREAM = 2**31
"""First number of the training seeds; evaluation seeds are smaller."""

_COLOUR_WORDS = (*COLOURS, EMPTY)
_SHAPE_WORDS = (*SHAPES, EMPTY)


def draw_batch(feed: Feed, tokens: int, seed: int, step: int) -> Batch:
    """Return the batch of a step: as many samples as fit into `tokens`."""
    make = dialogues.dialogue if feed.dialogue else dialogues.vqa
    samples: list[Encoded] = []
    longest = 0
    while True:
        sample = make(feed.settings, _STREAM + seed, 4096 * step + len(samples))
        encoded = encode(sample.exchanges())
        longest = max(longest, len(encoded.ids))
        if samples and longest * (len(samples) + 1) > tokens:
            return make_batch(samples, np.random.default_rng([_STREAM + seed, step, 2]))
        samples.append(encoded)


class Trainee:
    """The model with what only training needs.

    Attention of the vision tower runs over all pictures of one size at once (transformers loops
    over pictures), its patch projection is a matrix product, and a hook keeps the hidden states of
    the auxiliary losses. Results are those of the stock model.
    """

    def __init__(self, model: Qwen2VLForConditionalGeneration) -> None:
        self.model = model
        self.named: torch.Tensor | None = None
        tower: Any = model.model.visual
        for block in tower.blocks:
            block.attn.forward = _batched_attention(block.attn)
        projection = tower.patch_embed.proj
        tower.patch_embed.forward = lambda x: functional.linear(x, projection.weight.flatten(1), projection.bias)
        self.attended: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        AttentionInterface.register(_ATTENTION, self._attend)
        AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)
        model.model.language_model.set_attn_implementation(_ATTENTION)
        layers: Any = model.model.language_model.layers
        layers[_NAMED_LAYER].register_forward_hook(self._keep)

    def _keep(self, module: Any, inputs: Any, output: Any) -> None:
        self.named = output[0] if isinstance(output, tuple) else output

    def _attend(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        if module.layer_idx in _POINTING:
            self.attended[module.layer_idx] = q, k
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    def _pointing(self, batch: Batch) -> torch.Tensor:
        """Return the loss of one query head per KV head that should attend to what is asked.

        It is the negative logarithm of the attention that falls on the needed tokens. In
        comparisons, the first KV head looks for the first picture, the second for the second.
        """
        losses = []
        length = batch.ids.shape[1]
        for layer, before in _POINTING.items():
            q, k = (states.float() for states in self.attended[layer])
            rows = (batch.answers - before) // length
            at = (batch.answers - before) % length
            later = torch.arange(length) > at[:, None]
            for head in range(k.shape[1]):
                query = q[rows, head * (q.shape[1] // k.shape[1]), at]
                scores = torch.einsum("nd,nld->nl", query, k[rows, head]) / q.shape[-1] ** 0.5
                scores = scores.masked_fill(later, -torch.inf).log_softmax(-1)
                needed = batch.needed[head]
                found = scores.masked_fill(~needed, -torch.inf)[needed.any(-1)].logsumexp(-1)
                losses.append(-found.mean())
        return torch.stack(losses).mean()

    def features(self, batch: Batch) -> torch.Tensor:
        """Return the output of the vision tower, `[cells, hidden]`, in the order of the cells."""
        parts: list[torch.Tensor] = []
        for side, patches in batch.patches.items():
            count = len(patches) // (MERGE * side) ** 2
            grid = torch.tensor([[1, MERGE * side, MERGE * side]] * count)
            parts.append(self.model.model.visual(patches, grid).pooler_output)
        joined = torch.cat(parts)
        return torch.zeros_like(joined).index_copy(0, batch.order, joined)

    def losses(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the loss on answers, the sum of the auxiliary losses, and which are right."""
        model = self.model
        features = self.features(batch)
        embedded = model.get_input_embeddings()(batch.ids)
        flat = embedded.flatten(0, 1).to(features.dtype)
        flat = flat.index_copy(0, batch.visual, features)
        hidden = model.model.language_model(
            inputs_embeds=flat.view(*batch.ids.shape, -1),
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state.flatten(0, 1)
        ids = batch.ids.flatten()
        logits = model.lm_head(hidden[batch.answers - 1]).float()
        answers = functional.cross_entropy(logits, ids[batch.answers])
        # Answering one token earlier as well gives the first layers something to retrieve for.
        early = functional.cross_entropy(model.lm_head(hidden[batch.answers - 2]).float(), ids[batch.answers])
        ends = model.lm_head(hidden[batch.answers]).float()
        stop = functional.cross_entropy(ends, torch.full_like(batch.answers, IDS[END]))
        assert self.named is not None
        named = self.named.flatten(0, 1)
        cued = batch.cues >= 0
        asking = named[batch.answers[cued] - 2]
        # Otherwise noted words become alike, because all are answers in the same place.
        noted = batch.named[len(batch.visual) :]
        words = self._reads(named[noted], TAGS, ids[noted] - IDS[TAGS[0]]) if len(noted) else 0.0
        extra = (
            words
            + self._reads(features, _COLOUR_WORDS, batch.colours)
            + self._reads(features, _SHAPE_WORDS, batch.shapes)
            + self._reads(features, CELLS, batch.cells)
            + self._reads(named[batch.named], NAMES, batch.names)
            + self._reads(asking, CUES, batch.cues[cued])
            + self._pointing(batch)
        )
        return answers + 0.5 * early + 0.1 * stop, extra, logits.argmax(-1) == ids[batch.answers]

    def _reads(self, hidden: torch.Tensor, chosen: Sequence[str], targets: torch.Tensor) -> torch.Tensor:
        """Return the loss of reading `targets`, `[rows]`, among some words from hidden states.

        The head is the tied word embedding, so that nothing is thrown away after training.
        """
        with torch.autocast("cpu", enabled=False):
            normed = functional.rms_norm(hidden.float(), hidden.shape[-1:])
            head = self.model.lm_head.weight[[IDS[word] for word in chosen]].float()
            loss: torch.Tensor = functional.cross_entropy(normed @ head.T, targets)
            return loss


def _batched_attention(attention: Any) -> Any:
    """Return a forward of a vision attention for pictures of one size."""

    def forward(x: torch.Tensor, cu_seqlens: torch.Tensor, position_embeddings: Any, **_: Any) -> torch.Tensor:
        pictures = len(cu_seqlens) - 1
        q, k, v = attention.qkv(x).view(len(x), 3, attention.num_heads, -1).unbind(1)
        cos, sin = (table.unsqueeze(1).to(q.dtype) for table in position_embeddings)

        def rotate(states: torch.Tensor) -> torch.Tensor:
            half = states.shape[-1] // 2
            turned = torch.cat((-states[..., half:], states[..., :half]), -1)
            rotated: torch.Tensor = states * cos + turned * sin
            return rotated

        def split(states: torch.Tensor) -> torch.Tensor:
            return states.reshape(pictures, -1, *states.shape[1:]).transpose(1, 2)

        out = functional.scaled_dot_product_attention(split(rotate(q)), split(rotate(k)), split(v))
        mixed: torch.Tensor = attention.proj(out.transpose(1, 2).reshape(len(x), -1))
        return mixed

    return forward


def train(
    out: Path,
    curriculum: tuple[Stage, ...] = CURRICULUM,
    seed: int = 1,
    max_steps: int | None = None,
) -> Path:
    """Train the model, continuing from `out/latest` if it exists.

    Args:
        out: Folder of the checkpoints and of the log `train_log.csv`.
        curriculum: The stages, in order.
        seed: Seed of the initial weights and of every batch.
        max_steps: Steps of the whole run after which training stops; None is all stages.

    Returns:
        The folder of the last checkpoint.
    """
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    latest = out / "latest"
    progress = {"step": 0, "tokens": 0, "seconds": 0.0}
    if latest.exists():
        model = Qwen2VLForConditionalGeneration.from_pretrained(latest, dtype=torch.float32)
        state = torch.load(latest / "state.pt", weights_only=True)
        progress = state["progress"]
    else:
        model = Qwen2VLForConditionalGeneration(model_config())
    model.train()
    trainee = Trainee(model)
    optims = optimizers(model)  # type: ignore[arg-type]
    rates = [float(optimizer.param_groups[0]["lr"]) for optimizer in optims]
    if latest.exists():
        for optimizer, saved in zip(optims, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    started = time.monotonic() - progress["seconds"]
    logged = saved_at = time.monotonic()
    record = _Record(out / "train_log.csv", int(progress["step"]))
    while max_steps is None or progress["step"] < max_steps:
        stage, done = stage_at(curriculum, int(progress["tokens"]))
        if stage is None:
            break
        step = int(progress["step"])
        warm = min(1.0, (step + 1) / _WARMUP_STEPS)
        level = warm * (stage.rate[0] + (stage.rate[1] - stage.rate[0]) * done)
        for optimizer, rate in zip(optims, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * level
        feed = step % len(stage.feeds)
        batch = draw_batch(stage.feeds[feed], stage.batch, seed, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answers, extra, right = trainee.losses(batch)
        torch.autograd.backward(answers + stage.hints * extra)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optims:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress["step"] += 1
        progress["tokens"] += int((batch.ids != 0).sum())
        progress["seconds"] = time.monotonic() - started
        record.add(float(answers.detach()), float(extra.detach()), batch.kinds, right, feed)
        if time.monotonic() - logged > _LOG_SECONDS:
            record.write(progress, stage.name, level)
            logged = time.monotonic()
        if time.monotonic() - saved_at > _SAVE_SECONDS:
            _save(out, model, optims, progress)
            saved_at = time.monotonic()
    record.write(progress, "end", 0.0)
    _save(out, model, optims, progress)
    return latest.resolve()


def _save(
    out: Path,
    model: Qwen2VLForConditionalGeneration,
    optims: list[torch.optim.Optimizer],
    progress: dict[str, Any],
) -> None:
    """Write a checkpoint, then make `out/latest` point to it in one step."""
    folder = out / f"step-{progress['step']:06d}"
    save_model(folder, model)
    state = {"progress": progress, "optimizers": [each.state_dict() for each in optims]}
    torch.save(state, folder / "state.pt")
    link = out / "latest.new"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    os.replace(link, out / "latest")
    for old in sorted(out.glob("step-*"))[:-3]:
        shutil.rmtree(old)


class _Record:
    """The training log: means since the last line.

    Args:
        path: The CSV file.
        step: Step from which the run goes on; later lines belong to a part that was killed.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        if path.exists():
            head, *lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if int(line.split(",")[0]) <= step]
            path.write_text("\n".join([head, *kept]) + "\n", encoding="utf-8")
        self._reset()

    def _reset(self) -> None:
        self.losses: list[tuple[float, float]] = []
        self.right: dict[str, list[bool]] = defaultdict(list)
        self.feeds: dict[int, list[bool]] = defaultdict(list)

    def add(self, answers: float, extra: float, kinds: list[str], right: torch.Tensor, feed: int) -> None:
        self.losses.append((answers, extra))
        for kind, hit in zip(kinds, right.tolist(), strict=True):
            self.right[kind].append(hit)
            self.feeds[feed].append(hit)

    def write(self, progress: dict[str, Any], stage: str, level: float) -> None:
        """Append a line, print it, and start again."""
        if not self.losses:
            return
        answers, extra = np.mean(self.losses, axis=0)
        row: dict[str, Any] = {
            "step": progress["step"],
            "tokens": progress["tokens"],
            "seconds": round(progress["seconds"]),
            "stage": stage,
            "rate": round(level, 4),
            "loss": round(float(answers), 4),
            "auxiliary": round(float(extra), 4),
        }
        row |= {kind: round(float(np.mean(self.right[kind])), 3) if self.right[kind] else "" for kind in KINDS}
        new = not self.path.exists()
        with self.path.open("a", encoding="utf-8", newline="") as log:
            writer = csv.DictWriter(log, row)
            if new:
                writer.writeheader()
            writer.writerow(row)
        feeds = {feed: round(float(np.mean(hits)), 2) for feed, hits in sorted(self.feeds.items())}
        print(json.dumps({**row, "feeds": feeds}), flush=True)
        self._reset()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Train the vision-language reference model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help="stop after this many steps of the whole run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    last = train(options.out, seed=options.seed, max_steps=options.steps)
    model = Qwen2VLForConditionalGeneration.from_pretrained(last, dtype=torch.float32)
    shipped = options.out / NAME
    # Half the size; the configuration still says float32, so that the Auto classes load that.
    save_model(shipped, model, torch.bfloat16)
    shutil.copy(options.out / "train_log.csv", shipped)
    print(shipped)


if __name__ == "__main__":
    main()
