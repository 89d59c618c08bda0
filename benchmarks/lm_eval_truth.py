"""Does `kvbench run` score as lm-eval does? `python -m benchmarks.lm_eval_truth --help`.

Tasks of lm-eval are evaluated twice on the same weights, in float32, with the full cache: by `lm_eval.simple_evaluate`
with lm-eval's own model class `HFLM`, and by `kvbench.run`. Compared are the log-likelihood of every request and
whether greedy decoding would produce it, every answer, and every metric of every filter, for each document, task and
group.

The rows are made up (`benchmarks/lm_eval_rows.py`); YAML, prompts, filters and metrics are those of the installed
lm-eval. Each evaluation reads its rows from a folder of its own, so that neither side sees what `datasets` has cached
for the other. The cases are in `benchmarks/lm_eval_cases.py`.

The exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import os
import platform
import shutil
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import groupby
from numbers import Real
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import numpy as np
import pandas as pd
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import kvbench
import kvbench.reference
from benchmarks.lm_eval_cases import CASES, CHAT, SHORT, TASKS, Case
from benchmarks.lm_eval_rows import replaced_hub
from kvbench.engine.loading import load_model, load_tokenizer
from kvbench.harness import catalogue
from kvbench.harness.named_tasks import index
from kvbench.harness.protocol import NO_FILTER

PAGE = Path(__file__).parents[1] / "docs" / "lm_eval_truth.md"
WINDOW = 256
"""Tokens that the model `SHORT` can take."""
TEMPLATE = (
    "{% for message in messages %}{{ 'begin ' + message['role'] + ' : ' + message['content'] | trim + ' end\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'begin assistant :\n' }}{% endif %}"
)
"""Chat template of the model `CHAT`. It strips messages, as many templates do."""
ABSOLUTE, RELATIVE = 1e-4, 1e-6
"""Tolerance of a log-likelihood. The relative one is for whole texts: float32 has no more than seven digits."""
METRIC = 1e-4
"""Tolerance of a metric, relative above 1: perplexities and differences inherit those of log-likelihoods."""

Response = list[Any]
"""One document's response: an entry for each request, `[log-likelihood, greedy]`, or a list of one text per repeat."""


@dataclass
class Outcome:
    """What one side found in a case.

    Attributes:
        responses: Response of each document, by task and index of the document.
        values: Value of each document by every metric that gives it a number, by task, index and `metric,filter`.
        metrics: Scores by task or group, metric and filter; the filter is "" if there is none.
        kinds: Output types of the tasks.
        error: Why there are no results, or "".
    """

    responses: dict[str, dict[int, Response]] = field(default_factory=dict)
    values: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)
    metrics: dict[tuple[str, str, str], float] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    error: str = ""


@dataclass
class Comparison:
    """How the two sides differ in a case.

    Attributes:
        case: The case.
        kinds: Output types of its tasks.
        tasks: Number of tasks.
        documents: Number of documents.
        likelihoods: Number of log-likelihoods compared.
        largest: Largest difference of two log-likelihoods.
        texts: Number of answers compared.
        values: Number of values of documents compared.
        metrics: Number of metrics compared.
        differences: What differs, one line each.
    """

    case: Case
    kinds: str = ""
    tasks: int = 0
    documents: int = 0
    likelihoods: int = 0
    largest: float = 0.0
    texts: int = 0
    values: int = 0
    metrics: int = 0
    differences: list[str] = field(default_factory=list)


# --- models ---------------------------------------------------------------------------------------


class Models:
    """The models of both sides.

    Args:
        folder: Where variants of the reference model are stored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lm_eval_models: dict[str, HFLM] = {}

    def spelling(self, name: str) -> str:
        """Return what kvbench's `--model` takes for a model of the cases."""
        if name not in (CHAT, SHORT):
            return name
        target = self.folder / name
        if not target.exists():
            shutil.copytree(kvbench.reference.path(), target)
            if name == CHAT:
                (target / "chat_template.jinja").write_text(TEMPLATE)
            else:
                config = json.loads((target / "config.json").read_text())
                (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": WINDOW}))
        return str(target)

    def of_lm_eval(self, name: str) -> HFLM:
        """Return lm-eval's model class on the same weights."""
        if name not in self._lm_eval_models:
            spelling = self.spelling(name)
            model = load_model(spelling, None, torch.device("cpu"), torch.float32)
            # In float32, the log-softmax of a large vocabulary is off by up to 1e-5 per token, always to the same side.
            self._lm_eval_models[name] = HFLM(
                pretrained=model, tokenizer=load_tokenizer(spelling), batch_size=1, softmax_dtype="float64"
            )
        return self._lm_eval_models[name]


# --- both sides -----------------------------------------------------------------------------------


@functools.cache
def task_manager() -> TaskManager:
    """Return lm-eval's index of tasks, which takes seconds to build."""
    return TaskManager(include_path=str(TASKS))


@contextmanager
def _as_in_a_new_process(folder: Path) -> Iterator[None]:
    """Serve made-up rows from a folder, to tasks whose modules are imported anew: some keep a generator."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("lm_eval.tasks.") and hasattr(module, "__mtime__"):  # lm-eval sets it for tasks alone
            del sys.modules[name]
    with replaced_hub(folder):
        yield


def evaluated_by_lm_eval(case: Case, models: Models, folder: Path) -> Outcome:
    """Evaluate a case with lm-eval.

    Args:
        case: The case.
        models: The models.
        folder: An empty folder for the rows.
    """
    with _as_in_a_new_process(folder):
        found = lm_eval.simple_evaluate(
            models.of_lm_eval(case.model),
            tasks=[case.task],
            num_fewshot=case.num_fewshot,
            limit=case.samples,
            bootstrap_iters=0,
            apply_chat_template=case.apply_chat_template,
            fewshot_as_multiturn=case.fewshot_as_multiturn,
            system_instruction=case.system_instruction,
            gen_kwargs=case.gen_kwargs,
            task_manager=task_manager(),
        )
    outcome = Outcome(kinds={str(config.get("output_type")) for config in found["configs"].values()})
    for task, samples in found["samples"].items():
        # Every filter repeats the responses.
        outcome.responses[task] = {sample["doc_id"]: [_plain(entry) for entry in sample["resps"]] for sample in samples}
        outcome.values[task] = defaultdict(dict)
        for sample in samples:
            names = {name: ",".join(_metric_and_filter(f"{name},{sample['filter']}")) for name in sample["metrics"]}
            outcome.values[task][sample["doc_id"]] |= _numbers({names[name]: sample[name] for name in names})
    outcome.metrics = {
        (task, *_metric_and_filter(name)): float(score)
        for task, row in found["results"].items()
        for name, score in row.items()
        if "," in name and "_stderr" not in name and not isinstance(score, str)
    }
    return outcome


def _metric_and_filter(name: str) -> tuple[str, str]:
    """Return metric and filter of lm-eval's `metric,filter`; kvbench leaves its filter `none` empty."""
    metric, _, filter_name = name.partition(",")
    return metric, "" if filter_name in ("", NO_FILTER) else filter_name


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers or truth values."""
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, Real | np.bool_)}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _plain(entry: Sequence[Any]) -> list[Any]:
    """Return the responses to one request of lm-eval: `[log-likelihood, greedy]`, or its texts."""
    first = entry[0]
    if isinstance(first, str):
        return [*entry]
    return [float(first[0]), bool(first[1])] if isinstance(first, tuple | list) else [float(first), None]


def evaluated_by_kvbench(cases: Sequence[Case], models: Models, folder: Path) -> dict[str, Outcome]:
    """Evaluate cases of equal settings in one run with the full cache; return what it found by task or group.

    Args:
        cases: The cases.
        models: The models.
        folder: An empty folder for the rows and the run.
    """
    settings = cases[0]
    grid = {
        "policies": ["full"],
        "tasks": [_spelling(case.task) for case in cases],
        "models": [models.spelling(settings.model)],
        "samples": settings.samples,
        "num_fewshot": settings.num_fewshot,
        "system_instruction": settings.system_instruction,
        "gen_kwargs": settings.gen_kwargs,
        "include_path": [str(TASKS)],
        "device": "cpu",
        "dtype": "float32",
        "out": str(folder / "run"),
    }
    if settings.apply_chat_template:
        grid |= {"apply_chat_template": True, "fewshot_as_multiturn": settings.fewshot_as_multiturn}
    with _as_in_a_new_process(folder / "rows"):
        kvbench.run({key: value for key, value in grid.items() if value is not None}, progress=False)
    return _read(folder / "run")


def _spelling(task: str) -> str:
    """Return what kvbench's `--task` takes for a task of lm-eval; kvbench has others of some names."""
    benchmarks = catalogue.benchmarks()[0]
    taken = task in benchmarks or any(task in (*entry.leaves, *entry.subsets) for entry in benchmarks.values())
    return f"{index.PREFIX}{task}" if taken else task


def _read(run: Path) -> dict[str, Outcome]:
    """Return the responses and metrics of a run by task or group."""
    columns = ["task", "sample_id", "repeat", "response", "score", "metrics"]
    samples = pd.read_parquet(run / "samples.parquet", columns=columns)
    outcomes: dict[str, Outcome] = defaultdict(Outcome)
    table = pd.read_parquet(run / "metrics.parquet", columns=["task", "metric", "filter", "score"])
    for row in table.itertuples():
        outcomes[row.task].metrics[row.task, row.metric, row.filter] = float(row.score)
    for (task, sample_id), rows in samples.sort_values("repeat").groupby(["task", "sample_id"], sort=False):
        outcome, doc_id = outcomes[task], int(sample_id)
        outcome.responses.setdefault(task, {})[doc_id] = _parsed([*rows["response"]])
        first = rows.iloc[0]
        if first["metrics"]:
            values = {",".join(_metric_and_filter(name)): value for name, value in json.loads(first["metrics"]).items()}
        else:  # the only metric
            values = {f"{metric},{filter_name}": first["score"] for _, metric, filter_name in outcome.metrics}
        outcome.values.setdefault(task, {})[doc_id] = _numbers(values)
    return outcomes


def _parsed(texts: Sequence[str]) -> Response:
    """Return a response of kvbench in the form of lm-eval's."""
    try:
        measured = json.loads(texts[0])
        return [[*pair] for pair in zip(measured["loglikelihood"], measured["greedy"], strict=True)]
    except (ValueError, KeyError, TypeError):
        return [[*texts]]


# --- comparison -----------------------------------------------------------------------------------


def compared(case: Case, theirs: Outcome, ours: Mapping[str, Outcome]) -> Comparison:
    """Compare what lm-eval and kvbench found in a case."""
    found = Comparison(case, ", ".join(sorted(theirs.kinds)), len(theirs.responses))
    if theirs.error:
        found.differences.append(f"lm-eval: {theirs.error}")
    for task, responses in theirs.responses.items():
        other = ours[task].responses.get(task, {}) if task in ours else {}
        if responses.keys() != other.keys():
            found.differences.append(f"{task}: documents {sorted(responses)}, kvbench {sorted(other)}")
        for doc_id in sorted(responses.keys() & other.keys()):
            found.documents += 1
            where = f"{task}, document {doc_id}"
            if len(responses[doc_id]) != len(other[doc_id]):
                found.differences.append(f"{where}: {len(responses[doc_id])} requests, kvbench {len(other[doc_id])}")
                continue
            for position, (entry, own) in enumerate(zip(responses[doc_id], other[doc_id], strict=True)):
                _compare_entry(found, f"{where}, request {position}", entry, own)
            _compare_values(found, where, theirs.values[task][doc_id], ours[task].values[task][doc_id])
    for key, score in theirs.metrics.items():
        found.metrics += 1
        own_score = ours[key[0]].metrics.get(key) if key[0] in ours else None
        if own_score is None or not _same_metric(score, own_score):
            found.differences.append(f"{' '.join(filter(None, key))}: {score!r}, kvbench {own_score!r}")
    for task in {key[0] for key in theirs.metrics} & ours.keys():
        for key in ours[task].metrics.keys() - theirs.metrics.keys():
            found.differences.append(f"{' '.join(filter(None, key))}: only kvbench has it")
    return found


def _compare_entry(found: Comparison, where: str, theirs: list[Any], ours: list[Any]) -> None:
    """Compare the responses to one request."""
    if isinstance(theirs[0], str):
        # Greedy answers are equal, so kvbench generates only one of them.
        texts = ours * len(theirs) if len(ours) == 1 else ours
        found.texts += len(theirs)
        if theirs != texts:
            found.differences.append(f"{where}: {theirs!r}, kvbench {ours!r}")
        return
    found.likelihoods += 1
    if isinstance(ours[0], str):
        found.differences.append(f"{where}: log-likelihood {theirs[0]!r}, kvbench {ours!r}")
        return
    difference = abs(theirs[0] - ours[0])
    found.largest = max(found.largest, difference)
    if not difference <= max(ABSOLUTE, RELATIVE * abs(theirs[0])):
        found.differences.append(f"{where}: log-likelihood {theirs[0]!r}, kvbench {ours[0]!r}")
    if theirs[1] is not None and theirs[1] != ours[1]:
        found.differences.append(f"{where}: greedy {theirs[1]}, kvbench {ours[1]}")


def _compare_values(found: Comparison, where: str, theirs: Mapping[str, float], ours: Mapping[str, float]) -> None:
    """Compare the values of a document by all metrics."""
    for name in sorted(theirs.keys() | ours.keys()):
        found.values += 1
        if name not in theirs or name not in ours or not _same_metric(theirs[name], ours[name]):
            label = name.removesuffix(",")
            found.differences.append(f"{where}, {label}: {theirs.get(name)!r}, kvbench {ours.get(name)!r}")


def _same_metric(first: float, second: float) -> bool:
    both_missing = math.isnan(first) and math.isnan(second)
    return both_missing or math.isclose(first, second, rel_tol=METRIC, abs_tol=METRIC)


def comparisons(cases: Iterable[Case], models: Models) -> Iterator[Comparison]:
    """Evaluate cases on both sides and compare them; those of equal settings are one run of kvbench."""
    ordered = sorted(cases, key=lambda case: repr(_settings(case)))
    for _, members in groupby(ordered, key=_settings):
        group = [*members]
        ours, errors = _evaluated(group, models)
        for case in group:
            with tempfile.TemporaryDirectory() as folder:
                theirs = evaluated_by_lm_eval(case, models, Path(folder))
            comparison = compared(case, theirs, ours)
            comparison.differences[:0] = errors.get(case.task, [])
            yield comparison


def _settings(case: Case) -> dict[str, Any]:
    """Return everything of a case but its task."""
    return {key: value for key, value in asdict(case).items() if key != "task"}


def _evaluated(cases: Sequence[Case], models: Models) -> tuple[dict[str, Outcome], dict[str, list[str]]]:
    """Evaluate cases of equal settings with kvbench.

    If their run fails, each case gets a run of its own.

    Returns:
        What the runs found by task or group; and why runs failed, by task of the case.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            return evaluated_by_kvbench(cases, models, Path(folder)), {}
        except Exception as error:  # a difference like any other
            reason = f"{cases[0].task}: kvbench fails: {type(error).__name__}: {error}"
    if len(cases) == 1:
        return {}, {cases[0].task: [reason]}
    outcomes: dict[str, Outcome] = {}
    errors: dict[str, list[str]] = {}
    for case in cases:
        case_outcomes, case_errors = _evaluated([case], models)
        outcomes |= case_outcomes
        errors |= case_errors
    return outcomes, errors


# --- output ---------------------------------------------------------------------------------------


def line(found: Comparison) -> str:
    """Return a row of the table."""
    likelihoods = f"{found.likelihoods} within {found.largest:.0e}" if found.likelihoods else ""
    differ = len(found.differences)
    values = [
        f"`{found.case.task}`" + (f" ({found.tasks} tasks)" if found.tasks > 1 else ""),
        found.kinds,
        found.case.settings,
        found.case.model,
        str(found.documents),
        likelihoods,
        str(found.texts or ""),
        str(found.metrics),
        f"**{differ} differ**" if differ else "equal",
    ]
    return f"| {' | '.join(values)} |"


HEAD = (
    "| task | output type | settings | model | documents | log-likelihoods | answers | metrics | all |\n"
    "| --- | --- | --- | --- | --: | --: | --: | --: | --- |"
)


def summary(found: Sequence[Comparison]) -> str:
    """Return the sums of all cases in one sentence, with the machine."""
    names = {comparison.case.task for comparison in found}
    differing = sum(bool(comparison.differences) for comparison in found)
    counts = {
        name: sum(getattr(comparison, name) for comparison in found)
        for name in ("documents", "likelihoods", "texts", "values", "metrics")
    }
    packages = ", ".join(f"{name} {version(name)}" for name in ("kvbench", "lm-eval", "transformers", "torch"))
    return (
        f"{len(found)} cases of {len(names)} tasks and groups: {counts['documents']} documents, "
        f"{counts['likelihoods']} log-likelihoods, {counts['texts']} answers, "
        f"{counts['values']} values of documents, {counts['metrics']} metrics; "
        f"{differing or 'none'} of the cases {'differs' if differing == 1 else 'differ'}. "
        f"The largest difference of two log-likelihoods is {max(comparison.largest for comparison in found):.0e}. "
        f"({packages}; float32, one core of {processor()})"
    )


def processor() -> str:
    """Return the name of the processor."""
    with open("/proc/cpuinfo", encoding="utf-8") if os.path.exists("/proc/cpuinfo") else open(os.devnull) as file:
        names = [entry.partition(":")[2].strip() for entry in file if entry.startswith("model name")]
    return names[0] if names else platform.machine()


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the notes and most progress bars of lm-eval and datasets."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.disable(previous_level)
        datasets.enable_progress_bars()


def page(found: Sequence[Comparison]) -> str:
    """Return the page of the docs."""
    paragraphs = [*INTRODUCTION.strip().split("\n\n"), summary(found)]
    wrapped = (textwrap.fill(text, 120, break_on_hyphens=False, break_long_words=False) for text in paragraphs)
    return "\n\n".join([*wrapped, "\n".join([HEAD, *map(line, found)])]) + "\n"


INTRODUCTION = f"""# Agreement with lm-eval

With the full cache, `kvbench run` gives the scores of lm-eval. `python -m benchmarks.lm_eval_truth --write` evaluates
the tasks below on the same weights with `lm_eval.simple_evaluate`, through lm-eval's own model class `HFLM`, and with
`kvbench.run`, and writes this page. It compares the log-likelihood of every request (within {ABSOLUTE:.0e}, or within
{RELATIVE:.0e} of the value for long texts), whether greedy decoding would produce it, every answer, and every metric of
every filter, for each document, task and group.

YAML, prompts, filters and metrics are those of the installed lm-eval. The rows are made up, in the schemas of the data
sets. `{CHAT}` is the reference model with a chat template, and `{SHORT}` the reference model with a window of {WINDOW}
tokens, in which whole texts take several windows. The tasks that begin with `made_up` are in
`benchmarks/lm_eval_tasks`. They have what no task of lm-eval 0.4.13 combines: unconditional likelihoods, repeats of
greedy answers, answers without stop strings, metrics of a corpus, and a group that changes the settings of its tasks.

Not compared are sampled answers, whose random numbers differ, and tasks that lm-eval itself cannot evaluate with the
packages of kvbench: `ifeval`, `coqa` and `record` import what is not installed, and the group `openllm` exceeds
Python's recursion limit.

lm-eval's log-softmax runs in float64 here (`softmax_dtype` of `HFLM`). In float32, as is its default, it is off by up
to 1e-5 per token for a vocabulary of 49,152, always to the same side, which adds up to 1e-4 over the tokens of a
choice.
"""


def main(arguments: Collection[str] | None = None) -> int:
    """Compare both sides case by case."""
    parser = argparse.ArgumentParser(description="Compare scores of kvbench and lm-eval.")
    parser.add_argument("--only", help="tasks, groups or models, comma-separated")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parsed = parser.parse_args(None if arguments is None else [*arguments])
    chosen = parsed.only.split(",") if parsed.only else []
    cases = [case for case in CASES if not chosen or {case.task, case.model} & {*chosen}]
    if not cases:
        parser.error(f"no case has {parsed.only!r}; see benchmarks/lm_eval_cases.py")
    torch.set_num_threads(1)
    found = []
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory() as folder, quiet():
        for comparison in comparisons(cases, Models(Path(folder))):
            found.append(comparison)
            print(line(comparison), flush=True)
    print(f"\n{summary(found)}")
    for comparison in found:
        for difference in comparison.differences:
            print(f"{comparison.case.model}, {comparison.case.settings}: {difference}")
    if parsed.write:
        PAGE.write_text(page(found), encoding="utf-8")
    return int(any(comparison.differences for comparison in found))


if __name__ == "__main__":
    sys.exit(main())
