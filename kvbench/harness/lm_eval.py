"""lm-eval (0.4.13) as a harness: its YAML defines what is asked and how answers are scored.

Neither `simple_evaluate` (which reseeds global generators and starts processes) nor a model class
of lm-eval is used. A task is built once from its YAML and our rows. Its prompts go to the runner.
The responses then go through the task's own filters, metric and aggregation.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
from lm_eval.api.instance import Instance
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
from kvbench.harness.protocol import Key, LoadedTask, Request, TaskSettings
from kvbench.harness.requests import requests

_ROWS = 1024
"""Rows that are converted at a time."""

_PART = 1024
"""Responses that are filtered at a time."""

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LmEvalHarness:
    """Loads tasks whose prompts and metric are an lm-eval YAML."""

    name = "lm_eval"

    def load(
        self, task: str, settings: TaskSettings, benchmark: Benchmark | None = None
    ) -> LmEvalTask:
        """Load a leaf task; see `Harness.load`."""
        leaf, bench = loading.find(task, benchmark)
        settings = loading.settle(leaf, bench, settings)
        render = loading.renderer(settings)
        with hinting(leaf):
            rows, data_hash = _rows(bench, leaf, settings, render)
        docs, places = dialogue.flat(rows, render is not None)
        with _quiet():
            built = _build(bench, leaf, docs, settings)
            made = requests(built, leaf, docs, places, render, settings.reporter)
        return _loaded(bench, leaf, settings, data_hash, built, rows, made)


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
        found = {
            key: self.ask(instance.doc, instance.filtered_resps[self.filter])
            for key, instance in self._filtered(responses)
        }
        asks = [found[key] for key in responses]
        for rubric in dict.fromkeys(ask.rubric for ask in asks):
            # The results record the declared rubric, so no other one may decide.
            if rubric.partition(":")[0] != self.rubric.partition(":")[0]:
                raise UserError(
                    f"benchmark {self.group} asks by rubric {rubric!r} but declares "
                    f"judge={self.rubric!r}; make them agree"
                )
        return asks

    def score(
        self, responses: Mapping[Key, str], marks: Sequence[Marks] | None = None
    ) -> tuple[dict[Key, float], float]:
        """Score responses with lm-eval's filters, metric and aggregation; see `LoadedTask.score`.

        Every repeat of a question counts as a separate response.
        """
        if not responses:
            return {}, float("nan")
        if self.rubric and marks is None:
            raise UserError(f"{self.name} is scored by a judge; pass its marks to score()")
        judged = dict(zip(responses, marks or (), strict=True)) if self.rubric else {}
        values = {}
        with _quiet():
            for key, instance in self._filtered(responses):
                results = [instance.filtered_resps[self.filter]]
                if self.rubric:
                    results.append(judged[key])
                values[key] = self.built.process_results(instance.doc, results)[self.metric]
            aggregate = self.built.aggregation()[self.metric]
            total = float(aggregate(list(values.values())))
            scores = {
                key: float(value if isinstance(value, int | float) else aggregate([value]))
                for key, value in values.items()
            }
        return scores, total

    def _filtered(self, responses: Mapping[Key, str]) -> Iterator[tuple[Key, Any]]:
        """lm-eval's instances of the responses, filtered, in the order of the task's data.

        A filter sees `_PART` of them at a time: with their rows, all may not fit into memory.
        """
        places, doc_ids = self.places, self._doc_ids
        order = sorted(responses, key=lambda key: (doc_ids[places[key[:2]]], key[2]))
        for start in range(0, len(order), _PART):
            keys = order[start : start + _PART]
            instances = [self._instance(key, responses[key]) for key in keys]
            with _quiet():
                self.built._instances = instances
                try:
                    self.built.apply_filters()
                finally:
                    self.built._instances = []
            yield from zip(keys, instances, strict=True)

    @functools.cached_property
    def _doc_ids(self) -> Sequence[int]:
        """The row of each request."""
        return array("Q", (request.doc_id for request in self.requests))

    def _instance(self, key: Key, text: str) -> Any:
        """An instance of lm-eval with a response."""
        request, doc = self._source(key[:2])
        if self.thinks and not request.given:  # the response to a given text is a record
            text = scored_text(text, request.until)
        prompt = f"{request.context}{data.SENTINEL}{request.question}"
        arguments = (prompt, self.built.config.generation_kwargs)
        where = (self.name, request.doc_id, 1)
        return Instance("generate_until", doc, arguments, 0, where, resps=[text])

    @functools.cached_property
    def _source(self) -> Callable[[tuple[str, int]], tuple[Request, Doc]]:
        """Reads a request and its document; those of most tasks stay for the next cell."""

        @functools.lru_cache(_PART)
        def source(key: tuple[str, int]) -> tuple[Request, Doc]:
            request = self.requests[self.places[key]]
            return request, self.built.task_docs[request.doc_id]

        return source


# --- rows -----------------------------------------------------------------------------------------


def _rows(
    bench: Benchmark, leaf: str, settings: TaskSettings, render: chat.Render | None
) -> tuple[Sequence[Doc], str]:
    """The rows of a leaf, and their hash."""
    size = _Size(settings.tokenizer, render)
    version = bench.version_of(leaf, settings.lexicon)

    def make(count: int) -> Any:
        return bench.docs(
            leaf,
            length=settings.length,
            samples=count,
            seed=settings.seed,
            tokenizer=settings.tokenizer,
            lexicon=settings.lexicon,
            cache_dir=settings.cache_dir,
            size=size,
        )

    rows: Iterable[Doc]
    if bench.sized:
        # Everything that the rows depend on besides the generator: it names the cached file.
        depends = [
            bench.name,
            leaf,
            version,
            tokenizer_hash(settings.tokenizer),
            settings.length,
            settings.seed,
            settings.lexicon,
            render is not None,
            *([] if settings.thinking is None else [settings.thinking]),
        ]
        name = f"{leaf}-{data.digest(depends)}.jsonl"
        file = settings.cache_dir / "data" / bench.name / name
        code = data.code_digest(_function(bench.docs).__module__)
        rows = generated = data.cached(file, settings.samples, make, code)
        first = media.identity(generated[0]) if bench.media else generated[0]
        data_hash = data.digest([*depends, first])
    else:
        given = make(settings.samples)
        content: Sequence[Doc] = given
        if isinstance(given, Path):
            content = Spool(row for _, row in data.read_rows(given))
        rows = islice(content, settings.samples)
        data_hash = data.digest_rows(version, media.identity(content) if bench.media else content)
    full: list[Doc] | Spool[Doc] = [] if bench.media else Spool()
    for i, row in enumerate(rows):
        complete = dialogue.complete if dialogue.is_dialogue(row) else data.complete
        full.append(complete(row, f"{leaf}, row {i}"))
        if data.has_media(row) and not bench.media:
            raise UserError(
                f"{leaf}: its rows have media, so benchmark {bench.name} must set media"
            )
    return full, data_hash


def _function(docs: Any) -> Any:
    """The function behind a hook that may have arguments bound to it."""
    return _function(docs.func) if isinstance(docs, functools.partial) else docs


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
        """Tokens of the prompt of the last turn."""
        return count_tokens(self.tokenizer, dialogue.last_prompt(row, self.render))


# --- lm-eval's task -------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence lm-eval and datasets, and preserve the global generator, which lm-eval uses."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    loggers = map(logging.getLogger, ("lm_eval", "lm-eval", "datasets"))
    # A change of level goes through all loggers there are, which cost as much as the metric.
    levels = [(logger, logger.level) for logger in loggers if logger.level != logging.ERROR]
    bars = datasets.utils.are_progress_bars_disabled()
    for logger, _ in levels:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
        for logger, level in levels:
            logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


def _build(bench: Benchmark, leaf: str, rows: Sequence[Doc], settings: TaskSettings) -> Any:
    """Build the lm-eval task from the benchmark's YAML and our rows."""
    path, config = loading.yaml_of(bench, leaf)
    # The YAML needs none of these. The fields of `extra` differ from row to row; Arrow would add
    # nulls.
    unseen = ("extra", "shots", "media")
    split = config.get("test_split") or "test"
    table = _table(rows, unseen)
    asks = config.get("doc_to_text")
    if isinstance(asks, str) and asks not in table.column_names and "doc_to_choice" not in config:
        config["doc_to_text"] = _template(asks)
    config |= {
        "task": leaf,
        "test_split": split,
        "custom_dataset": lambda **_: {split: table},
        "metadata": {"version": bench.version_of(leaf, settings.lexicon)},
    }
    built = TaskManager(include_defaults=False).load([config])["tasks"][leaf]
    if built.OUTPUT_TYPE != "generate_until":
        raise UserError(f"{path}: output_type must be generate_until, not {built.OUTPUT_TYPE}")
    built.set_fewshot_seed(settings.seed)
    return built


def _table(rows: Iterable[Doc], unseen: Collection[str]) -> datasets.Dataset:
    """Rows without some fields, as lm-eval takes them.

    Many are converted in parts, unless these would get columns of different types.
    """
    seen = ({k: v for k, v in row.items() if k not in unseen} for row in rows)
    parts = []
    while part := [*islice(seen, _ROWS)]:
        parts.append(datasets.Dataset.from_list(part))
    if all(part.features == parts[0].features for part in parts):
        return datasets.concatenate_datasets(parts)
    return datasets.Dataset.from_list(
        [{k: v for k, v in row.items() if k not in unseen} for row in rows]
    )


def _template(text: str) -> Callable[[Doc], str]:
    """The template as lm-eval renders it, compiled once instead of once per row."""
    compiled = env.from_string(text)
    return lambda row: compiled.render(**row)


def _loaded(
    bench: Benchmark,
    leaf: str,
    settings: TaskSettings,
    data_hash: str,
    built: Any,
    rows: Sequence[Doc],
    made: Sequence[Request],
) -> LmEvalTask:
    metric, _, wanted = bench.metric.partition(",")
    known = list(built.aggregation())
    if metric not in known:
        raise UserError(f"{bench.name}: its YAML has no metric {metric!r}; it has {known}")
    filters = [f.name for f in built._filters]
    return LmEvalTask(
        **loading.facts(bench, leaf, settings, rows[0].get("variant", "")),
        data_hash=data_hash,
        metric=metric,
        higher_is_better=bool(built.higher_is_better()[metric]),
        requests=made,
        built=built,
        filter=wanted or filters[0],
        thinks=Thinking.of(settings.tokenizer) is not None,
        ask=bench.ask,
    )
