"""lmms-eval (0.7.3) as a harness: its own task definitions, on our rows or by their names on its own data.

A benchmark's YAML names a definition of lmms-eval (`definition: mmstar/mmstar.yaml`). It may also have `percent: true`,
if the metric is a percentage there (scores here are from 0 to 1), and `metric`, if the task's metric differs from the
benchmark's. Its other keys override the definition. lmms-eval then neither downloads data nor generates: its functions
build the messages of a prompt and score a response, one row at a time.

A task by its name (`LmmsBenchmark`) is built as lmms-eval builds it, loads its own data, and is scored by all of its
filters, metrics and aggregations.

Chat-style models of lmms-eval apply no stop strings, so none are applied here.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import io
import json
import math
import numbers
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.benchmark import Benchmark, Doc, Marks
from kvbench.data import records
from kvbench.data.sources import hinting
from kvbench.decoding import Thinking, scored_text
from kvbench.errors import LeftOut, UserError, nearest, reason_of
from kvbench.harness import loading
from kvbench.harness import rows as data
from kvbench.harness.lm_eval import quiet as datasets_quiet
from kvbench.harness.lmms_prompts import MediaRows, MediaValue, lmms_requests
from kvbench.harness.lmms_tasks import PREFIX, LmmsBenchmark, read_config, tasks_folder
from kvbench.harness.named_tasks import index
from kvbench.harness.named_tasks.building import on_its_data, seeded
from kvbench.harness.optional import provide_latex2sympy2
from kvbench.harness.protocol import Key, LoadedTask, MetricScores, Request, TaskSettings

_OWN = ("definition", "metric", "percent")
"""Keys of our YAML for kvbench itself; the others override the definition."""

_LOCAL = ("dataset_path", "dataset_kwargs", "metadata")
"""Keys of a configuration that depend on the machine, or do not change the prompts."""

_HUB = ("token", "trust_remote_code")
"""Options of data sets that lmms-eval's YAML sets for people who have logged in."""

_NUMBERS = (numbers.Real, np.bool_)


class LmmsEvalHarness:
    """Loads tasks that lmms-eval defines: on our rows, or by their names on lmms-eval's own data."""

    name = "lmms_eval"

    def load(self, task: str, settings: TaskSettings, benchmark: Benchmark | None = None) -> LmmsEvalTask:
        """Load a task; see `Harness.load`.

        Raises:
            LeftOut: lmms-eval or a package that the task needs is not installed, its data is not available, or kvbench
                cannot answer its prompts.
        """
        task_name, resolved = loading.find(task, benchmark)
        if resolved.judge:
            raise UserError(f"{resolved.name}: only tasks of the harness lm_eval can have a judge")
        if isinstance(resolved, LmmsBenchmark):
            return _named_task(resolved, task_name, settings)
        settings = loading.settle(task_name, resolved, settings)
        with hinting(task_name):
            documents = resolved.docs(
                task_name,
                length=0,
                samples=settings.samples,
                seed=settings.seed,
                tokenizer=settings.tokenizer,
                lexicon=settings.lexicon,
                cache_dir=settings.cache_dir,
                size=None,
            )
        assert isinstance(documents, list)  # documents in lmms-eval's schema; a JSONL file has no images
        rows = documents[: settings.samples]
        with _quiet():
            doc_table = MediaRows(rows, settings.max_frames)
            harness_task, overrides = _build(resolved, task_name, doc_table, settings.lmms_model)
            extra_fields = [row.get("extra", {}) for row in rows]
            prepared = lmms_requests(harness_task, task_name, doc_table, extra_fields, settings)
        if not all(request.media for request in prepared):
            raise UserError(f"{task_name}: a prompt of lmms-eval has neither images nor videos")
        if not harness_task.config.process_results_use_image:
            doc_table.forget_media()
        metric = overrides.get("metric", resolved.metric)
        if metric not in (metric_names := list(harness_task.aggregation())):
            raise UserError(f"{resolved.name}: {task_name} has no metric {metric!r}; it has {metric_names}")
        return LmmsEvalTask(
            **loading.facts(resolved, task_name, settings),
            data_hash=_data_hash(resolved, task_name, settings),
            recorded=_recorded(settings),
            metric=metric,
            higher_is_better=bool(harness_task.higher_is_better()[metric]),
            requests=prepared,
            built=harness_task,
            table=doc_table,
            percent=bool(overrides.get("percent")),
            thinks=Thinking.of(settings.tokenizer) is not None,
        )


def _named_task(benchmark: LmmsBenchmark, task_name: str, settings: TaskSettings) -> NamedLmmsTask:
    """Load a task by its name in lmms-eval; see `LmmsEvalHarness.load`."""
    # Any model can run its prompts, whatever words it knows.
    settings = loading.settle(task_name, replace(benchmark, lexicons=(settings.lexicon,)), settings)
    with seeded(settings.seed), _quiet():
        harness_task = build_named(benchmark, task_name, settings.lmms_model)
        metrics = _metrics(harness_task)
        documents = harness_task.eval_docs
        count = min(settings.samples, len(documents))
        shown = (documents[index] for index in range(count))  # one at a time, because their images are large
        try:
            prepared = lmms_requests(harness_task, task_name, shown, [{}] * count, settings)
        except LeftOut:
            raise
        except UserError as error:
            raise LeftOut(str(error).removeprefix(f"{task_name}: ")) from error
        except Exception as error:  # a task is third-party code
            raise LeftOut(f"a function of lmms-eval fails on its data ({reason_of(error)})") from error
        data_hash = _content_hash(harness_task)
    bare = sum(not request.media for request in prepared)
    refused = f"{task_name}: {bare} of {count} prompts have no images, so no context; use another --moment"
    return NamedLmmsTask(
        **loading.facts(benchmark, task_name, settings) | {"version": str(harness_task.VERSION)},
        data_hash=data_hash,
        recorded=_recorded(settings),
        metric=metrics[0],
        higher_is_better=bool(harness_task.higher_is_better()[metrics[0]]),
        requests=prepared,
        refused={"context": refused} if bare else {},
        groups=tuple(group for group in benchmark.groups if task_name in group.tasks),
        built=harness_task,
        table=harness_task.eval_docs_no_media,
        thinks=Thinking.of(settings.tokenizer) is not None,
    )


@dataclass(frozen=True, eq=False)
class LmmsEvalTask(LoadedTask):
    """A task of lmms-eval with its rows. See `LoadedTask`.

    Attributes:
        built: The task object of lmms-eval.
        table: The rows, by `Request.doc_id`.
        percent: Whether lmms-eval's metric is a percentage; scores here are from 0 to 1.
        thinks: Whether the model can think; only the text after the thinking is scored.
    """

    built: Any = None
    table: Any = None
    percent: bool = False
    thinks: bool = False

    def score_metrics(self, responses: Mapping[Key, str], marks: Sequence[Marks] | None = None) -> list[MetricScores]:
        """Score responses with the task's `process_results`; see `LoadedTask.score_metrics`.

        Every score is the mean over responses, for which an interval exists. lmms-eval's own aggregate is the same, or
        a mean of category means.
        """
        request_indices = self.places
        values_by_metric: dict[str, dict[Key, float]] = {self.metric: {}}
        with _quiet():
            for key, response in responses.items():
                request = self.requests[request_indices[key[:2]]]
                for metric, value in self._values(request, self._answer(request, response)).items():
                    values_by_metric.setdefault(metric, {})[key] = value
        return [
            MetricScores(
                metric,
                "",
                bool(self.built.higher_is_better().get(metric, True)),
                values,
                sum(values.values()) / len(values) if values else math.nan,
            )
            for metric, values in values_by_metric.items()
        ]

    def _values(self, request: Request, response: str) -> dict[str, float]:
        """Return the value of a response by the task's metric, and by each other one that is a number.

        Others are never aggregated, because some of lmms-eval's aggregates write files for submission. `percent` is a
        property of the task's metric; the scale of another one is not known.
        """
        results = self._processed(self.table[request.doc_id], response)
        task_value = results.pop(self.metric)
        number = _number(task_value)
        if number is None:
            number = float(self.built.aggregation()[self.metric]([task_value]))
        if self.percent and not (isinstance(task_value, Mapping) and "score" in task_value):
            number /= 100
        others = {metric: _number(value) for metric, value in results.items()}
        return {self.metric: number, **{metric: other for metric, other in others.items() if other is not None}}

    def _answer(self, request: Request, response: str) -> str:
        """Return the part of a response that is scored."""
        return scored_text(response, request.until) if self.thinks else response

    def _processed(self, document: Doc, result: Any) -> dict[str, Any]:
        """Return what the task's `process_results` says of a response."""
        random.seed(0)  # some definitions choose at random if a response names no option
        # Call the undecorated method, because lmms-eval's wrapper tries five times, two seconds apart.
        process_results = type(self.built).process_results.__wrapped__
        return dict(process_results(self.built, document, [result]))


@dataclass(frozen=True, eq=False)
class NamedLmmsTask(LmmsEvalTask):
    """A task of lmms-eval by its name, scored as lmms-eval scores it. See `LoadedTask`."""

    def score_metrics(self, responses: Mapping[Key, str], marks: Sequence[Marks] | None = None) -> list[MetricScores]:
        """Score responses by all metrics and filters of the task; see `LoadedTask.score_metrics`.

        The repeats of a prompt are one response to lmms-eval, as its filters decide.
        """
        by_question: dict[tuple[str, int], dict[Key, str]] = {}
        for key, response in responses.items():
            by_question.setdefault(key[:2], {})[key] = response
        task_filter = self.built._filters[0].name
        values: dict[tuple[str, str], dict[Key, Any]] = {(self.metric, task_filter): {}}
        aggregations = self.built.aggregation()
        with _quiet():
            asked = [(self.requests[self.places[question_key]], question_key) for question_key in by_question]
            for request, question_key in sorted(asked, key=lambda pair: pair[0].doc_id):  # as lmms-eval aggregates
                answers = by_question[question_key]
                for filter_name, result in self._filtered(request, [answers[key] for key in sorted(answers)]).items():
                    for metric, value in self._scored(request, result).items():
                        if metric in aggregations:
                            values.setdefault((metric, filter_name), {})[min(answers)] = value
        several = len(self.built._filters) > 1
        metrics = [self._metric(metric, name if several else "", found) for (metric, name), found in values.items()]
        return [metrics[0], *(entry for entry in metrics[1:] if entry.values)]

    def _filtered(self, request: Request, responses: Sequence[str]) -> dict[str, Any]:
        """Return the responses to a prompt as each filter of the task passes them on."""
        from lmms_eval.api.instance import Instance

        repeats = int(self.built.config.repeats or 1)
        texts = [self._answer(request, response) for response in responses]
        if len(texts) == 1:  # greedy answers are given once, however often lmms-eval repeats them
            texts *= repeats
        identity = {"task": self.name, "doc_id": request.doc_id, "repeats": repeats}
        instance = Instance("generate_until", (), 0, identity, texts)
        for named_filter in self.built._filters:
            named_filter.apply([instance], [self.table[request.doc_id]])
        return dict(instance.filtered_resps)

    def _scored(self, request: Request, result: Any) -> dict[str, Any]:
        """Return what the task's `process_results` says of a filtered response.

        Raises:
            UserError: It fails.
        """
        try:
            return self._processed(self.table[request.doc_id], result)
        except Exception as error:  # a task is third-party code
            raise UserError(f"{self.name}: lmms-eval cannot score a response ({reason_of(error)})") from error

    def _metric(self, metric: str, filter_name: str, values: Mapping[Key, Any]) -> MetricScores:
        """Return the scores by a metric: lmms-eval's aggregate, or the mean if that would write files.

        Raises:
            UserError: The task's own metric fails.
        """
        from lmms_eval.api.metrics import mean

        function = self.built.aggregation()[metric]
        if _writes_files(function):
            found = {key: _number(value) for key, value in values.items()}
            function, values = mean, {key: number for key, number in found.items() if number is not None}
        is_mean = function is mean and all(isinstance(value, _NUMBERS) for value in values.values())
        aggregate = functools.partial(_aggregated, function)
        score = math.nan
        try:
            score = aggregate([*values.values()]) if values else math.nan
        except Exception as error:  # a task is third-party code
            if metric == self.metric:
                raise UserError(f"{self.name}: lmms-eval's metric {metric} fails ({reason_of(error)})") from error
        return MetricScores(
            metric,
            filter_name,
            bool(self.built.higher_is_better().get(metric, True)),
            {key: float(value) for key, value in values.items()} if is_mean else values,
            score,
            None if is_mean else aggregate,
        )


def _aggregated(function: Callable[[list[Any]], Any], values: Sequence[Any]) -> float:
    """Apply an aggregation of lmms-eval, which may change its input and print tables."""
    with _quiet():
        random.seed(0)
        return float(function(copy.deepcopy([*values])))


def _number(value: Any) -> float | None:
    """Return a value of lmms-eval, or its field `score`, if that is a number."""
    if isinstance(value, Mapping):
        value = value.get("score")
    return float(value) if isinstance(value, _NUMBERS) else None


def _metrics(harness_task: Any) -> list[str]:
    """Return the metrics of a task; first those that kvbench aggregates as lmms-eval does."""
    aggregations = harness_task.aggregation()
    return sorted(aggregations, key=lambda metric: _writes_files(aggregations[metric]))


def _writes_files(aggregation: Callable[..., Any]) -> bool:
    """Return whether an aggregation takes lmms-eval's command line: such functions write files for a submission."""
    return "args" in inspect.signature(aggregation).parameters


def _data_hash(benchmark: Benchmark, task_name: str, settings: TaskSettings) -> str:
    """Hash version and data by the records of the tables, of which few rows are read."""
    stored_records = [records.head(source, settings.cache_dir) for source in benchmark.sources.get(task_name, ())]
    hashes = [record.sha256 for record in stored_records if record is not None]
    return data.digest([task_name, benchmark.version_of(task_name, settings.lexicon), *hashes])


def _content_hash(harness_task: Any) -> str:
    """Hash the configuration of a task and all its documents but their media, which the requests identify."""
    config = {key: value for key, value in vars(harness_task.config).items() if key not in _LOCAL}
    content = hashlib.sha256(json.dumps(config, sort_keys=True, default=_described).encode())
    for document in harness_task.eval_docs_no_media:
        content.update(json.dumps(document, sort_keys=True, default=_described).encode())
    return content.hexdigest()[:16]


def _described(value: Any) -> str:
    """Return a text for a value that JSON does not have, without its address."""
    return str(getattr(value, "__name__", type(value).__name__))


# --- lmms-eval's task -----------------------------------------------------------------------------


def _build(
    benchmark: Benchmark, task_name: str, doc_table: MediaRows, lmms_model: str | None
) -> tuple[Any, dict[str, Any]]:
    """Build the task object of lmms-eval from its definition and our rows.

    Returns:
        The object, and the kvbench keys of our YAML.

    Raises:
        UserError: The YAML names no definition that can run here, or lmms-eval has no such model.
    """
    yaml_path, yaml_config = loading.yaml_of(benchmark, task_name)
    overrides = {key: yaml_config.pop(key) for key in _OWN if key in yaml_config}
    definition = overrides.get("definition")
    if not isinstance(definition, str):
        raise UserError(f"{yaml_path} must name a definition of lmms-eval, such as mme/mme.yaml")
    config = {**_definition(definition), **yaml_config, "task": task_name}
    for key in ("dataset_kwargs", "process_docs"):  # keys that load and change data
        config.pop(key, None)
    split_name = config["test_split"]
    _check_model(lmms_model, config)

    from lmms_eval.api.task import ConfigurableMessagesTask

    class OnOurRows(ConfigurableMessagesTask):  # type: ignore[misc]
        def download(self, dataset_kwargs: Any = None) -> None:
            self.dataset = self.dataset_no_image = {split_name: doc_table}

        @classmethod
        def _visual_to_content(cls, visual: Any) -> dict[str, Any]:
            if isinstance(visual, MediaValue):
                return {"type": visual.medium.kind, "url": visual}
            content: dict[str, Any] = super()._visual_to_content(visual)
            return content

    harness_task = OnOurRows(config=config, model_name=lmms_model)
    if harness_task.OUTPUT_TYPE != "generate_until" or harness_task.config.filter_list:
        raise UserError(f"{definition}: only generate_until without filters can run here")
    return harness_task, overrides


def build_named(benchmark: LmmsBenchmark, task_name: str, lmms_model: str | None = None, *, fresh: bool = False) -> Any:
    """Build the task object of a task by its name, which loads its data.

    Args:
        benchmark: Its benchmark.
        task_name: Name of the task.
        lmms_model: Model of lmms-eval whose prompts are used; None: those for all models.
        fresh: Whether to ask the hub for newer data.

    Raises:
        LeftOut: The data is not available, or kvbench cannot answer the prompts.
        UserError: lmms-eval cannot load the task, or has no such model.
    """
    path = benchmark.definitions[task_name]
    if reason := _unfit(task_name, read_config(path, {})):
        raise LeftOut(reason)
    config = _loaded_definition(path, "pip install it")
    # A token is used where there is one, and remote code never runs.
    data_options = {key: value for key, value in (config.pop("dataset_kwargs", None) or {}).items() if key not in _HUB}
    config |= {"dataset_kwargs": data_options or None}
    _check_model(lmms_model, config)

    from lmms_eval.api.task import ConfigurableMessagesTask

    class OnItsData(ConfigurableMessagesTask):  # type: ignore[misc]
        def download(self, dataset_kwargs: Any = None) -> None:
            # The undecorated method; the other one tries five times, two seconds apart.
            ConfigurableMessagesTask.download.__wrapped__(self, dataset_kwargs)

    data_set = " ".join(filter(None, map(config.get, ("dataset_path", "dataset_name"))))
    with datasets_quiet():
        return on_its_data(
            task_name,
            lambda: OnItsData(config=copy.deepcopy(config), model_name=lmms_model),
            data_set,
            f"{PREFIX}{benchmark.name}",
            fresh=fresh,
            harness="lmms-eval",
        )


def fetch(benchmark: LmmsBenchmark, task_name: str, *, fresh: bool = False) -> str:
    """Load the data of a task into the caches of the hub's clients, and describe it; see `build_named`."""
    with _quiet():
        harness_task = build_named(benchmark, task_name, fresh=fresh)
    source = " ".join(filter(None, [harness_task.DATASET_PATH, harness_task.DATASET_NAME]))
    return f"{len(harness_task.eval_docs)} documents of {source}"


def _check_model(lmms_model: str | None, config: Mapping[str, Any]) -> None:
    """Check that a definition, or lmms-eval, knows a model; tasks without prompts for it have those for all models.

    Raises:
        UserError: Neither knows it.
    """
    if lmms_model is None or isinstance((config.get("lmms_eval_specific_kwargs") or {}).get(lmms_model), Mapping):
        return
    from lmms_eval.models import AVAILABLE_CHAT_TEMPLATE_MODELS, AVAILABLE_SIMPLE_MODELS

    if lmms_model not in (known_models := {*AVAILABLE_SIMPLE_MODELS, *AVAILABLE_CHAT_TEMPLATE_MODELS}):
        raise UserError(f"lmms-eval has no model {lmms_model!r} for --lmms-model{nearest(lmms_model, known_models)}")


def _recorded(settings: TaskSettings) -> dict[str, Any]:
    """Return what the results record of the settings; see `LoadedTask.recorded`."""
    return {} if settings.lmms_model is None else {"lmms_model": settings.lmms_model}


def _unfit(task_name: str, config: Mapping[str, Any]) -> str:
    """Return why kvbench cannot answer the prompts of a task, or ""."""
    if "class" in config:
        return f"a Python class defines it; run it by `kvbench lmms-eval --model kvbench --tasks {task_name}`"
    output_type = config.get("output_type", "generate_until")
    if output_type != "generate_until":
        return f"its output type is {output_type}, and of lmms-eval's tasks kvbench runs those of generate_until"
    if not (config.get("doc_to_visual") or config.get("doc_to_messages")):
        text_task = f"--task {index.PREFIX}{task_name}" if task_name in index.names() else "a task of lm-eval"
        return f"its prompts have no images; use {text_task}"
    return ""


def _definition(definition_name: str) -> dict[str, Any]:
    """Read a definition of lmms-eval, such as `mmstar/mmstar.yaml`; see `_loaded_definition`.

    Raises:
        UserError: There is no such definition.
    """
    folder = tasks_folder()
    if folder is None or not (folder / definition_name).is_file():
        raise UserError(f"lmms-eval has no definition {definition_name}")
    return _loaded_definition(folder / definition_name, "run `make vision`")


def _loaded_definition(path: Path, remedy: str) -> dict[str, Any]:
    """Read a YAML of lmms-eval and import its functions.

    Args:
        path: The file.
        remedy: What to do if a package is missing.

    Raises:
        LeftOut: A package that its functions import is not installed, or they fail at import.
    """
    prepare()
    try:
        import lmms_eval.tasks  # noqa: F401  (registers the metrics)
        from lmms_eval.utils import load_yaml_config

        definition: dict[str, Any] = load_yaml_config(str(path))
    except (Exception, SystemExit) as error:  # its functions are third-party code; some want keys of a judge at import
        if isinstance(error, ImportError) and error.name:
            package = error.name.partition(".")[0]
            raise LeftOut(f"it needs {package}, which is not installed; {remedy}") from None
        raise LeftOut(f"lmms-eval cannot read its definition ({reason_of(error)})") from error
    return definition


def prepare() -> None:
    """Set up what lmms-eval's modules expect at import."""
    from huggingface_hub import constants

    os.environ.setdefault("HF_HOME", constants.HF_HOME)  # the folder of their videos
    provide_latex2sympy2()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence lmms-eval, and preserve the global random state, which it changes."""
    from loguru import logger

    for logger_name in (
        "lmms_eval",
        "utils",
    ):  # a definition's functions are in a module `utils`
        logger.disable(logger_name)
    random_state = random.getstate()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        random.setstate(random_state)
        for logger_name in ("lmms_eval", "utils"):
            logger.enable(logger_name)
