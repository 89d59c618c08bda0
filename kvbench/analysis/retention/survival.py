"""Retention analysis: one pass with the full cache per text, and the policies over the first texts.

Every policy sees the same text (context, question, and the model's answer with the full cache), so all comparisons are
over the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kvbench.analysis.choosing import select_numbers
from kvbench.analysis.common import analysis_runner
from kvbench.analysis.retention import steps, texts
from kvbench.analysis.retention.matrices import TokenSums, sparsity
from kvbench.analysis.retention.options import MOST_HEADS, MOST_LAYERS, RetentionOptions
from kvbench.analysis.retention.survive import InUse, Survival, horizons
from kvbench.budget import Budget
from kvbench.engine.decode import Stop, end_tokens, greedy
from kvbench.engine.draw import row_seeds
from kvbench.engine.models import full_layer_ids, model_info, visual_ids
from kvbench.engine.prefix import Prefix
from kvbench.engine.showing import ViewBuilder
from kvbench.errors import PluginError, UserError, plugin_call
from kvbench.plugin import Need, Policy, Score
from kvbench.progress import Reporter
from kvbench.runs.grid import Grid
from kvbench.runs.worker import ModelRunner

Case = tuple[str, str]
"""Policy and budget, as spelled."""


@dataclass
class RetentionText:
    """A text that the policies ran on.

    Attributes:
        sample_id: Name of the sample.
        token_ids: Token ids.
        pieces: Text of each token.
        special: Positions of special tokens.
        context, question: Lengths of the first two parts; the rest is the model's answer.
        log_beta: Log retention per policy with gates, float32 `[L, H, T]`.
        traces: Entries held over time, by case.
    """

    sample_id: str
    token_ids: list[int]
    pieces: list[str]
    special: set[int]
    context: int
    question: int
    log_beta: dict[str, Tensor]
    traces: dict[Case, steps.Trace] = field(default_factory=dict)

    def part(self, position: int) -> str:
        """Return the part of the text at a position."""
        after_context = position >= self.context
        return texts.PARTS[after_context + (position >= self.context + self.question)]


@dataclass
class TaskRetention:
    """Retention results of one task and model.

    Attributes:
        where: Model, task, length and moment.
        layers: The model's index of the full-attention layers.
        draw_layers, draw_heads: Positions in `layers` and KV heads to draw.
        survival: Survival over all texts.
        criteria: Names and values of the survival criteria.
        count: Number of texts.
        sparsity: Sums over texts by policy, float64 `[L, H]`.
        tokens: Retention of tokens by policy.
        token_labels: Display labels of the vocabulary tokens that occurred.
        samples: The texts that the policies ran on.
    """

    where: dict[str, Any]
    layers: list[int]
    draw_layers: list[int]
    draw_heads: list[int]
    survival: Survival
    criteria: list[tuple[str, float]]
    count: int = 0
    sparsity: dict[str, Tensor] = field(default_factory=dict)
    tokens: dict[str, TokenSums] = field(default_factory=dict)
    token_labels: dict[int, str] = field(default_factory=dict)
    samples: list[RetentionText] = field(default_factory=list)


@dataclass(frozen=True)
class RetentionResult:
    """Result of the retention analysis.

    Attributes:
        tasks: One result per task and model.
        failed: Reasons of failures, by model, task and action.
        ungated: Policies without retention gates, which have no matrices.
    """

    tasks: list[TaskRetention]
    failed: dict[str, str]
    ungated: list[str]


def has_retention_gates(policy: Policy) -> bool:
    """Return whether a policy's score predicts how fast each token decays."""
    score = policy.score
    return score is not None and type(score).log_retention is not Score.log_retention


def analyze(grid: Grid, options: RetentionOptions, reporter: Reporter) -> RetentionResult:
    """Analyse the retention of policies.

    Args:
        grid: Policies, budgets, models, tasks, lengths and samples; its moments are ignored.
        options: All other options.
        reporter: Progress reporter.

    Raises:
        UserError: A value is unknown or out of range.
    """
    sources = texts.sources(grid, options.text, options.new_tokens, reporter)
    runnable_policies = {model: texts.runnable(grid, model) for model in grid.models}
    policies = {
        spelling: policy for by_spelling in runnable_policies.values() for spelling, policy in by_spelling.items()
    }
    result = RetentionResult(
        [],
        {},
        [spelling for spelling, policy in policies.items() if not has_retention_gates(policy)],
    )
    source_horizons = [_horizon(source, options) for source in sources]
    source_pairs = zip(sources, source_horizons, strict=True)
    for _, same_stage in groupby(source_pairs, key=lambda pair: id(pair[0].stage)):
        stage_sources = list(same_stage)
        stage = stage_sources[0][0].stage
        with analysis_runner(stage, grid, reporter, result.failed) as runner:
            model_policies = runnable_policies[stage.model]
            budgets = {str(budget): budget for budget in grid.parsed_budgets if not budget.is_full}
            cases = [(policy, budget) for policy in model_policies for budget in budgets]
            probe = _Probe(runner, model_policies, budgets, cases, options, grid.seed, stage.tokenizer)
            reporter.start(sum(probe.work(stage_source) for stage_source, _ in stage_sources), stage.model)
            result.tasks.extend(probe.task(source, horizon) for source, horizon in stage_sources)
    return result


def _horizon(source: texts.TextSource, options: RetentionOptions) -> int:
    """Return the number of steps to follow survival for."""
    shortest = min(text.tokens for text in source.texts)
    if options.horizon is None:
        return max(1, shortest // 2)
    if options.horizon >= shortest:
        raise UserError(
            f"--horizon {options.horizon}: the shortest text of {source.task} has {shortest} "
            f"tokens; use {shortest - 1} at most"
        )
    return options.horizon


@dataclass
class _Probe:
    """Analysis of the texts of one model.

    Attributes:
        runner: Runs the model.
        policies: Policies by spelling.
        budgets: Budgets by spelling.
        cases: Policies and budgets to run on the texts shown.
        seed: Noise seed.
        tokenizer: The model's tokenizer.
    """

    runner: ModelRunner
    policies: dict[str, Policy]
    budgets: dict[str, Budget]
    cases: list[Case]
    options: RetentionOptions
    seed: int
    tokenizer: Any

    def __post_init__(self) -> None:
        model = self.runner.model
        self.layers = full_layer_ids(model)
        self.use = InUse(self.options.top, self.options.mass)
        self.gated = {spelling: policy for spelling, policy in self.policies.items() if has_retention_gates(policy)}
        self.ends = end_tokens(model, self.tokenizer)
        self.visual = visual_ids(model)
        drawn_layers = select_numbers(self.options.layers, self.layers, "layers", MOST_LAYERS)
        self.draw_layers = [self.layers.index(layer) for layer in drawn_layers]
        head_range = range(model_info(model).kv_heads)
        self.draw_heads = select_numbers(self.options.heads, head_range, "heads", MOST_HEADS)

    def work(self, source: texts.TextSource) -> int:
        """Return the work units of a source: tokens fed to the model."""
        token_counts = [text.tokens for text in source.texts]
        return sum(token_counts) + len(self.cases) * sum(token_counts[: self.options.traces])

    def task(self, source: texts.TextSource, horizon: int) -> TaskRetention:
        """Analyse the texts of one source."""
        task = TaskRetention(
            where={
                "model": source.stage.model,
                "task": source.task,
                "length": source.length,
                "moment": self.options.moment,
            },
            layers=self.layers,
            draw_layers=self.draw_layers,
            draw_heads=self.draw_heads,
            survival=Survival(horizons(horizon)),
            criteria=self.options.criteria,
        )
        for text_number, source_text in enumerate(source.texts):
            token_ids, log_beta = self._run_full_cache(source_text, task)
            self.runner.reporter.advance(source_text.tokens)
            if text_number < self.options.traces:
                task.samples.append(self._trace_policies(source_text, token_ids, log_beta, task))
        return task

    def _run_full_cache(self, source_text: texts.Text, task: TaskRetention) -> tuple[list[int], dict[str, Tensor]]:
        """Run one text with the full cache; return its tokens, with the answer, and the gates' log retention."""
        needs: set[Need] = {
            self.use,
            *(need for gated_policy in self.gated.values() for need in gated_policy.needs),
        }
        token_ids = [*source_text.context, *source_text.question]
        prefix, logits = self.runner.prefill(source_text.context, needs, source_text.media)
        if source_text.question:
            logits = prefix.extend(self.runner.tensor(source_text.question))
        stop = Stop(self.tokenizer, self.ends, source_text.until)
        token_ids += greedy(prefix, logits, source_text.limit, stop, feed_last=True)
        if self.use in prefix.cache.broken:
            raise prefix.cache.broken[self.use]
        observer = prefix.cache.observers[self.use]
        task.survival.add([observer.read(layer_index)[:, 0] for layer_index in range(len(self.layers))])
        task.count += 1
        log_beta = {}
        for spelling, policy in self.gated.items():
            log_retention = self._try_policy(task, f"the gates of {spelling}", _read_log_retention, prefix, policy)
            if log_retention is None:
                task.sparsity.pop(spelling, None)
                task.tokens.pop(spelling, None)
                continue
            log_beta[spelling] = log_retention
            sparsities = sparsity(log_retention)
            task.sparsity[spelling] = task.sparsity.get(spelling, torch.zeros_like(sparsities)) + sparsities
            task.tokens.setdefault(spelling, TokenSums()).add(token_ids, log_retention)
        for token in {*token_ids} - {*task.token_labels}:
            task.token_labels[token] = texts.token_label(self.tokenizer, token)
        return token_ids, log_beta

    def _trace_policies(
        self,
        source_text: texts.Text,
        token_ids: list[int],
        log_beta: dict[str, Tensor],
        task: TaskRetention,
    ) -> RetentionText:
        """Run the policies on one text."""
        special_positions = set(getattr(self.tokenizer, "all_special_ids", ()))
        sample = RetentionText(
            source_text.sample_id,
            token_ids,
            texts.pieces(self.tokenizer, token_ids),
            {position for position, token in enumerate(token_ids) if token in special_positions},
            len(source_text.context),
            len(source_text.question),
            log_beta,
        )
        for case in self.cases:
            remaining, case_name = source_text.tokens, f"{case[0]} at {case[1]}"
            policy, budget = self.policies[case[0]], self.budgets[case[1]]

            def advance(length: int) -> None:
                nonlocal remaining
                self.runner.reporter.advance(min(length, max(0, remaining)))
                remaining -= length

            if self.options.moment == "decode":
                visual_positions = [
                    position for position, token in enumerate(source_text.context) if token in self.visual
                ]
                entry_limit = budget.per_head(len(token_ids), len(visual_positions))
                if steps.evicts_nothing(policy, entry_limit, len(token_ids)):
                    self._report_idle(case, policy, entry_limit, len(token_ids))
                initial_tokens = 1 + max(visual_positions, default=0)
                arguments = (
                    self.runner,
                    token_ids,
                    policy,
                    budget,
                    self.seed,
                    advance,
                    source_text.media,
                    initial_tokens,
                )
                trace = self._try_policy(task, case_name, steps.trace_decoding, *arguments)
            else:
                prefix, _ = self.runner.prefill(source_text.context, policy.needs, source_text.media)
                lengths = len(source_text.context), len(token_ids)
                trace = self._try_policy(
                    task,
                    case_name,
                    steps.trace_compression,
                    prefix,
                    policy,
                    budget,
                    self.seed,
                    *lengths,
                )
            if trace is not None:
                sample.traces[case] = trace
            else:
                for earlier_text in task.samples:
                    earlier_text.traces.pop(case, None)
            self.runner.reporter.advance(max(0, remaining))
        return sample

    def _report_idle(self, case: Case, policy: Policy, entry_limit: int, length: int) -> None:
        hint = f"; {policy.name}:buffer=0 evicts at every step" if policy.buffer else ""
        self.runner.reporter.message(
            f"{case[0]} at {case[1]}: nothing is evicted, because {length} tokens do not fill a "
            f"budget of {entry_limit} and a buffer of {policy.buffer}{hint}"
        )

    def _try_policy(self, task: TaskRetention, action: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that runs a policy; on errors, record the failure and return None."""
        failure_key = f"{task.where['model']}, {task.where['task']}: {action}"
        if failure_key in self.runner.failed:
            return None
        try:
            with plugin_call():
                return function(*args)
        except PluginError as error:
            self.runner.failed[failure_key] = str(error)
            self.runner.reporter.message(f"{failure_key} failed: {error}")
            return None


def _read_log_retention(prefix: Prefix, policy: Policy) -> Tensor:
    """Return the log retention of every token from a policy's gates, float32 `[L, H, T]` on the CPU."""
    cache = prefix.cache
    lengths = cache.lengths().tolist()
    seeds = row_seeds(cache, 0)
    view_builder = ViewBuilder(policy, cache, prefix.info, "context", lengths, seeds)
    assert policy.score is not None
    layer_values = []
    for layer_index, layer in enumerate(cache.ragged):
        log_retention = policy.score.log_retention(view_builder.view(layer, layer_index))
        assert log_retention is not None
        if bool((log_retention > 0).any()) or not bool(log_retention.isfinite().all()):
            raise UserError(f"{policy}: log retention must be finite and 0 or less")
        layer_values.append(log_retention[0].float().cpu())
    return torch.stack(layer_values)
