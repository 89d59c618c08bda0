"""Interface between harness and runner: the prompts of a task, and a scorer of responses.

A harness never sees a model or a judge. The runner takes `LoadedTask.requests` and has the engine answer them. If the
task needs a judge, the judge answers `LoadedTask.asks`. The runner then calls `LoadedTask.score_metrics` on the
responses so far, at any time and any number of times.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvbench.benchmark import Ask, Benchmark, Marks, Medium
from kvbench.data.spool import Spool
from kvbench.decoding import Sampling
from kvbench.files import digest_of
from kvbench.progress import Reporter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_FILTER = "none"
"""lm-eval's name of the filter of tasks that have none; `MetricScores.filter` is then empty."""

Key = tuple[str, int, int]
"""A response's key within a cell: (sample_id, question_id, repeat)."""


@dataclass(frozen=True)
class Continuation:
    """A text whose log-likelihood after a prompt is measured, such as one choice of a question.

    Attributes:
        question: The rest of its prompt, after the context of the request.
        text: The measured text, with the white space that separates it from the prompt.
        alone: Whether it is measured without any prompt, after the model's first token alone: for metrics that
            normalise by the unconditional likelihood. It is the same for all cells.
    """

    question: str
    text: str
    alone: bool = False


@dataclass(frozen=True)
class Request:
    """One question about one context.

    `context + question` is the whole prompt, with few-shot examples, chat template and answer prefix applied; the
    question follows the context directly.

    Attributes:
        task: Task name.
        sample_id: Name of the sample, unique in the task together with `question_id`.
        doc_id: Index of the sample's row in the task's data.
        question_id: Index of the question about its context, from 0.
        context_id: Hash of the context; statistics are clustered by it.
        context: The part of the prompt whose cache is compressed.
        question: The rest of the prompt.
        until: Strings that end the answer.
        max_new_tokens: Limit of the answer, in tokens.
        target: The reference answers.
        extra: Facts that a report can group by, such as the `depth` (percent) of a needle.
        dialogue: Name of the dialogue of this question; "" outside dialogues. The turns of a dialogue are adjacent and
            in order, and share `sample_id` and `context_id`.
        turn: Number of the turn, from 0; the same as `question_id`.
        delta: Text that this turn adds before its question: new facts, and the opening of the turn.
        answer: The reference answer as it appears in the history of later turns; "" if a mark stands in its place, so
            that the dialogue can only be live.
        answer_begin: Text between a question and the stripped answer in a history: whitespace with some chat templates,
            otherwise "".
        answer_end: Text between the stripped answer and the next turn's `delta` in a history.
        sampling: Sampling of the answer; None: greedy.
        repeats: Number of answers to sample.
        given: A text after the prompt to measure instead of an answer: its negative log-likelihood under the cell's
            cache. The response is then the JSON object `{"nll": sum in nats, "tokens": count}`.
        continuations: Texts to measure after the prompt instead of an answer. The response is then the JSON object
            `{"loglikelihood": [...], "greedy": [...], "tokens": [...]}`, with one entry for each: sum of
            log-likelihoods in nats, whether greedy decoding would produce it, and number of tokens. `question` is the
            question of the first one.
        rolling: Whether the text `context` itself is measured, token by token from the first, in windows of the model's
            length (lm-eval's `loglikelihood_rolling`). `question` is "", and the response has one entry, as above.
        media: Images and videos of `context`, in the order of their placeholders in it (those of the model's chat
            template, one per medium). A question has no media.
        delta_media: The media of `delta`; they are the last ones of `media`.

    The history of a dialogue with reference answers is the concatenation of `delta + question + answer_begin + answer +
    answer_end` over its turns. Up to the question of turn j it equals `context + question` of that turn's request,
    character by character. A live dialogue has its own answers in the history instead.
    """

    task: str
    sample_id: str
    doc_id: int
    question_id: int
    context_id: str
    context: str
    question: str
    until: tuple[str, ...]
    max_new_tokens: int
    target: tuple[str, ...]
    extra: Mapping[str, str | int | float] = field(default_factory=dict)
    dialogue: str = ""
    turn: int = 0
    delta: str = ""
    answer: str = ""
    answer_begin: str = ""
    answer_end: str = ""
    sampling: Sampling | None = None
    repeats: int = 1
    given: str = ""
    continuations: tuple[Continuation, ...] = ()
    rolling: bool = False
    media: tuple[Medium, ...] = ()
    delta_media: tuple[Medium, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        """Return 16 hex digits over the prompt and the reference answers."""
        content = [self.context_id, self.context, self.question, self.given, self.target]
        measured = [[entry.question, entry.text, entry.alone] for entry in self.continuations]
        return digest_of([*content, measured] if measured else content)

    @property
    def measures(self) -> bool:
        """Return whether texts are measured instead of an answer being generated."""
        return bool(self.given or self.continuations or self.rolling)


def kept(requests: Iterable[Request]) -> Sequence[Request]:
    """Return requests as a sequence: on disk, unless there are images, which are held only once."""
    stored: list[Request] | Spool[Request] = Spool()
    for request in requests:
        if request.media and isinstance(stored, Spool):
            stored = [*stored]
        stored.append(request)
    return stored


@dataclass(frozen=True)
class HarnessFlags:
    """lm-eval's own flags, with its names, defaults and meaning, for its tasks by name.

    Attributes:
        num_fewshot: Number of examples; None: as the task says. A task that says 0 keeps 0.
        fewshot_as_multiturn: Whether examples are turns of the chat; None: if a chat template is applied.
        system_instruction: Text before every prompt.
        apply_chat_template: Name of the chat template, or `default`; None: no template.
        gen_kwargs: Changes of a task's `generation_kwargs`.
        context: Rule for what the context of a prompt is; see docs/harnesses.md. None: examples if there are any,
            otherwise a passage.
        context_field: Field of the document that holds the passage.
        confirm_run_unsafe_code: Whether tasks that execute what a model wrote may run.
    """

    num_fewshot: int | None = None
    fewshot_as_multiturn: bool | None = None
    system_instruction: str | None = None
    apply_chat_template: str | None = None
    gen_kwargs: Mapping[str, Any] = field(default_factory=dict)
    context: str | None = None
    context_field: str | None = None
    confirm_run_unsafe_code: bool = False


@dataclass(frozen=True)
class TaskSettings:
    """Everything that a task's prompts depend on, besides the task itself.

    Attributes:
        length: Maximum number of tokens of context, question and answer together.
        samples: Number of samples; a larger number begins with the same samples.
        seed: Seed of the data.
        tokenizer: Sizes the prompts and applies the chat template.
        tokenizer_id: The tokenizer's name in messages; its content is hashed.
        lexicon: "natural" (real models) or "reference" (the shipped tiny model).
        chat_template: Whether to apply the tokenizer's chat template.
        cache_dir: Folder for generated data.
        thinking: Passed to the chat template as `enable_thinking`; None: not passed.
        processor: The processor of a vision-language model, whose chat template writes the placeholders of media; None
            for a text model.
        reporter: Progress reporter, for loads that take seconds.
        flags: lm-eval's own flags, for its tasks by name.
        lmms_model: Model of lmms-eval whose prompts its tasks use; None: those for all models.
        max_frames: Number of frames that a model sees of a video, at most; None: as the task says.
    """

    length: int
    samples: int
    seed: int
    tokenizer: PreTrainedTokenizerBase
    tokenizer_id: str
    lexicon: str
    chat_template: bool
    cache_dir: Path
    thinking: bool | None = None
    processor: Any = None
    reporter: Reporter | None = None
    flags: HarnessFlags = HarnessFlags()
    lmms_model: str | None = None
    max_frames: int | None = None


@dataclass(frozen=True)
class MetricScores:
    """What one metric says of responses.

    Attributes:
        name: Name of the metric.
        filter: Name of the filter that the responses went through; "" if there is none, or only one of kvbench's own.
        higher_is_better: Whether a higher score is better.
        values: The metric's value of each response that has one: a number, unless `aggregate` is set.
        score: The harness's own aggregate of the values; NaN if there are none, or if the metric failed.
        aggregate: Function from values of any of the responses to their score, such as a perplexity, Matthews'
            correlation or a BLEU of the corpus; the values are then whatever it takes. None if the score is the mean of
            the values.
    """

    name: str
    filter: str
    higher_is_better: bool
    values: Mapping[Key, Any]
    score: float
    aggregate: Callable[[Sequence[Any]], float] | None = None

    @property
    def label(self) -> str:
        """Name and filter as users write them, such as `exact_match,strict-match`."""
        return f"{self.name},{self.filter}" if self.filter else self.name


@dataclass(frozen=True)
class GroupMetric:
    """How a group of tasks aggregates a metric of its tasks.

    Attributes:
        metric: Name of the metric.
        filters: The filters whose scores are aggregated; None: each that a task has.
        by_size: Whether tasks are weighted by their number of documents.
    """

    metric: str
    filters: tuple[str, ...] | None
    by_size: bool


@dataclass(frozen=True)
class TaskGroup:
    """A group of tasks with a score of its own.

    Attributes:
        name: Name of the group.
        tasks: Names of all its tasks, also those of its subgroups.
        metrics: The metrics that it aggregates.
    """

    name: str
    tasks: tuple[str, ...]
    metrics: tuple[GroupMetric, ...]


@dataclass(frozen=True, eq=False)
class LoadedTask(ABC):
    """The prompts of a task at one length, and its scorer.

    Attributes:
        name: Task name.
        group: Name of the benchmark.
        version: Version of the task; together with the data hash it identifies the prompts.
        data_hash: 16 hex digits over task version, tokenizer, length, seed and lexicon, or over the content if the data
            is not generated. The number of samples never counts.
        metric: Name of the metric, the first of `score_metrics`.
        higher_is_better: Whether a higher score is better by it.
        chance: Expected score without the context.
        length: Tokens that prompt and answer can take, or 0 if the data is not sized.
        requests: Ordered by sample; those of one context are adjacent. Every access may create a new request object.
        rubric: See `Benchmark.judge`.
        groups: The groups with a score of their own that the task belongs to.
        recorded: Settings of the prompts that the results record with the generation settings, such as the rule that
            decides what the context is.
        notes: Messages to the user about how the task runs, each a line.
        refused: Why policies cannot compress a cache at some moments, by moment; the message names those that work.
    """

    name: str
    group: str
    version: str
    data_hash: str
    metric: str
    higher_is_better: bool
    chance: float
    length: int
    requests: Sequence[Request]
    rubric: str = field(default="", kw_only=True)
    groups: tuple[TaskGroup, ...] = field(default=(), kw_only=True)
    recorded: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    refused: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @functools.cached_property
    def places(self) -> Mapping[tuple[str, int], int]:
        """Return the index of each request in `requests`, by sample and question."""
        return {
            (request.sample_id, request.question_id): request_index
            for request_index, request in enumerate(self.requests)
        }

    def asks(self, responses: Mapping[Key, str]) -> list[Ask]:
        """Return the judge's question about each response, in their order; empty if no judge is needed.

        Args:
            responses: As for `score_metrics`.

        Raises:
            KeyError: A key does not belong to this task.
            UserError: The benchmark asks by a rubric that it does not declare.
        """
        return []

    @abstractmethod
    def score_metrics(self, responses: Mapping[Key, str], marks: Sequence[Marks] | None = None) -> list[MetricScores]:
        """Score the available responses by all metrics of the task.

        Args:
            responses: Response text by (sample_id, question_id, repeat), for any samples.
            marks: A judge's answers to `asks(responses)`; None if the task needs no judge.

        Returns:
            The task's metric first, then the others that any response has. Only a failure of the first one is an error:
            the score of another one that fails is NaN.

        Raises:
            KeyError: A key does not belong to this task.
            UserError: The task needs marks and there are none.
        """

    def score(self, responses: Mapping[Key, str], marks: Sequence[Marks] | None = None) -> tuple[dict[Key, Any], float]:
        """Return the value of each response by the task's metric, and their score; see `score_metrics`."""
        task_metric = self.score_metrics(responses, marks)[0]
        return dict(task_metric.values), task_metric.score


class Harness(Protocol):
    """Loads tasks, such as `kvbench.harness.lm_eval.LmEvalHarness`."""

    name: str

    def load(self, task: str, settings: TaskSettings, benchmark: Benchmark | None = None) -> LoadedTask:
        """Load a task.

        Args:
            task: Task name, or the path of the user's own `.jsonl`.
            settings: What the prompts depend on.
            benchmark: The benchmark of the task; None looks it up among the installed ones.

        Raises:
            NeedsHub: The data is on the hub and not available here.
            UserError: The task is unknown, or does not fit into the length.
        """
        ...
