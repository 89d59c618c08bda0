"""Harness of lm-eval's tasks by name: lm-eval's prompts, data, filters and metrics, on kvbench's caches.

A task is built as `lm_eval.simple_evaluate` does. Its requests of all four output types go to the runner; the answers
then go through the task's own filters, `process_results` and aggregation.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean

from kvbench.benchmark import Benchmark, Marks
from kvbench.data.spool import Spool
from kvbench.decoding import Thinking, from_yaml, scored_text
from kvbench.errors import LeftOut, UserError, reason_of, unknown
from kvbench.harness import chat, loading
from kvbench.harness import rows as data
from kvbench.harness.lm_eval import quiet
from kvbench.harness.named_tasks.benchmarks import HARNESS, NamedBenchmark
from kvbench.harness.named_tasks.building import GENERATE, configure, load_task, seeded
from kvbench.harness.named_tasks.generation import generation_settings
from kvbench.harness.named_tasks.prompts import DOCUMENT, FEWSHOT, PromptBuilder, Rendered, context_ends
from kvbench.harness.protocol import (
    NO_FILTER,
    Continuation,
    HarnessFlags,
    Key,
    LoadedTask,
    MetricScores,
    Request,
    TaskSettings,
    kept,
)
from kvbench.progress import Late

_NUMBERS = (int, float, np.number, np.bool_)

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""What Python writes for objects without a text of their own: their place in memory."""

_MULTIPLE, _ROLLING = "loglikelihood", "loglikelihood_rolling"
"""Kinds of requests besides answers; multiple choice consists of log-likelihoods."""


class NamedTaskHarness:
    """Loads tasks of lm-eval by their names."""

    name = HARNESS

    def load(self, task: str, settings: TaskSettings, benchmark: Benchmark | None = None) -> NamedTask:
        """Load a task; see `Harness.load`.

        Raises:
            LeftOut: A package that the task needs is not installed.
        """
        task_name, resolved = loading.find(task, benchmark)
        assert isinstance(resolved, NamedBenchmark)
        flags = settings.flags
        with seeded(settings.seed), quiet():
            built = load_task(resolved, task_name, settings)
            configure(built, task_name, flags, settings.seed)
            documents: Spool[Any] = Spool()
            data_hash = _read(built, settings.samples, documents)
            builder = PromptBuilder(built, _renderer(settings), flags)
            prompts, instances = _prompts(builder, task_name, documents, settings)
            is_rolling = built.OUTPUT_TYPE == _ROLLING
            rule, ends, reason = (
                ("", [0] * len(documents), "") if is_rolling else context_ends(builder, documents, prompts)
            )
            kinds = {entry.request_type for document_instances in instances for entry in document_instances}
            if len(kinds) > 1:
                raise LeftOut(
                    "it makes requests of several kinds for each document, which kvbench run cannot answer; "
                    f"use `kvbench lm-eval run --model kvbench --tasks {task_name}`"
                )
            requests = kept(
                _request(task_name, built, index, documents[index], ends[index], instances[index], rule)
                for index in _neighbours(prompts, ends)
            )
        refused = {"context": f"{reason}; {_advice(flags)}"} if reason else {}
        if not is_rolling and not any(ends):
            empty = f"{task_name} has empty prompts, so there is nothing to compress before its answers"
            refused = dict.fromkeys(("context", "question", "chunked"), f"{empty}; use --moment decode")
        metric = next(iter(built.aggregation()), "")
        higher_is_better = bool(built.higher_is_better().get(metric, True))
        chance = _chance(built, metric, documents) if higher_is_better else math.inf
        return NamedTask(
            **loading.facts(resolved, task_name, settings) | {"version": str(built.VERSION), "chance": chance},
            data_hash=data_hash,
            metric=metric,
            higher_is_better=higher_is_better,
            requests=requests,
            groups=tuple(group for group in resolved.groups if task_name in group.tasks),
            recorded={"context": rule, **_flags(flags, builder)} if rule else _flags(flags, builder),
            notes=_notes(task_name, rule, prompts, ends),
            refused=refused,
            built=built,
            documents=documents,
            thinks=Thinking.of(settings.tokenizer) is not None,
        )


@dataclass(frozen=True, eq=False)
class NamedTask(LoadedTask):
    """A task of lm-eval. See `LoadedTask`.

    Attributes:
        built: The task object of lm-eval.
        documents: Its documents, by `Request.doc_id`. Some tasks shuffle them whenever they are read.
        thinks: Whether the model can think; only the text after the thinking is scored.
    """

    built: Any = None
    documents: Sequence[Any] = ()
    thinks: bool = False

    def score_metrics(self, responses: Mapping[Key, str], marks: Sequence[Marks] | None = None) -> list[MetricScores]:
        """Score responses by all metrics and filters of the task; see `LoadedTask.score_metrics`."""
        by_document: dict[int, dict[Key, str]] = defaultdict(dict)
        for key, response in responses.items():
            by_document[self._doc_ids[self.places[key[:2]]]][key] = response
        values: dict[tuple[str, str], dict[Key, Any]] = defaultdict(dict)
        with quiet(), seeded(0):
            for doc_id in sorted(by_document):
                first_key = min(by_document[doc_id])
                for name, value in self._scored(doc_id, by_document[doc_id]).items():
                    values[name][first_key] = value
            metrics = [self._metric(*name, found) for name, found in values.items()]
        return sorted(metrics, key=lambda entry: entry.name != self.metric)

    @functools.cached_property
    def _doc_ids(self) -> Sequence[int]:
        """Return the document of each request."""
        return array("Q", (request.doc_id for request in self.requests))

    def _scored(self, doc_id: int, responses: Mapping[Key, str]) -> dict[tuple[str, str], Any]:
        """Return the value of every metric and filter for one document."""
        request = self.requests[self.places[min(responses)[:2]]]
        document = self.documents[doc_id]
        instances = self._instances(request, document, [responses[key] for key in sorted(responses)])
        self.built._instances = instances
        try:
            self.built.apply_filters()
        finally:
            self.built._instances = []
        values = {}
        for filter_name in instances[0].filtered_resps:
            results = [instance.filtered_resps[filter_name] for instance in instances]
            for name, value in self.built.process_results(document, results).items():
                values[name, filter_name] = value
        return values

    def _instances(self, request: Request, document: Any, responses: Sequence[str]) -> list[Any]:
        """Return lm-eval's instances of a document, with the responses to its request, one per repeat."""
        identity = (self.name, request.doc_id, request.repeats)
        if not request.measures:
            texts = [scored_text(text, request.until) if self.thinks else text for text in responses]
            if len(texts) == 1:  # greedy answers are given once, however often lm-eval repeats them
                texts *= int(self.built.config.repeats or 1)
            return [Instance(GENERATE, document, (), 0, identity, resps=texts)]
        measured = json.loads(responses[0])
        if request.rolling:
            return [Instance(_ROLLING, document, (), 0, identity, resps=[measured["loglikelihood"][0]])]
        pairs = zip(measured["loglikelihood"], measured["greedy"], strict=True)
        return [Instance(_MULTIPLE, document, (), index, identity, resps=[pair]) for index, pair in enumerate(pairs)]

    def _metric(self, name: str, filter_name: str, values: Mapping[Key, Any]) -> MetricScores:
        """Return a metric's values with their aggregate."""
        aggregate = self.built.aggregation().get(name, mean)
        is_mean = aggregate is mean and all(isinstance(value, _NUMBERS) for value in values.values())
        if is_mean:
            values = {key: float(value) for key, value in values.items()}
        try:
            score = float(aggregate([*values.values()]))
        except Exception:  # a metric is third-party code, and only the task's own may not fail
            if name == self.metric:
                raise
            score = math.nan
        return MetricScores(
            name=name,
            filter="" if filter_name == NO_FILTER else filter_name,
            higher_is_better=bool(self.built.higher_is_better().get(name, True)),
            values=values,
            score=score,
            aggregate=None if is_mean else aggregate,
        )


# --- flags -----------------------------------------------------------------------------------------


def _notes(task_name: str, rule: str, prompts: Sequence[Sequence[Rendered]], ends: Sequence[int]) -> tuple[str, ...]:
    """Return what the user should know about the contexts of a task."""
    if rule != FEWSHOT or len(prompts) == 1:
        return ()
    contexts = {data.digest(rendered[0].text[:end]) for rendered, end in zip(prompts, ends, strict=True)}
    if len(contexts) == 1:
        return ()
    return (
        f"{task_name}: its {len(prompts)} documents have {len(contexts)} different contexts, because lm-eval draws "
        "examples for each of them; with `sampler: first_n` in the YAML they would share one prefill",
    )


def _flags(flags: HarnessFlags, builder: PromptBuilder) -> dict[str, Any]:
    """Return the flags that shaped the prompts and answers, for the results."""
    used: dict[str, Any] = {"num_fewshot": builder.shots}
    if builder.render is not None:
        used |= {"apply_chat_template": flags.apply_chat_template or "default"}
        used |= {"fewshot_as_multiturn": builder.multiturn} if builder.shots else {}
    if flags.gen_kwargs and builder.task.OUTPUT_TYPE == GENERATE:
        used["gen_kwargs"] = dict(flags.gen_kwargs)
    for name in ("system_instruction", "context_field"):
        if (value := getattr(flags, name)) is not None:
            used[name] = value
    return used


def _renderer(settings: TaskSettings) -> chat.Render | None:
    """Return the chat template that the flags choose.

    Raises:
        UserError: The tokenizer has no such template.
    """
    chosen = settings.flags.apply_chat_template
    if not settings.chat_template:
        return None
    template = None
    if chosen not in (None, "default"):
        templates = settings.tokenizer.chat_template
        known = [*templates] if isinstance(templates, dict) else ["default"]
        if chosen not in known:
            raise unknown("chat template", chosen, known)
        template = templates[chosen]
    render = partial(
        chat.chat, settings.tokenizer, settings.tokenizer_id, thinking=settings.thinking, template=template
    )

    def without_system(messages: list[chat.Message], **options: Any) -> str:
        try:
            return render(messages, **options)
        except UserError:  # lm-eval drops the system message if a template does not take one
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise
            return render(others, **options)

    return without_system


def _read(built: Any, samples: int, documents: Spool[Any]) -> str:
    """Keep the first documents of a task; return the hash of all of them and of its configuration."""
    content = hashlib.sha256(json.dumps(_configuration(built), sort_keys=True, default=_plain).encode())
    for index, document in enumerate(built.eval_docs):
        content.update(json.dumps(document, sort_keys=True, default=_plain).encode())
        if index < samples:
            documents.append(document)
    return content.hexdigest()[:16]


def _plain(value: Any) -> str:
    """Return a text for a value that JSON lacks, the same in every process."""
    text = repr(value)
    return f"{type(value).__qualname__} {getattr(value, '__qualname__', '')}" if _ADDRESS.search(text) else text


def _configuration(built: Any) -> dict[str, Any]:
    """Return the configuration of a task without what depends on the machine."""
    config = dict(built.dump_config())
    for key in ("dataset_path", "dataset_kwargs", "metadata"):
        config.pop(key, None)
    return {**config, "version": str(built.VERSION)}


# --- requests -------------------------------------------------------------------------------------


def _prompts(
    builder: PromptBuilder, task_name: str, documents: Sequence[Any], settings: TaskSettings
) -> tuple[Sequence[list[Rendered]], Sequence[list[Any]]]:
    """Return the prompts and the instances of lm-eval of every document, in order: examples are drawn anew for each.

    Raises:
        UserError: A document does not fit the YAML.
    """
    prompts: Spool[list[Rendered]] = Spool()
    instances: Spool[list[Any]] = Spool()
    progress = Late(settings.reporter, len(documents), f"{task_name}: building prompts")
    for index, document in enumerate(documents):
        try:
            rendered = [] if builder.task.OUTPUT_TYPE == _ROLLING else builder.prompts(document)
            texts = [entry.text for entry in rendered]
            made = builder.task.construct_requests(
                doc=document,
                ctx=texts[0] if len(texts) == 1 else texts,
                metadata=(task_name, index, builder.task.config.repeats),
                apply_chat_template=builder.render is not None,
                chat_template=builder.render,
            )
        except UserError as error:
            raise UserError(f"{task_name}, document {index}: {error}") from error
        except Exception as error:  # a task is third-party code
            raise UserError(f"{task_name}, document {index}: {reason_of(error)}; mend its YAML or data") from error
        prompts.append(rendered)
        instances.append(
            [_Asked(entry.request_type, entry.args) for entry in (made if isinstance(made, list) else [made])]
        )
        progress.advance()
    progress.stop()
    return prompts, instances


class _Asked(NamedTuple):
    """A request of lm-eval: its kind and arguments."""

    request_type: str
    args: tuple[Any, ...]


def _neighbours(prompts: Sequence[Sequence[Rendered]], ends: Sequence[int]) -> list[int]:
    """Return the documents in an order in which those of one context are neighbours, so that it is prefilled once."""
    by_context: dict[str, list[int]] = {}
    for index, (rendered, end) in enumerate(zip(prompts, ends, strict=True)):
        context = rendered[0].text[:end] if rendered else str(index)
        by_context.setdefault(data.digest(context), []).append(index)
    return [index for members in by_context.values() for index in members]


def _request(
    task_name: str,
    built: Any,
    doc_id: int,
    document: Any,
    end: int,
    asked: Sequence[_Asked],
    rule: str,
) -> Request:
    """Return the request of a document.

    Args:
        end: Where the context of its prompts ends.
        asked: What lm-eval asks about it.
        rule: The rule for the context. Documents that share a passage are one cluster of the statistics; those that
            share examples are independent.
    """
    kind, arguments = asked[0]
    prompt = next((entry.args[0] for entry in asked if entry.args[0]), "")
    context, question = (prompt, "") if kind == _ROLLING else (prompt[:end], prompt[end:])
    shared = Request(
        task=task_name,
        sample_id=str(doc_id),
        doc_id=doc_id,
        question_id=0,
        context_id=data.digest(context if rule == DOCUMENT else [entry.args[0] for entry in asked] + [doc_id]),
        context=context,
        question=question,
        until=(),
        max_new_tokens=1,
        target=_targets(built, document),
        rolling=kind == _ROLLING,
    )
    if kind == _MULTIPLE:
        continuations = tuple(
            Continuation(args[0][end:], args[1], alone=not args[0] and bool(prompt)) for _, args in asked
        )
        return replace(shared, continuations=continuations)
    if kind == _ROLLING:
        return shared
    settings = generation_settings(arguments[1], task_name)
    return replace(
        shared,
        until=tuple(settings["until"]),
        max_new_tokens=settings["max_gen_toks"],
        sampling=from_yaml(settings, task_name),
        repeats=int(built.config.repeats or 1),
    )


def _chance(built: Any, metric: str, documents: Sequence[Any]) -> float:
    """Return the expected score of a random choice; 0 where none is made."""
    if built.OUTPUT_TYPE != "multiple_choice" or not metric.startswith("acc"):
        return 0.0
    return sum(1 / len(built.doc_to_choice(document)) for document in documents) / len(documents)


def _targets(built: Any, document: Any) -> tuple[str, ...]:
    """Return the reference answers of a document, for people to read."""
    target = built.doc_to_target(document)
    choices = built.doc_to_choice(document) if built.config.doc_to_choice is not None else []
    targets = target if isinstance(target, list) else [target]
    return tuple(
        str(choices[entry]) if isinstance(entry, int) and 0 <= entry < len(choices) else str(entry) for entry in targets
    )


def _advice(flags: HarnessFlags) -> str:
    shots = "" if flags.num_fewshot else ", or give examples with --num-fewshot"
    return f"use --moment question, decode or chunked{shots}, or --context prompt"
