"""Runs the analysis: one pass with the full cache per text, and the policies over the first texts.

Every policy sees the same text: context, question, and what the model writes with the full cache.
So all comparisons are about the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kvbench.analysis.choosing import chosen
from kvbench.analysis.common import Bench, loaded
from kvbench.analysis.retention import steps, texts
from kvbench.analysis.retention.matrices import TokenSums, sparsity
from kvbench.analysis.retention.options import MOST_HEADS, MOST_LAYERS, Options
from kvbench.analysis.retention.survive import InUse, Survival, horizons
from kvbench.budget import Budget
from kvbench.engine.decode import Stop, end_tokens, greedy
from kvbench.engine.draw import row_seeds
from kvbench.engine.models import full_layer_ids, model_info, visual_ids
from kvbench.engine.prefix import Prefix
from kvbench.engine.showing import Showing
from kvbench.errors import PluginError, UserError, plugin_call
from kvbench.plugin import Need, Policy, Score
from kvbench.progress import Reporter
from kvbench.runs.grid import Grid

Case = tuple[str, str]
"""Policy and budget, as spelled."""


@dataclass
class Shown:
    """A text that the policies ran over.

    Attributes:
        sample_id: Its name.
        ids: Its tokens.
        pieces: The text of each token.
        special: Positions of special tokens.
        context, question: Lengths of the first two parts; the rest is the model's answer.
        log_beta: Log retention by policy with gates, float32 `[L, H, T]`.
        traces: What was held, by case.
    """

    sample_id: str
    ids: list[int]
    pieces: list[str]
    special: set[int]
    context: int
    question: int
    log_beta: dict[str, Tensor]
    traces: dict[Case, steps.Trace] = field(default_factory=dict)

    def part(self, position: int) -> str:
        """Which part of the text a position is in."""
        asked = position >= self.context
        return texts.PARTS[asked + (position >= self.context + self.question)]


@dataclass
class OfTask:
    """What was found on one task with one model.

    Attributes:
        where: Model, task, length and moment.
        layers: The model's own index of the full-attention layers.
        draw_layers, draw_heads: What to draw: positions in `layers`, and KV heads.
        survival: Survival over all texts.
        criteria: Names and values of the criteria of survival.
        count: Number of texts.
        sparsity: Sums over texts by policy, float64 `[L, H]`.
        tokens: Retention of tokens by policy.
        spelled: Tokens of the vocabulary that occurred, as they are shown.
        shown: The texts that the policies ran over.
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
    spelled: dict[int, str] = field(default_factory=dict)
    shown: list[Shown] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """The result of the analysis.

    Attributes:
        tasks: One result for each task and model.
        failed: Reasons by model, task and what failed.
        ungated: Policies without retention gates, which have no matrices.
    """

    tasks: list[OfTask]
    failed: dict[str, str]
    ungated: list[str]


def gated(policy: Policy) -> bool:
    """Whether a policy's score knows how fast each token fades."""
    score = policy.score
    return score is not None and type(score).log_retention is not Score.log_retention


def analyze(grid: Grid, options: Options, reporter: Reporter) -> Found:
    """Look at what policies retain.

    Args:
        grid: Policies, budgets, models, tasks, lengths and samples; its moments are not used.
        options: Everything else.
        reporter: Told of the progress.

    Raises:
        UserError: Something is unknown or out of range.
    """
    sources = texts.sources(grid, options.text, options.new_tokens, reporter)
    runnable = {model: texts.runnable(grid, model) for model in grid.models}
    policies = {spec: p for of_model in runnable.values() for spec, p in of_model.items()}
    found = Found([], {}, [spec for spec, p in policies.items() if not gated(p)])
    reach = [_horizon(source, options) for source in sources]
    pairs = zip(sources, reach, strict=True)
    for _, together in groupby(pairs, key=lambda pair: id(pair[0].stage)):
        group = list(together)
        stage = group[0][0].stage
        with loaded(stage, grid, reporter.message) as model:
            bench = Bench(model, reporter, found.failed, stage.vision)
            mine = runnable[stage.model]
            budgets = {str(b): b for b in grid.parsed_budgets if not b.is_full}
            cases = [(p, b) for p in mine for b in budgets]
            probe = _Probe(bench, mine, budgets, cases, options, grid.seed, stage.tokenizer)
            reporter.start(sum(probe.work(s) for s, _ in group), stage.model)
            try:
                for source, horizon in group:
                    found.tasks.append(probe.task(source, horizon))
            finally:
                reporter.stop()
    return found


def _horizon(source: texts.Source, options: Options) -> int:
    """Steps that survival is followed for."""
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
    """Looks at the texts of one model.

    Attributes:
        bench: The model.
        policies: By spelling.
        budgets: By spelling.
        cases: What runs over the texts that are shown.
        options: What to look at.
        seed: Noise seed.
        tokenizer: The model's tokenizer.
    """

    bench: Bench
    policies: dict[str, Policy]
    budgets: dict[str, Budget]
    cases: list[Case]
    options: Options
    seed: int
    tokenizer: Any

    def __post_init__(self) -> None:
        model = self.bench.model
        self.layers = full_layer_ids(model)
        self.use = InUse(self.options.top, self.options.mass)
        self.gated = {spec: p for spec, p in self.policies.items() if gated(p)}
        self.ends = end_tokens(model, self.tokenizer)
        self.visual = visual_ids(model)
        layers = chosen(self.options.layers, self.layers, "layers", MOST_LAYERS)
        self.draw_layers = [self.layers.index(layer) for layer in layers]
        heads = range(model_info(model).kv_heads)
        self.draw_heads = chosen(self.options.heads, heads, "heads", MOST_HEADS)

    def work(self, source: texts.Source) -> int:
        """Units of work of a source: tokens that pass the model."""
        sizes = [text.tokens for text in source.texts]
        return sum(sizes) + len(self.cases) * sum(sizes[: self.options.traces])

    def task(self, source: texts.Source, horizon: int) -> OfTask:
        """Look at the texts of one source."""
        found = OfTask(
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
        for number, text in enumerate(source.texts):
            ids, log_beta = self._full(text, found)
            self.bench.reporter.advance(text.tokens)
            if number < self.options.traces:
                found.shown.append(self._shown(text, ids, log_beta, found))
        return found

    def _full(self, text: texts.Text, found: OfTask) -> tuple[list[int], dict[str, Tensor]]:
        """Pass one text with the full cache; give its tokens, with the answer, and the gates."""
        needs: set[Need] = {self.use, *(n for p in self.gated.values() for n in p.needs)}
        prefix = Prefix(self.bench.model, needs)
        ids = [*text.context, *text.question]
        pixels = self.bench.pixels(text.media)
        logits = prefix.extend(self.bench.tensor(text.context), pixels=pixels)
        if text.question:
            logits = prefix.extend(self.bench.tensor(text.question))
        stop = Stop(self.tokenizer, self.ends, text.until)
        ids += greedy(prefix, logits, text.limit, stop, feed_last=True)
        if self.use in prefix.cache.broken:
            raise prefix.cache.broken[self.use]
        observer = prefix.cache.observers[self.use]
        found.survival.add([observer.read(i)[:, 0] for i in range(len(self.layers))])
        found.count += 1
        log_beta = {}
        for spec, policy in self.gated.items():
            said = self._tried(found, f"the gates of {spec}", _said, prefix, policy)
            if said is None:
                found.sparsity.pop(spec, None)
                found.tokens.pop(spec, None)
                continue
            log_beta[spec] = said
            mine = sparsity(said)
            found.sparsity[spec] = found.sparsity.get(spec, torch.zeros_like(mine)) + mine
            found.tokens.setdefault(spec, TokenSums()).add(ids, said)
        for token in {*ids} - {*found.spelled}:
            found.spelled[token] = texts.spelled(self.tokenizer, token)
        return ids, log_beta

    def _shown(
        self, text: texts.Text, ids: list[int], log_beta: dict[str, Tensor], found: OfTask
    ) -> Shown:
        """Run the policies over one text."""
        special = set(getattr(self.tokenizer, "all_special_ids", ()))
        shown = Shown(
            text.sample_id,
            ids,
            texts.pieces(self.tokenizer, ids),
            {i for i, token in enumerate(ids) if token in special},
            len(text.context),
            len(text.question),
            log_beta,
        )
        for case in self.cases:
            left, name = text.tokens, f"{case[0]} at {case[1]}"
            policy, budget = self.policies[case[0]], self.budgets[case[1]]

            def advance(tokens: int) -> None:
                nonlocal left
                self.bench.reporter.advance(min(tokens, max(0, left)))
                left -= tokens

            if self.options.moment == "decode":
                visual = [i for i, token in enumerate(text.context) if token in self.visual]
                allowed = budget.per_head(len(ids), len(visual))
                if steps.idle(policy, allowed, len(ids)):
                    self._say_idle(case, policy, allowed, len(ids))
                start = 1 + max(visual, default=0)
                arguments = (self.bench, ids, policy, budget, self.seed, advance, text.media, start)
                trace = self._tried(found, name, steps.passing, *arguments)
            else:
                prefix = self.bench.prefill(text.context, policy.needs, text.media)
                size = len(text.context), len(ids)
                trace = self._tried(
                    found, name, steps.once, prefix, policy, budget, self.seed, *size
                )
            if trace is not None:
                shown.traces[case] = trace
            else:
                for earlier in found.shown:
                    earlier.traces.pop(case, None)
            self.bench.reporter.advance(max(0, left))
        return shown

    def _say_idle(self, case: Case, policy: Policy, allowed: int, tokens: int) -> None:
        hint = f"; {policy.name}:buffer=0 evicts at every step" if policy.buffer else ""
        self.bench.reporter.message(
            f"{case[0]} at {case[1]}: nothing is evicted, because {tokens} tokens do not fill a "
            f"budget of {allowed} and a buffer of {policy.buffer}{hint}"
        )

    def _tried(self, found: OfTask, name: str, work: Callable[..., Any], *args: Any) -> Any:
        """Call what runs a policy; if it raises, record the failure and give None."""
        key = f"{found.where['model']}, {found.where['task']}: {name}"
        if key in self.bench.failed:
            return None
        try:
            with plugin_call():
                return work(*args)
        except PluginError as error:
            self.bench.failed[key] = str(error)
            self.bench.reporter.message(f"{key} failed: {error}")
            return None


def _said(prefix: Prefix, policy: Policy) -> Tensor:
    """Log retention of every token by a policy's gates, float32 `[L, H, T]` on the CPU."""
    cache = prefix.cache
    every = cache.lengths().tolist()
    seeds = row_seeds(cache, 0)
    showing = Showing(policy, cache, prefix.info, "context", every, seeds)
    assert policy.score is not None
    layers = []
    for index, layer in enumerate(cache.ragged):
        found = policy.score.log_retention(showing.view(layer, index))
        assert found is not None
        if bool((found > 0).any()) or not bool(found.isfinite().all()):
            raise UserError(f"{policy}: log retention must be finite and 0 or less")
        layers.append(found[0].float().cpu())
    return torch.stack(layers)
