"""LongProc: official prompts, leaves that are left out, and a run; fixtures in the hub's schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.data.sources import keep
from kvbench.errors import LeftOut
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.longproc import BENCHMARK

from ...loading import load_task

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = {
    "countdown_0.5k": "Target: ",
    "path_traversal_0.5k": "Now find the route from ",
    "tom_tracking_0.5k": "[QUESTION]\nWhere does ",
    "html_to_tsv_0.5k": "[TARGET INFORMATION]\n",
    "travel_planning_2k": "Find a trip plan of visiting ",
    "pseudo_to_code_0.5k": "[CODE]:",
}


def raw(name: str) -> list[dict[str, Any]]:
    lines = (FIXTURES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    for name in KINDS:
        keep(BENCHMARK.sources[f"longproc_{name}"][0], raw(name), folder)
    return folder


def load(name: str, tokenizer: Any, cache: Path) -> LmEvalTask:
    return load_task(f"longproc_{name}", BENCHMARK, tokenizer, cache)


def test_there_are_the_sixteen_leaves_of_lm_eval() -> None:
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent / "longproc"
    theirs = {f"longproc_{file.stem}" for file in folder.glob("[a-z]*k.yaml")}
    assert set(BENCHMARK.leaves) == theirs
    assert len(theirs) == 16


@pytest.mark.parametrize("name", KINDS)
def test_prompts_are_the_official_ones(
    name: str, bpe_tokenizer: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_RUN_CODE", "1")
    task = load(name, bpe_tokenizer, cache)
    for request, row in zip(task.requests, raw(name), strict=True):
        assert request.context + request.question == row["input_prompt"]
        assert request.question.startswith(KINDS[name])
        assert request.context
        assert request.sample_id == row["id"].rpartition("_")[2]  # no two share a context
        assert request.max_new_tokens == {"0.5k": 1024, "2k": 3072}[name.rpartition("_")[2]]
        assert request.sampling is None
        assert request.target == (row["reference_output"],)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "pseudo_to_code_0.5k"])
def test_the_references_are_right_and_others_are_not(name: str, bpe_tokenizer: Any, cache: Path) -> None:
    task = load(name, bpe_tokenizer, cache)
    answers = [row["reference_output"] for row in raw(name)]
    if name == "path_traversal_0.5k":
        answers = [f"<Route>\n{answer}\n</Route>" for answer in answers]
    ids = [request.sample_id for request in task.requests]
    responses = {(sample, 0, 0): text for sample, text in zip(ids, answers, strict=True)}
    assert task.score(responses)[1] == 1
    swapped = dict(zip(responses, reversed(answers), strict=True))
    assert task.score(swapped)[1] == 0


def test_answers_have_the_limits_of_the_official_configurations(bpe_tokenizer: Any, tmp_path: Path) -> None:
    # HELMET at 4526dfb, longproc_addon/configs/*.yaml: generation_max_length 1024, 3072 and 10240.
    for length, tokens in (("0.5k", 1024), ("2k", 3072), ("8k", 10240)):
        keep(BENCHMARK.sources[f"longproc_countdown_{length}"][0], raw("countdown_0.5k"), tmp_path)
        for request in load(f"countdown_{length}", bpe_tokenizer, tmp_path).requests:
            assert request.max_new_tokens == tokens


def test_versions_rose_where_scores_or_limits_changed(bpe_tokenizer: Any, cache: Path) -> None:
    raised = {leaf for leaf in BENCHMARK.leaves if BENCHMARK.version_of(leaf, "natural") == "2"}
    assert raised == {
        "longproc_tom_tracking_0.5k",
        "longproc_tom_tracking_2k",
        "longproc_html_to_tsv_0.5k",
        "longproc_html_to_tsv_2k",
        *(f"longproc_{kind}_8k" for kind in ("countdown", "path_traversal", "tom_tracking")),
        *(f"longproc_{kind}_8k" for kind in ("html_to_tsv", "travel_planning")),
    }
    assert load("tom_tracking_0.5k", bpe_tokenizer, cache).version == "2"
    assert load("countdown_0.5k", bpe_tokenizer, cache).version == "1"


def test_a_prompt_without_the_mark_is_all_context(bpe_tokenizer: Any, tmp_path: Path) -> None:
    row = {**raw("html_to_tsv_0.5k")[0], "input_prompt": "<p>A page</p> Make a table."}
    keep(BENCHMARK.sources["longproc_html_to_tsv_0.5k"][0], [row], tmp_path)
    [request] = load("html_to_tsv_0.5k", bpe_tokenizer, tmp_path).requests
    assert (request.context, request.question) == ("<p>A page</p> Make a table.", "")


def test_run_leaves_out_what_runs_code(
    llama_folder: str,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bpe_tokenizer: Any,
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(cache))
    monkeypatch.delenv("KVBENCH_RUN_CODE", raising=False)
    with pytest.raises(LeftOut, match=r"C\+\+ that the model wrote; set KVBENCH_RUN_CODE=1 to"):
        load("pseudo_to_code_0.5k", bpe_tokenizer, cache)
    run = kvbench.run(
        {
            "policy": "snapkv:window=8",
            "budget": "0.2",
            "task": [f"longproc_{name}" for name in KINDS],
            "model": llama_folder,
            "samples": 2,
            "max_new_tokens": 6,
            "out": str(tmp_path / "run"),
        }
    )
    assert (run.cells.status == "ok").all()
    assert len(run.cells) == 2 * 5
    assert not run.cells.task.str.contains("pseudo").any()
    assert len(run.samples) == 2 * 5 * 2
    assert (run.cells.score == 0).all()
