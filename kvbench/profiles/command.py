"""`kvbench profile`: plans the task, measures, checks and writes the result."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvbench import __version__, reference
from kvbench.engine.loading import load_model
from kvbench.engine.models import check_single, model_info
from kvbench.errors import UserError, nearest
from kvbench.files import cannot
from kvbench.profiles.ablation import LEAST_ANSWERS, Evidence, Mean, head_losses, verify
from kvbench.profiles.files import KINDS, PROFILES, HeadProfile
from kvbench.profiles.needle_attention import NeedleAttention, measure
from kvbench.profiles.needles import find_needles
from kvbench.profiles.queries import filters_of, query_moments, sample_queries
from kvbench.profiles.summaries import (
    FILTERS,
    KIND,
    WEIGHTS,
    QuerySummary,
    SummaryNotes,
    Tensors,
)
from kvbench.progress import Reporter
from kvbench.runs.grid import Grid
from kvbench.runs.planning import Stage, plan

TASK, SAMPLES = "facts", 33
"""Its text, needles and questions are in no other task, so profiles do not see what they are
evaluated on."""
PROMPTS = 20
"""Prompts whose queries are summarised."""


def profile_heads(
    model: str,
    kind: str,
    options: Mapping[str, Any],
    output_path: Path | None,
    reporter: Reporter,
) -> list[str]:
    """Measure a profile of a model and write it.

    Args:
        model: `reference`, a folder or a hub id.
        kind: `ablation`, `reason` or `copy`.
        options: Further flags of a grid: task, length, samples, seed, device, dtype, attn, revision,
            chat_template.
        output_path: The file; None writes to the user's cache.
        reporter: Told of the progress.

    Returns:
        Lines for the user: where the profile is, and what it says.

    Raises:
        UserError: An option is out of range, the model cannot be loaded, the task has no needle, or
            the profile does not tell heads that matter from others.
    """
    if kind not in KINDS:
        raise UserError(f"unknown --kind {kind}{nearest(kind, KINDS)}; use {' or '.join(KINDS)}")
    if output_path is not None and output_path.is_dir():
        raise UserError(f"--out {output_path} is a folder; give the path of a file")
    profile_path = output_path or PROFILES.user_path(model, kind)
    _check_place(profile_path)
    profile = measure_profile(model, kind, options, reporter)
    profile.save(profile_path)
    messages = [f"wrote {profile_path}", describe(profile)]
    if output_path is not None:
        messages.append(f"policies read it with profile={profile_path}")
    elif any(PROFILES.shipped_path(model, known_kind) for known_kind in KINDS):
        messages.append(f"policies prefer the shipped profile; they read this one with profile={profile_path}")
    return messages


def _check_place(target_path: Path) -> None:
    """Make the folder of a file and try to write to it: before the work, not after it.

    Raises:
        UserError: It cannot be written to.
    """
    try:
        target_path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target_path.parent):
            pass
    except OSError as error:
        raise cannot("write", target_path, error) from None


def profile_queries(
    summary: QuerySummary,
    model: str,
    options: Mapping[str, Any],
    output_path: Path | None,
    reporter: Reporter,
) -> list[str]:
    """Summarise the queries of a model and write the summary.

    Args:
        summary: What to measure: `FILTERS` or `STATISTICS`.
        model: `reference`, a folder or a hub id.
        options: As in `profile_heads`.
        output_path: The folder; None writes to the user's cache.
        reporter: Told of the progress.

    Returns:
        Lines for the user: where the summary is, and what it was made from.

    Raises:
        UserError: An option is out of range, or the model or a task cannot be loaded.
    """
    if output_path is not None and output_path.is_file():
        raise UserError(f"--out {output_path} is a file; give the path of a folder")
    folder = output_path or summary.artifacts.user_path(model, KIND)
    _check_place(folder / WEIGHTS)
    tensors, notes = measure_queries(summary, model, options, reporter)
    summary.save(folder, tensors, notes)
    layers, head_count, head_size, *_ = next(iter(tensors.values())).shape
    head_kind = "KV heads" if summary is FILTERS else "query heads"
    messages = [
        f"wrote {folder}",
        f"{summary.noun} of {notes.model}: {layers} layers by {head_count} {head_kind} "
        f"of {head_size} channels, from "
        f"{notes.queries} queries of each query head in {notes.prompts} prompts of {notes.task}",
    ]
    if output_path is not None:
        messages.append(f"policies read them with {summary.option}={folder}")
    elif summary.artifacts.shipped_path(model, KIND):
        messages.append(f"policies prefer the shipped ones; they read these with {summary.option}={folder}")
    return messages


def measure_queries(
    summary: QuerySummary, model: str, options: Mapping[str, Any], reporter: Reporter
) -> tuple[Tensors, SummaryNotes]:
    """Summarise the queries of a model; arguments as in `profile_queries`."""
    grid, stage, network = _load_stage(model, {"samples": PROMPTS, **options}, reporter)
    # A whole text has no prompt: its windows are read instead.
    prompts = [prompt.ids or prompt.branches[0].input_ids for job in stage.jobs for prompt in job.prompts]
    try:
        reporter.start(len(prompts), f"{model} reads")
        if summary is FILTERS:
            queries = sample_queries(network, prompts, grid.seed, reporter)
            kv_heads, query_count = model_info(network).kv_heads, queries[0].shape[1]
            tensors = {"q_filters": torch.stack([filters_of(layer_queries, kv_heads) for layer_queries in queries])}
        else:
            query_mean, covariance, query_count = query_moments(network, prompts, reporter)
            tensors = {"query_mean": query_mean, "query_cov": covariance}
    finally:
        reporter.stop()
    return tensors, SummaryNotes(
        model=reference.versioned(model),
        revision=stage.jobs[0].cells[0].model_revision,
        task=",".join(dict.fromkeys(job.task.name for job in stage.jobs)),
        lengths=tuple(dict.fromkeys(job.task.length for job in stage.jobs)),
        prompts=len(prompts),
        queries=query_count,
        seed=grid.seed,
        kvbench=__version__,
    )


def _load_stage(model: str, options: Mapping[str, Any], reporter: Reporter) -> tuple[Grid, Stage, nn.Module]:
    """Plan the prompts of a model, and load it."""
    grid = Grid.from_dict({"task": TASK, **options, "model": model, "policy": "full"})
    (stage,) = plan(grid, reporter.message).stages
    network = load_model(
        model,
        grid.revision,
        stage.device,
        stage.dtype,
        device_map=grid.device_map,
        quantization=grid.quantization,
        attn=grid.attn,
    )
    return grid, stage, network


def measure_profile(model: str, kind: str, options: Mapping[str, Any], reporter: Reporter) -> HeadProfile:
    """Measure a profile of a model; arguments as in `profile_heads`."""
    grid, stage, network = _load_stage(model, {"samples": SAMPLES, **options}, reporter)
    check_single(network, "a head profile")
    model_shape = model_info(network)
    try:
        measurement = _measure(network, stage, model, kind, grid, reporter)
    finally:
        reporter.stop()
    score_sum = float(measurement.scores.sum())
    return HeadProfile(
        model=reference.versioned(model),
        revision=stage.jobs[0].cells[0].model_revision,
        kind=kind,
        layers=model_shape.layers,
        kv_heads=model_shape.kv_heads,
        query_heads=model_shape.query_heads,
        scores=tuple(tuple(layer_scores) for layer_scores in (measurement.scores / score_sum).tolist()),
        task=",".join(dict.fromkeys(job.task.name for job in stage.jobs)),
        lengths=tuple(dict.fromkeys(job.task.length for job in stage.jobs)),
        samples=grid.samples,
        seed=grid.seed,
        answered=round(measurement.answered, 4),
        loss_top=round(measurement.evidence.top, 4),
        loss_others=round(measurement.evidence.others, 4),
        kvbench=__version__,
    )


@dataclass(frozen=True)
class _Measurement:
    """Scores of the KV heads, `[L, H]`, not normalised, and what supports them."""

    scores: Tensor
    answered: float
    evidence: Evidence


def _measure(network: nn.Module, stage: Stage, model: str, kind: str, grid: Grid, reporter: Reporter) -> _Measurement:
    needles = [needle for job in stage.jobs for needle in find_needles(stage.tokenizer, job.prompts)]
    reporter.start(len(needles), f"{model} answers")
    measurement = measure(network, stage.tokenizer, needles, reporter)
    answers = [answer for answer in measurement.answers if answer.correct]
    if len(answers) < LEAST_ANSWERS:
        raise UserError(
            f"model {model} answers {len(answers)} of {len(needles)} samples correctly, too few to "
            "profile its heads; use an easier --task, a shorter --length or more --samples"
        )
    if kind == "ablation":
        reporter.start(len(answers), f"heads of {model} ablated one by one")
        scores = significant(head_losses(network, answers, grid.seed, reporter), model)
    else:
        scores = per_kv_head(measurement, kind, model_info(network).kv_heads, model)
    reporter.start(len(answers), f"the {kind} profile of {model} is checked")
    evidence = verify(network, answers, scores, grid.seed, reporter)
    check(evidence, kind, model)
    return _Measurement(scores, measurement.answered, evidence)


def significant(losses: Tensor, model: str) -> Tensor:
    """Mean losses of the heads, `[L, H]`; 0 for heads whose 95% interval reaches 0.

    Args:
        losses: Losses by answer, `[S, L, H]`.
        model: The model's name, for the message.

    Raises:
        UserError: That is so for all heads.
    """
    mean_loss = Mean.of(losses)
    scores = torch.where(mean_loss.lower > 0, mean_loss.mean, 0.0)
    if not bool(scores.any()):
        raise UserError(
            f"no KV head of {model} is needed for the answers, as far as {len(losses)} of them "
            "tell; use a --task whose answer is in the context, a longer --length or more --samples"
        )
    return scores


def per_kv_head(measurement: NeedleAttention, kind: str, kv_heads: int, model: str) -> Tensor:
    """Attention scores of the KV heads, `[L, H]`: the sum over the query heads of each.

    Raises:
        UserError: They are all 0.
    """
    scores: Tensor = measurement.scores[kind].unflatten(1, (kv_heads, -1)).sum(-1)
    if not bool(scores.any()):
        raise UserError(f"no head of {model} attends to a needle as the {kind} profile counts it; use --kind ablation")
    return scores


def check(evidence: Evidence, kind: str, model: str) -> None:
    """Refuse a profile that does not tell heads that matter from others.

    Raises:
        UserError: Ablating its best heads costs no more than ablating others.
    """
    if evidence.holds:
        return
    advice = "more --samples" if kind == "ablation" else "--kind ablation"
    raise UserError(
        f"the {kind} profile of {model} does not tell which heads matter: the answers lose "
        f"{evidence.top:.2g} nats per token without its best {evidence.heads} of {evidence.total} "
        f"heads, and {evidence.others:.2g} without as many others; use {advice}"
    )


def describe(profile: HeadProfile) -> str:
    """Summarise a profile in one line."""
    ranked = sorted(
        ((score, layer, kv_head) for layer, row in enumerate(profile.scores) for kv_head, score in enumerate(row)),
        key=lambda entry: (-entry[0], entry[1:]),
    )
    best_heads = ", ".join(f"layer {layer} head {kv_head} {score:.1%}" for score, layer, kv_head in ranked[:4])
    cumulative = itertools.accumulate(score for score, *_ in ranked)
    half_count = next(head_count for head_count, sum_so_far in enumerate(cumulative, 1) if sum_so_far >= 0.499999)
    description = (
        f"{profile.kind} profile of {profile.model}: {profile.layers} layers by "
        f"{profile.kv_heads} KV heads; "
        f"half of it lies in {half_count} of the {len(ranked)} heads ({best_heads})"
    )
    if profile.loss_top is not None and profile.loss_others is not None:
        description += (
            f"; the answers lose {profile.loss_top:.2g} nats per token without that half, and "
            f"{profile.loss_others:.2g} without as many other heads"
        )
    if profile.answered is not None:
        description += f"; the model answered {profile.answered:.0%} of the samples correctly"
    return description
