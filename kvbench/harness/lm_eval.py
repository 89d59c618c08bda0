"""lm-eval (0.4.13) as a harness: its YAML defines prompts and scoring.

Neither `simple_evaluate` (which reseeds global generators and starts processes) nor a model class of lm-eval is used. A
task is built once from its YAML and our rows. Its prompts go to the runner; the responses then go through the task's
own filters, metric and aggregation.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import random
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_aggregation
from lm_eval.tasks import TaskManager
from lm_eval.utils import env

from kvbench.benchmark import Ask, Benchmark, Doc, Marks
from kvbench.data import media
from kvbench.data.sources import hinting
from kvbench.data.spool import Spool
from kvbench.decoding import Thinking, scored_text
from kvbench.errors import UserError
from kvbench.harness import chat, dialogue, loading
from kvbench.harness import rows as data
from kvbench.harness.encode import count_tokens, tokenizer_hash
from kvbench.harness.protocol import Key, LoadedTask, MetricScores, Request, TaskSettings
from kvbench.harness.requests import requests

_ROWS = 1024
"""Number of rows converted at a time."""

_PART = 1024
"""Number of responses filtered at a time."""

_MEAN = get_aggregation("mean")
"""lm-eval's mean, whose intervals need no resampling of the aggregate itself."""

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LmEvalHarness:
    """Loads tasks whose prompts and metric come from an lm-eval YAML."""

    name = "lm_eval"

    def load(self, task: str, settings: TaskSettings, benchmark: Benchmark | None = None) -> LmEvalTask:
        """Load a task; see `Harness.load`."""
        task_name, resolved = loading.find(task, benchmark)
        settings = loading.settle(task_name, resolved, settings)
        render = loading.renderer(settings)
        with hinting(task_name):
            rows, data_hash = _rows(resolved, task_name, settings, render)
        documents, positions = dialogue.flat(rows, render is not None)
        with quiet():
            harness_task = _build(resolved, task_name, documents, settings)
            prepared = requests(
                harness_task, task_name, documents, positions, render, settings.reporter, settings.max_frames
            )
        return _loaded(resolved, task_name, settings, data_hash, harness_task, rows, prepared)


@dataclass(frozen=True, eq=False)
class LmEvalTask(LoadedTask):
    """A task of lm-eval with its rows. See `LoadedTask`.

    Attributes:
        built: The task object of lm-eval.
        filter: The filter whose output is scored.
        thinks: Whether the model can think; only the text after the thinking is scored.
        ask: See `Benchmark.ask`.
    """

    built: Any = None
    filter: str = "none"
    thinks: bool = False
    ask: Callable[[Doc, str], Ask] | None = None

    def asks(self, responses: Mapping[Key, str]) -> list[Ask]:
        """Call the benchmark's `ask` for every response; see `LoadedTask.asks`."""
        if self.ask is None or not responses:
            return []
        asks_by_key = {}
        said: dict[tuple[str, int], list[str]] = {}
        for key, instance in self._filtered(responses):
            document, response = instance.doc, instance.filtered_resps[self.filter]
            request, _ = self._source(key[:2])
            if request.dialogue and not request.answer:  # the turns of a dialogue follow each other in the data
                history = said.setdefault((key[0], key[2]), [])
                document = {**document, "history": [*history]}
                history.append(response)
            asks_by_key[key] = self.ask(document, response)
        asks = [asks_by_key[key] for key in responses]
        for rubric in dict.fromkeys(ask.rubric for ask in asks):
            # The results record the declared rubric, so no other one may be used.
            if rubric.partition(":")[0] != self.rubric.partition(":")[0]:
                raise UserError(
                    f"benchmark {self.group} asks by rubric {rubric!r} but declares "
                    f"judge={self.rubric!r}; make them agree"
                )
        return asks

    def score_metrics(self, responses: Mapping[Key, str], marks: Sequence[Marks] | None = None) -> list[MetricScores]:
        """Score responses with lm-eval's filters, metrics and aggregations; see `LoadedTask.score_metrics`.

        Every repeat of a question counts as a separate response.
        """
        if responses and self.rubric and marks is None:
            raise UserError(f"{self.name} is scored by a judge; pass its marks to score_metrics()")
        marks_by_key = dict(zip(responses, marks or (), strict=True)) if self.rubric else {}
        values_by_metric: dict[str, dict[Key, Any]] = {self.metric: {}}
        with quiet():
            for key, instance in self._filtered(responses):
                results = [instance.filtered_resps[self.filter], *([marks_by_key[key]] if self.rubric else [])]
                metric_values = dict(self.built.process_results(instance.doc, results))
                values_by_metric[self.metric][key] = metric_values.pop(self.metric)
                for metric, value in metric_values.items():
                    if metric in self.built.aggregation() or isinstance(value, Real):
                        values_by_metric.setdefault(metric, {})[key] = value
            return [self._scored(metric, values) for metric, values in values_by_metric.items()]

    def _scored(self, metric: str, values: Mapping[Key, Any]) -> MetricScores:
        """Return a metric's values with their aggregate; only the task's metric may fail."""
        aggregate = self.built.aggregation().get(metric, _MEAN)
        score = math.nan
        try:
            if aggregate is _MEAN:
                values = {key: float(value) for key, value in values.items()}
            if values:
                score = float(aggregate(list(values.values())))
        except Exception:
            if metric == self.metric:
                raise
        return MetricScores(
            metric,
            self.filter if len(self.built._filters) > 1 else "",
            bool(self.built.higher_is_better().get(metric, True)),
            values,
            score,
            None if aggregate is _MEAN else aggregate,
        )

    def _filtered(self, responses: Mapping[Key, str]) -> Iterator[tuple[Key, Any]]:
        """Yield lm-eval's instances of the responses, filtered, in the order of the task's data.

        A filter sees `_PART` of them at a time, because with their rows all may not fit into memory.
        """
        request_indices, doc_ids = self.places, self._doc_ids
        ordered_keys = sorted(responses, key=lambda key: (doc_ids[request_indices[key[:2]]], key[2]))
        for batch_start in range(0, len(ordered_keys), _PART):
            batch_keys = ordered_keys[batch_start : batch_start + _PART]
            instances = [self._instance(key, responses[key]) for key in batch_keys]
            with quiet():
                self.built._instances = instances
                try:
                    self.built.apply_filters()
                finally:
                    self.built._instances = []
            yield from zip(batch_keys, instances, strict=True)

    @functools.cached_property
    def _doc_ids(self) -> Sequence[int]:
        """Return the row index of each request."""
        return array("Q", (request.doc_id for request in self.requests))

    def _instance(self, key: Key, response: str) -> Any:
        """Return an instance of lm-eval with a response."""
        request, document = self._source(key[:2])
        if self.thinks and not request.given:  # the response to a given text is a record, not an answer
            response = scored_text(response, request.until)
        prompt = f"{request.context}{data.SENTINEL}{request.question}"
        arguments = (prompt, self.built.config.generation_kwargs)
        instance_key = (self.name, request.doc_id, 1)
        return Instance("generate_until", document, arguments, 0, instance_key, resps=[response])

    @functools.cached_property
    def _source(self) -> Callable[[tuple[str, int]], tuple[Request, Doc]]:
        """Return a reader of a request and its document; those of most tasks stay cached for the next cell."""

        @functools.lru_cache(_PART)
        def source(key: tuple[str, int]) -> tuple[Request, Doc]:
            request = self.requests[self.places[key]]
            return request, self.built.task_docs[request.doc_id]

        return source


# --- rows -----------------------------------------------------------------------------------------


def _rows(
    benchmark: Benchmark, task_name: str, settings: TaskSettings, render: chat.Render | None
) -> tuple[Sequence[Doc], str]:
    """Return the rows of a task and their hash."""
    prompt_size = _Size(settings.tokenizer, render)
    version = benchmark.version_of(task_name, settings.lexicon)

    def generate(sample_count: int) -> Any:
        return benchmark.docs(
            task_name,
            length=settings.length,
            samples=sample_count,
            seed=settings.seed,
            tokenizer=settings.tokenizer,
            lexicon=settings.lexicon,
            cache_dir=settings.cache_dir,
            size=prompt_size,
        )

    rows: Iterable[Doc]
    if benchmark.sized:
        # Everything besides the generator that the rows depend on; it names the cached file.
        dependencies = [
            benchmark.name,
            task_name,
            version,
            tokenizer_hash(settings.tokenizer),
            settings.length,
            settings.seed,
            settings.lexicon,
            render is not None,
            *([] if settings.thinking is None else [settings.thinking]),
        ]
        file_name = f"{task_name}-{data.digest(dependencies)}.jsonl"
        cache_file = settings.cache_dir / "data" / benchmark.name / file_name
        code_hash = data.code_digest(_function(benchmark.docs).__module__)
        rows = generated = data.cached(cache_file, settings.samples, generate, code_hash)
        first_row = media.identity(generated[0]) if benchmark.media else generated[0]
        data_hash = data.digest([*dependencies, first_row])
    else:
        documents = generate(settings.samples)
        doc_rows: Sequence[Doc] = documents
        if isinstance(documents, Path):
            doc_rows = Spool(row for _, row in data.read_rows(documents))
        rows = islice(doc_rows, settings.samples)
        data_hash = data.digest_rows(version, media.identity(doc_rows) if benchmark.media else doc_rows)
    completed: list[Doc] | Spool[Doc] = [] if benchmark.media else Spool()
    for row_index, row in enumerate(rows):
        location = f"{task_name}, row {row_index}"
        if dialogue.is_dialogue(row):
            completed.append(dialogue.complete(row, location))
        else:
            completed.append(data.complete(row, location, has_references=benchmark.has_references))
        if data.has_media(row) and not benchmark.media:
            raise UserError(f"{task_name}: its rows have media, so benchmark {benchmark.name} must set media")
    return completed, data_hash


def _function(docs_function: Any) -> Any:
    """Return the function behind a hook that may have bound arguments."""
    return _function(docs_function.func) if isinstance(docs_function, functools.partial) else docs_function


@dataclass(frozen=True)
class _Size:
    """Counts the tokens of prompts as the model sees them; the `size` of `Benchmark.docs`."""

    tokenizer: PreTrainedTokenizerBase
    render: chat.Render | None

    def __call__(
        self,
        context: str,
        question: str,
        gen_prefix: str = "",
        shots: Sequence[chat.Shot] = (),
    ) -> int:
        prompt = chat.prompt(context + question, gen_prefix, self.render, shots)
        return count_tokens(self.tokenizer, prompt)

    def dialogue(self, row: Doc) -> int:
        """Return the tokens of the prompt of the last turn."""
        return count_tokens(self.tokenizer, dialogue.last_prompt(row, self.render))


# --- lm-eval's task -------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence lm-eval and datasets, and preserve the global random state, which lm-eval changes."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loggers = map(logging.getLogger, ("lm_eval", "lm-eval", "datasets"))
    # Changing a level touches all loggers, which costs as much as the metric.
    logger_levels = [(logger, logger.level) for logger in loggers if logger.level != logging.ERROR]
    bars_disabled = datasets.utils.are_progress_bars_disabled()
    for logger, _ in logger_levels:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    random_state = random.getstate()
    try:
        yield
    finally:
        random.setstate(random_state)
        for logger, level in logger_levels:
            logger.setLevel(level)
        if not bars_disabled:
            datasets.enable_progress_bars()


def _build(benchmark: Benchmark, task_name: str, rows: Sequence[Doc], settings: TaskSettings) -> Any:
    """Build the lm-eval task from the benchmark's YAML and our rows."""
    yaml_path, config = loading.yaml_of(benchmark, task_name)
    # The YAML needs none of these. The fields of `extra` differ between rows; Arrow would add nulls.
    hidden_columns = ("extra", "shots", "media")
    split_name = config.get("test_split") or "test"
    dataset = _table(rows, hidden_columns)
    doc_template = config.get("doc_to_text")
    if isinstance(doc_template, str) and doc_template not in dataset.column_names and "doc_to_choice" not in config:
        config["doc_to_text"] = _template(doc_template)
    config |= {
        "task": task_name,
        "test_split": split_name,
        "custom_dataset": lambda **_: {split_name: dataset},
        "metadata": {"version": benchmark.version_of(task_name, settings.lexicon)},
    }
    harness_task = TaskManager(include_defaults=False).load([config])["tasks"][task_name]
    if harness_task.OUTPUT_TYPE != "generate_until":
        raise UserError(f"{yaml_path}: output_type must be generate_until, not {harness_task.OUTPUT_TYPE}")
    harness_task.set_fewshot_seed(settings.seed)
    return harness_task


def _table(rows: Iterable[Doc], hidden_columns: Collection[str]) -> datasets.Dataset:
    """Convert rows, without some fields, to lm-eval's format.

    Many rows are converted in parts, unless these would get columns of different types.
    """
    visible_rows = ({key: value for key, value in row.items() if key not in hidden_columns} for row in rows)
    chunk_datasets = []
    while chunk := [*islice(visible_rows, _ROWS)]:
        chunk_datasets.append(datasets.Dataset.from_list(chunk))
    if all(chunk.features == chunk_datasets[0].features for chunk in chunk_datasets):
        return datasets.concatenate_datasets(chunk_datasets)
    return datasets.Dataset.from_list(
        [{key: value for key, value in row.items() if key not in hidden_columns} for row in rows]
    )


def _template(template_text: str) -> Callable[[Doc], str]:
    """Return lm-eval's renderer of a template, compiled once instead of once per row."""
    template = env.from_string(template_text)
    return lambda row: template.render(**row)


def _loaded(
    benchmark: Benchmark,
    task_name: str,
    settings: TaskSettings,
    data_hash: str,
    harness_task: Any,
    rows: Sequence[Doc],
    prepared: Sequence[Request],
) -> LmEvalTask:
    metric, _, filter_name = benchmark.metric.partition(",")
    metric_names = list(harness_task.aggregation())
    if metric not in metric_names:
        raise UserError(f"{benchmark.name}: its YAML has no metric {metric!r}; it has {metric_names}")
    filter_names = [named_filter.name for named_filter in harness_task._filters]
    return LmEvalTask(
        **loading.facts(benchmark, task_name, settings, rows[0].get("variant", "")),
        data_hash=data_hash,
        metric=metric,
        higher_is_better=bool(harness_task.higher_is_better()[metric]),
        requests=prepared,
        built=harness_task,
        filter=filter_name or filter_names[0],
        thinks=Thinking.of(settings.tokenizer) is not None,
        ask=benchmark.ask,
    )
