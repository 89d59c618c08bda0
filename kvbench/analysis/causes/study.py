"""Causes over a run: every lost sample of every cell, with one prefill per context."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.analysis.causes.departure import compress_while_decoding
from kvbench.analysis.causes.diagnosis import NOT_FOUND, RIGHT, Diagnosis, LostSample, diagnose, reproduce_loss
from kvbench.analysis.causes.evidence import EvidenceSpans, Span, column_mask, find_evidence
from kvbench.analysis.causes.lost import RecordedAnswer, RunAnswers, common_opening, is_answered, is_lost
from kvbench.analysis.causes.options import SEARCH, CausesOptions
from kvbench.analysis.causes.probe import AnswerProbe
from kvbench.analysis.causes.searching import search_evidence
from kvbench.analysis.causes.swaps import Swap, compare_policies
from kvbench.analysis.causes.trials import Trial, Trials, Unit, in_units
from kvbench.analysis.common import analysis_runner, contexts, kept_masks, stages
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import Stop, end_tokens, greedy
from kvbench.engine.models import full_layer_ids, model_info
from kvbench.engine.prefix import Prefix
from kvbench.errors import UserError
from kvbench.plugin import Policy
from kvbench.progress import Reporter
from kvbench.runs.answers import Prompt, stop_of
from kvbench.runs.cell import Cell
from kvbench.runs.full_answers import FullAnswers
from kvbench.runs.grid import Grid
from kvbench.runs.planning import Job, Stage
from kvbench.runs.worker import ModelRunner

_READING_LAYERS = 4
"""Layers whose heads are taken from the full cache one by one: those that hurt most as a whole."""


@dataclass
class JudgedAnswer:
    """The full cache's answer to a prompt.

    Attributes:
        ids: Its tokens, up to the token after the last reference answer in it.
        judged: Indices of the tokens of the reference answers in it and of the token after each; of all if it contains
            none.
        text: The tokens as text.
    """

    ids: list[int]
    judged: list[int]
    text: str


@dataclass
class ExaminedSample:
    """One sample under one cell.

    Attributes:
        cell, prompt: The cell and the prompt.
        full, own: Recorded answers of the full cache and of the cell.
        kept: Entries that the policy keeps, bool `[L, H, columns]`.
        evidence: What the answer comes from.
        columns: Columns of the context.
        diagnosis: Why it is lost; None if it is not.
        swap: Comparison with the policy `against`; None if that one loses it too.
        seconds, cells: Time and number of measured caches.
        step: Token of the answer before which the cache was examined, at moment `decode`; otherwise 0.
    """

    cell: Cell
    prompt: Prompt
    full: RecordedAnswer
    own: RecordedAnswer
    kept: Tensor
    evidence: EvidenceSpans
    columns: int
    diagnosis: Diagnosis | None = None
    swap: Swap | None = None
    seconds: float = 0.0
    cells: int = 0
    step: int = 0

    @property
    def verdict(self) -> str:
        """Return the verdict, also of a sample that is not lost."""
        return RIGHT if self.diagnosis is None else self.diagnosis.verdict


@dataclass
class ReadingHeads:
    """What the full cache loses without the evidence in single layers and heads.

    Attributes:
        where: Labels of a cell of the sample's task.
        prompt: The sample.
        trials: The measured caches.
    """

    where: Mapping[str, Any]
    prompt: Prompt
    trials: Trials


@dataclass
class CausesResult:
    """Everything that was measured.

    Attributes:
        samples: Samples that the full cache answers, by cell.
        reading: Reading heads of samples that some cell loses.
        layers: The model's index of each full-attention layer, by model.
        shapes: Full-attention layers, KV heads and query heads of a layer, by model.
        pieces: Text of every token of the prompts of lost samples, by model, task, length, sample and question.
        unanswered: Number of samples that the full cache does not answer; they are left out.
        missing: Number of samples of which the run has no answer of the full cache; they are left out.
        differing: Number of full answers that differ from those of the run.
        failed: Reasons of failures by cell.
        stopped: Whether the user stopped the analysis before the last sample.
    """

    samples: list[ExaminedSample] = field(default_factory=list)
    reading: list[ReadingHeads] = field(default_factory=list)
    layers: dict[str, list[int]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    pieces: dict[tuple[object, ...], list[str]] = field(default_factory=dict)
    unanswered: int = 0
    missing: int = 0
    differing: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    stopped: bool = False


def examine_run(grid: Grid, answers: RunAnswers, options: CausesOptions, reporter: Reporter) -> CausesResult:
    """Examine all samples that a run's cells lose.

    Args:
        grid: The cells to examine.
        answers: Answers of the run.
        options: Options of the analysis.
        reporter: Progress reporter.

    Raises:
        UserError: The run has no answers of a cell, the model cannot be masked, or evidence was requested that a
            context does not contain.
    """
    result = CausesResult()
    for stage in stages(grid, reporter.message, codes=True):
        for job in stage.jobs:
            _check_prompts(job)
            for cell in job.cells:
                answers.of(cell)
        with analysis_runner(stage, grid, reporter, result.failed) as runner:
            result.layers[stage.model] = full_layer_ids(runner.model)
            info = model_info(runner.model)
            result.shapes[stage.model] = (info.layers, info.kv_heads, info.query_heads)
            reporter.start(sum(len(job.prompts) * len(job.cells) for job in stage.jobs), stage.model)
            try:
                for job in stage.jobs:
                    examiner = _Examiner(runner, stage, job, answers, options, result)
                    for prompts in contexts(job):
                        examiner.context([prompt for prompt in prompts if prompt.repeat == 0])
                        reporter.advance(len(prompts) * len(job.cells))
            except KeyboardInterrupt:
                if not result.samples:
                    raise
                result.stopped = True
                reporter.message("stopped; writing what was examined so far")
                break
    return result


def _check_maskable(cache: RaggedCache, model: str) -> None:
    """Refuse a model whose caches cannot be masks over one prefill."""
    if len({layer.heads for layer in cache.ragged}) > 1:
        raise UserError(
            f"{model} cannot be masked: its layers have different numbers of KV heads; choose another model"
        )


def _check_prompts(job: Job) -> None:
    """Refuse prompts without an answer in words, or without evidence that can be masked."""
    if job.prompts[0].request.measures:
        raise UserError(f"{job.task.name} measures given texts, so there is no answer to lose; use another --task")
    if job.prompts.shows:
        raise UserError(f"{job.task.name} shows images, which have no evidence in words; use kvbench analyze vision")


class _Examiner:
    """Examines the samples of one task."""

    def __init__(
        self,
        runner: ModelRunner,
        stage: Stage,
        job: Job,
        answers: RunAnswers,
        options: CausesOptions,
        result: CausesResult,
    ) -> None:
        self.runner, self.job, self.options, self.result = runner, job, options, result
        self.model_name, self.tokenizer = stage.model, stage.tokenizer
        self.answers = answers
        self.run_answers: FullAnswers  # about the context that is being examined
        self.opening = common_opening([prompt.context_ids for prompt in job.prompts])
        self.ends = end_tokens(runner.model, stage.tokenizer)
        self.needs = frozenset(need for cell in job.cells for need in cell.policy.needs)

    def context(self, prompts: Sequence[Prompt]) -> None:
        """Examine all questions about one context."""
        if not self.job.cells:
            return
        full_answers = self.answers.full(self.job.cells[0])
        asked = [prompt for prompt in prompts if _key(prompt) in full_answers]
        answered = [prompt for prompt in asked if is_answered(full_answers[_key(prompt)])]
        self.result.unanswered += len(asked) - len(answered)
        self.result.missing += len(prompts) - len(asked)
        if not answered:
            return
        context_ids = answered[0].context_ids
        prefix, logits = self.runner.prefill(context_ids, self.needs)
        _check_maskable(prefix.cache, self.model_name)
        self.run_answers = FullAnswers(self.runner, self.tokenizer, self._stop, context_ids, ())
        self.run_answers.share(prefix, logits)
        for prompt in answered:
            self._question(prefix, prompt, full_answers[_key(prompt)])

    def _question(self, prefix: Prefix, prompt: Prompt, full: RecordedAnswer) -> None:
        """Examine one question under all cells."""
        evidence = find_evidence(self.tokenizer, prompt, self.options.evidence)
        extended, logits = self.runner.ask(prefix, prompt.question_ids)
        answer = self._full_answer(extended.fork(), logits, prompt)
        texts = answer.text.strip(), full.response.strip()
        is_same = texts[0].startswith(texts[1]) or texts[1].startswith(texts[0])
        self.result.differing += not is_same
        where = self.job.cells[0].labels
        examined: list[tuple[ExaminedSample, LostSample | None]] = []
        for cell in self.job.cells:
            recorded = self.answers.of(cell).get(_key(prompt))
            if recorded is None or cell.cell in self.runner.failed:
                continue
            sample = self._cell(prefix, extended, prompt, answer, cell, full, recorded, evidence)
            if sample is not None:
                examined.append(sample)
        self._compare(examined)
        self.result.samples += [sample for sample, _ in examined]
        if any(sample.verdict != RIGHT for sample, _ in examined):
            place = (where["model"], where["task"], where["length"], *_key(prompt))
            self.result.pieces[place] = [self.tokenizer.decode([token]) for token in prompt.ids]
        self._reading_heads(prompt, [lost for _, lost in examined if lost is not None and lost.evidence.any()], where)

    def _full_answer(self, prefix: Prefix, logits: Tensor, prompt: Prompt) -> JudgedAnswer:
        """Answer with the full cache, up to the token after the last reference answer."""
        targets = [target for target in prompt.request.target if target]
        ids: list[int] = []
        lengths: list[int] = []  # of the text after each token
        tokens_after = 0
        for token in greedy(prefix, logits, prompt.limit, self._stop(prompt)):
            ids.append(token)
            text = self._text(ids)
            lengths.append(len(text))
            if tokens_after:
                break
            tokens_after = bool(targets) and all(target in text for target in targets)
        text = self._text(ids)
        judged: set[int] = set()
        for target in targets:
            begin = text.find(target)
            if begin < 0:
                continue
            first = next(index for index, length in enumerate(lengths) if length > begin)
            last = next(index for index, length in enumerate(lengths) if length >= begin + len(target))
            judged |= {index for index in range(first, last + 2) if index < len(ids)}
        return JudgedAnswer(ids, sorted(judged) or list(range(len(ids))), text)

    def _stop(self, prompt: Prompt) -> Stop:
        return stop_of(prompt.request, self.tokenizer, self.ends, None)

    def _text(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    def _cell(
        self,
        prefix: Prefix,
        extended: Prefix,
        prompt: Prompt,
        answer: JudgedAnswer,
        cell: Cell,
        full: RecordedAnswer,
        recorded: RecordedAnswer,
        evidence: EvidenceSpans,
    ) -> tuple[ExaminedSample, LostSample | None] | None:
        """Examine one question under one cell; None if its policy fails or no token depends on its cache."""
        started = time.perf_counter()
        if cell.moment == "decode":
            compressed = compress_while_decoding(self.runner, extended, cell, prompt, answer.ids, answer.judged)
            if compressed is None:
                return None
            dense, kept, own, step = compressed
            probe = AnswerProbe(
                self.runner.model, dense, answer.ids[step:-1], answer.ids[step + 1 :], _later(answer.judged, step + 1)
            )
        else:
            source = shown = extended if cell.moment == "question" else prefix
            if cell.policy.is_informed:
                following = self.run_answers.following(prompt, question_fed=cell.moment == "question")
                shown = source.told(cell.policy, following)
            cache = self.runner.compress(shown, cell, prompt, len(prompt.question_ids) + len(answer.ids))
            source.cache.modified_in_place |= shown.modified_in_place  # they share keys and values
            source.restore()
            if cache is None:
                return None
            kept, own, step = torch.stack(kept_masks(cache)), None, 0
            kept = kept.cpu()
            if cell.moment == "question":  # the first token comes from the full prefill
                fed, expected, judged = answer.ids[:-1], answer.ids[1:], _later(answer.judged, 1)
            else:
                fed, expected = [*prompt.question_ids, *answer.ids[:-1]], answer.ids
                judged = answer.judged
            probe = AnswerProbe(self.runner.model, source.cache, fed, expected, judged)
            if is_lost(full, recorded) and judged and _changes_entries(cell.policy):
                own = probe.measure_cache(cache)
        if not probe.judged:
            return None
        columns = len(prompt.context_ids)
        sample = ExaminedSample(cell, prompt, full, recorded, kept, evidence, columns, step=step)
        if not is_lost(full, recorded):
            return sample, None
        sample.diagnosis = reproduce_loss(probe, kept, own)
        if not sample.diagnosis.verdict and not evidence.spans:
            spans = search_evidence(probe, kept, kept.shape[-1] if cell.moment == "decode" else columns)
            sample.evidence = replace(evidence, spans=spans, source=SEARCH if spans else "")
        evidence_mask = column_mask(sample.evidence.spans, kept.shape[-1])
        lost = LostSample(probe, kept, evidence_mask, columns, self.opening, _seed(cell, prompt))
        if not sample.diagnosis.verdict:
            diagnose(lost, sample.diagnosis, self.options.units)
        sample.seconds, sample.cells = time.perf_counter() - started, probe.cells
        return sample, lost

    def _compare(self, examined: Sequence[tuple[ExaminedSample, LostSample | None]]) -> None:
        """Compare lost samples with the policy `against` where that one answers."""
        for sample, lost in examined:
            if self.options.against is None or lost is None or sample.cell.moment == "decode":
                continue
            if sample.verdict != NOT_FOUND and not lost.evidence.any():  # nothing was searched for
                continue
            other = next(
                (
                    candidate
                    for candidate, _ in examined
                    if str(candidate.cell.policy) == self.options.against
                    and candidate.cell.variant.timing == sample.cell.variant.timing
                    and str(candidate.cell.budget) == str(sample.cell.budget)
                    and candidate.verdict == RIGHT
                ),
                None,
            )
            if other is not None and sample.diagnosis is not None and not sample.diagnosis.outcomes["mask"].right:
                sample.swap = compare_policies(lost, other.kept, self.options.units)

    def _reading_heads(self, prompt: Prompt, lost: Sequence[LostSample], where: Mapping[str, Any]) -> None:
        """Take the evidence from single layers and heads of the full cache."""
        if not lost:
            return
        sample = lost[0]
        trials = Trials(sample.probe)
        full = Trial("full", sample.full)
        (outcome,) = sample.probe.measure([full.kept])
        layers: list[Unit] = [(layer,) for layer in range(len(sample.kept))]

        def take(chosen: Sequence[Unit]) -> Trial:
            removed = sample.evidence & in_units(chosen, sample.kept.shape)
            return Trial("take from full", full.kept & ~removed, tuple(chosen))

        outcomes = trials.run([take([layer]) for layer in layers], full, outcome.nll)
        if self.options.units == "heads":
            ranked = sorted(layers, key=lambda layer: -outcomes[layer[0]].nll)[:_READING_LAYERS]
            heads: list[Unit] = [(layer, head) for (layer,) in ranked for head in range(sample.kept.shape[1])]
            trials.run([take([head]) for head in heads], full, outcome.nll)
        self.result.reading.append(ReadingHeads(where, prompt, trials))


def _key(prompt: Prompt) -> tuple[str, int]:
    return prompt.request.sample_id, prompt.request.question_id


def _later(indices: Sequence[int], first: int) -> list[int]:
    """Return the indices from `first` on, counted from it."""
    return [index - first for index in indices if index >= first]


def _changes_entries(policy: Policy) -> bool:
    """Return whether a policy writes keys and values of its own."""
    return policy.merge is not None or policy.recodes


def _seed(cell: Cell, prompt: Prompt) -> int:
    """Return the seed of the controls of one sample and cell."""
    digest = hashlib.sha256(f"{cell.match} {_key(prompt)}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def held_share(sample: ExaminedSample, spans: Sequence[Span]) -> Tensor:
    """Return the share of some columns that every head holds, `[L, H]`; NaN if there are no columns."""
    return sample.kept[..., column_mask(spans, sample.kept.shape[-1])].double().mean(-1)


def budget_shares(sample: ExaminedSample) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the entries of every head over their mean, `[L, H]`."""
    entries = sample.kept.sum(-1).double()
    shares: np.ndarray[Any, np.dtype[np.float64]] = (entries / entries.mean()).numpy()
    return shares
