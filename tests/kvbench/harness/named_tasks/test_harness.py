"""With the full cache, scores and measured texts equal lm-eval's own `hf` model on the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import kvbench
from kvbench.errors import LeftOut, UserError
from kvbench.reference import path as reference_path

from .test_prompts import loaded

NAMES = ("own_choice", "own_text", "own_likelihood")


@pytest.fixture(scope="module")
def theirs(own_tasks: Path) -> Any:
    return simple_evaluate(
        model=HFLM(pretrained=str(reference_path()), device="cpu", dtype="float32", batch_size=1),
        tasks=[*NAMES, "own_rolling"],
        task_manager=TaskManager(include_path=str(own_tasks), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
        limit=4,
    )


@pytest.fixture(scope="module")
def run(own_tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> kvbench.Run:
    grid = {
        "task": [*NAMES],
        "policy": "snapkv:window=4,streaming_llm",
        "budget": [0.3],
        "moment": "question",
        "include_path": str(own_tasks),
        "samples": 4,
        "out": str(tmp_path_factory.mktemp("run")),
    }
    return kvbench.run(grid, progress=False)


@pytest.mark.parametrize("name", NAMES)
def test_texts_and_likelihoods_of_the_full_cache_are_those_of_hf(run: kvbench.Run, theirs: Any, name: str) -> None:
    samples = run.samples[(run.samples["task"] == name) & (run.samples["policy"] == "full")].set_index("doc_id")
    filters = sorted({sample["filter"] for sample in theirs["samples"][name]})
    for sample in theirs["samples"][name]:
        if sample["filter"] != filters[0]:
            continue
        response = samples.loc[sample["doc_id"], "response"]
        for position, (resp,) in enumerate(sample["resps"]):
            if isinstance(resp, str):
                assert response == resp
            else:
                measured = json.loads(response)
                assert measured["loglikelihood"][position] == pytest.approx(resp[0], abs=1e-4)
                assert measured["greedy"][position] == resp[1]


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_all_metrics_and_filters_are_those_of_lm_eval(
    own_tasks: Path, run: kvbench.Run, theirs: Any, name: str
) -> None:
    samples = run.samples[(run.samples["task"] == name) & (run.samples["policy"] == "full")]
    keys = zip(samples["sample_id"], samples["question_id"], samples["repeat"], strict=True)
    found = loaded(own_tasks, name, samples=4).score_metrics(dict(zip(keys, samples["response"], strict=True)))
    expected = {key: value for key, value in theirs["results"][name].items() if "," in key and "_stderr" not in key}
    assert {f"{entry.name},{entry.filter or 'none'}": entry.score for entry in found} == pytest.approx(
        expected, rel=1e-4
    )
    cells = run.cells[(run.cells["task"] == name) & (run.cells["policy"] == "full")]
    assert cells["metric"].item().startswith(found[0].name)


def test_answers_without_a_prompt_equal_hf_and_have_nothing_before_them(own_tasks: Path, tmp_path: Path) -> None:
    task = loaded(own_tasks, "own_empty")
    assert {*task.refused} == {"context", "question", "chunked"} and "--moment decode" in task.refused["question"]
    manager = TaskManager(include_path=str(own_tasks), include_defaults=False)
    model = HFLM(pretrained=str(reference_path()), device="cpu", dtype="float32", batch_size=1)
    theirs: Any = simple_evaluate(
        model=model, tasks=["own_empty"], task_manager=manager, bootstrap_iters=0, log_samples=True, limit=3
    )
    grid = {"task": "own_empty", "policy": "full", "include_path": str(own_tasks), "samples": 3, "out": str(tmp_path)}
    samples = kvbench.run(grid, progress=False).samples.set_index("doc_id")
    for sample in theirs["samples"]["own_empty"]:
        measured = json.loads(samples.loc[sample["doc_id"], "response"])
        expected = [resp[0][0] for resp in sample["resps"]]
        assert measured["loglikelihood"] == pytest.approx(expected, abs=1e-4)


def test_evictions_change_what_is_measured(run: kvbench.Run) -> None:
    choices = run.samples[run.samples["task"] == "own_choice"]
    likelihoods = {
        policy: [json.loads(text)["loglikelihood"][:4] for text in group["response"]]
        for policy, group in choices.groupby("policy")
    }
    assert likelihoods["snapkv:window=4"] != likelihoods["full"] != likelihoods["streaming_llm"]
    unconditional = {
        policy: [json.loads(text)["loglikelihood"][4:] for text in group["response"]]
        for policy, group in choices.groupby("policy")
    }
    assert unconditional["full"] == unconditional["snapkv:window=4"] == unconditional["streaming_llm"]


def test_chance_is_that_of_a_random_choice(own_tasks: Path) -> None:
    assert loaded(own_tasks, "own_choice").chance == 0.25
    assert loaded(own_tasks, "own_text").chance == 0
    assert loaded(own_tasks, "own_rolling").chance == float("inf")  # lower is better


def test_repeated_answers_go_through_the_filters_together(own_tasks: Path, tmp_path: Path) -> None:
    text = (own_tasks / "own_text.yaml").read_text().replace("own_text", "vote")
    text = text.partition("filter_list")[0].replace(
        "max_gen_toks: 9", "max_gen_toks: 9, do_sample: true, temperature: 1"
    )
    text += "repeats: 3\nfilter_list: [{name: maj, filter: [{function: majority_vote}, {function: take_first}]}]\n"
    (tmp_path / "vote.yaml").write_text(text)
    task = loaded(tmp_path, "vote")
    assert {request.repeats for request in task.requests} == {3}
    target = task.requests[0].target[0]
    answers = {("0", 0, 0): "no", ("0", 0, 1): target, ("0", 0, 2): target}
    (metric,) = task.score_metrics(answers)
    assert metric.values == {("0", 0, 0): 1.0}
    assert task.score_metrics({**answers, ("0", 0, 2): "no"})[0].values == {("0", 0, 0): 0.0}


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        ("own_choice", {"num_fewshot": 3}, "has 2 examples, not 3; use a smaller --num-fewshot"),
        ("own_code", {}, "executes code that the model writes; add --confirm-run-unsafe-code"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(own_tasks: Path, name: str, flags: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        loaded(own_tasks, name, **flags)


def test_unsafe_code_runs_once_it_is_confirmed(own_tasks: Path) -> None:
    assert len(loaded(own_tasks, "own_code", confirm_run_unsafe_code=True).requests) == 6


def test_generation_settings_change_the_task(own_tasks: Path) -> None:
    request = loaded(own_tasks, "own_text", gen_kwargs={"max_gen_toks": 3, "until": ["x"]}).requests[0]
    assert request.max_new_tokens == 3 and request.until == ("x",)
    assert loaded(own_tasks, "own_choice", gen_kwargs={"max_gen_toks": 3}).requests[0].measures


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (("metric: exact_match", "metric: no_such_metric"), UserError, "lm-eval cannot load this task"),
        (("output_type: generate_until", "output_type: x"), UserError, "lm-eval cannot load this task"),
        (("rows.jsonl", "lost.jsonl"), UserError, "its data cannot be read .*mend the path in its YAML"),
        (("{{passage}}", "{{passage.x.y}}"), UserError, "own_text"),
        (("doc_to_target", "doc_to_target: !function lost.module\nx"), LeftOut, "is missing .*lost"),
        (("dataset_path: json", "dataset_path: nobody/rows"), LeftOut, "data set nobody/rows is not in the cache"),
    ],
)  # fmt: skip
def test_a_wrong_yaml_is_one_line(
    own_tasks: Path, tmp_path: Path, change: tuple[str, str], error: type[UserError], says: str
) -> None:
    text = (own_tasks / "own_text.yaml").read_text()
    assert change[0] in text
    text = text.replace(*change)
    if "nobody" in text:
        text = "\n".join(line for line in text.splitlines() if not line.startswith("dataset_kwargs"))
    (tmp_path / "own_text.yaml").write_text(text)
    with pytest.raises(error, match=says) as raised:
        loaded(tmp_path, "own_text")
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_the_hash_is_that_of_data_and_functions_in_every_process(own_tasks: Path, tmp_path: Path) -> None:
    text = (own_tasks / "own_text.yaml").read_text().partition("metric_list")[0]
    metric = "{metric: score, aggregation: mean, higher_is_better: true}"
    text += f"process_results: !function utils.scored\nmetric_list: [{metric}]\n"
    (tmp_path / "own_text.yaml").write_text(text)
    code = (
        "import sys; from pathlib import Path; from tests.kvbench.harness.named_tasks.test_prompts import loaded\n"
        f"print(loaded(Path({str(tmp_path)!r}), 'own_text').data_hash)"
    )

    def hash_of(score: str) -> str:
        (tmp_path / "utils.py").write_text(f"def scored(doc, results):\n    return {{'score': {score}}}\n")
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert hash_of("0.0") != hash_of("1.0") == f"{loaded(tmp_path, 'own_text').data_hash}\n"
