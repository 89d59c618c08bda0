"""A task that needs a judge, from the grid to the tables."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.benchmark import Ask, Benchmark, Doc
from kvbench.cli import call
from kvbench.errors import UserError
from kvbench.harness import catalogue
from kvbench.progress import Silent
from kvbench.runs.grid import Grid
from kvbench.runs.runner import execute

from .server import SECRET, Reply, Server

YAML = """
task: quiz
output_type: generate_until
test_split: test
doc_to_text: "{{context}}<|kvb_split|>{{question}}"
doc_to_target: outputs
process_results: !function metric.judged
metric_list:
  - {metric: accuracy, aggregation: mean, higher_is_better: true}
generation_kwargs: {until: [], max_gen_toks: 4, do_sample: false}
"""
METRIC = """
def judged(doc, results):
    response, marks = results
    return {"accuracy": marks["score"]}
"""


def ask(doc: Doc, response: str) -> Ask:
    fields = {"question": doc["question"], "answer": doc["outputs"][0], "response": response}
    return Ask("correct", fields)


def docs(leaf: str, **_: Any) -> list[Doc]:
    return [
        {
            "context": f"The letter {i} was written in town {i * 7}. It was read twice. " * 4,
            "question": f"Where was letter {i} written?",
            "outputs": [f"in town {i * 7}"],
        }
        for i in range(4)
    ]


class Told(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def quiz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quiz.yaml").write_text(YAML)
    (tmp_path / "metric.py").write_text(METRIC)
    benchmark = Benchmark(
        name="quiz",
        leaves=("quiz",),
        docs=docs,
        yaml=tmp_path,
        metric="accuracy",
        judge="correct",
        ask=ask,
        sized=False,
    )
    known = catalogue.resolve_task
    monkeypatch.setattr(catalogue, "resolve_task", lambda s, *_: [("quiz", benchmark)] if s == "quiz" else known(s))
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    for name in ("", "_URL", "_KEY", "_MODEL", "_JOBS", "_TIMEOUT", "_TOKENS"):
        monkeypatch.delenv(f"KVBENCH_JUDGE{name}", raising=False)


@pytest.fixture
def endpoint(quiz: None, server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("KVBENCH_JUDGE_URL", server.url)
    monkeypatch.setenv("KVBENCH_JUDGE_KEY", SECRET)
    monkeypatch.setenv("KVBENCH_JUDGE_MODEL", "judge-1")
    server.answer = lambda body, count: Reply("yes" if right(response_in(body)) else "no")
    return server


def response_in(body: dict[str, Any]) -> str:
    prompt = body["messages"][0]["content"]
    return prompt.partition("[Response]\n")[2].partition("\n\n[End of the response]")[0]


def right(response: str) -> bool:
    """An arbitrary rule: the model has random weights."""
    return not response or hashlib.sha256(response.encode()).digest()[0] % 2 == 0


def grid(folder: str, out: Path, **changes: Any) -> Grid:
    usual = {"policy": "snapkv:window=8", "budget": "0.2", "task": "quiz", "samples": 3}
    return Grid.from_dict({**usual, "model": folder, "out": str(out), **changes})


def test_an_unknown_judge_is_one_line(quiz: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown judge 'locale'; did you mean local"):
        grid("reference", Path("run"), judge="locale")
    monkeypatch.setenv("KVBENCH_JUDGE_URL", "gpt-4o")
    with pytest.raises(UserError, match="KVBENCH_JUDGE_MODEL names no model"):
        execute(grid("reference", Path("run")))


def test_an_endpoint_judges_and_is_asked_once(llama_folder: str, endpoint: Server, tmp_path: Path) -> None:
    told = Told()
    run = execute(grid(llama_folder, tmp_path / "run"), reporter=told)
    assert list(run.cells.status) == ["ok", "ok"]
    assert set(run.cells.metric) == {"accuracy (judge judge-1)"}
    assert [float(right(text)) for text in run.samples.response] == list(run.samples.score)
    for cell, part in run.samples.groupby("cell"):
        assert run.cells.set_index("cell").score[cell] == pytest.approx(part.score.mean())
    versions = json.loads(run.cells.versions[0])
    host = endpoint.host
    assert versions["judge"] == f"judge-1 at {host}"
    assert versions["rubric"].startswith("correct 1 (")
    assert told.lines[:1] == [
        f"quiz is judged by judge-1 at {host}: questions, reference answers and responses are sent there"
    ]
    assert "What is 1 + 1?" in endpoint.prompts[0], "the judge is tried before anything is generated"
    distinct = len(run.samples[["doc_id", "response"]].drop_duplicates())
    assert len(endpoint.bodies) == 1 + distinct

    again = execute(grid(llama_folder, tmp_path / "run"))
    assert again.cells.drop(columns="versions").equals(run.cells.drop(columns="versions"))
    assert len(endpoint.bodies) == 1 + distinct, "nothing to generate and nothing to ask"
    more = execute(grid(llama_folder, tmp_path / "run", samples=4))
    assert set(more.cells.samples) == {4}
    assert len(endpoint.bodies) <= 1 + distinct + 1 + 2
    stored = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert not any(SECRET.encode() in p.read_bytes() for p in stored)


def test_a_missing_verdict_fails_its_cell_and_is_asked_again(
    llama_folder: str, endpoint: Server, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    good = endpoint.answer
    endpoint.answer = lambda body, count: (
        Reply("hard to say") if "letter 1 " in body["messages"][0]["content"] else good(body, count)
    )
    run = execute(grid(llama_folder, out))
    assert list(run.cells.status) == ["error", "error"]
    assert run.cells.error[0] == (
        "1 of 3 responses have no verdict: sample 1, question 0: judge-1 gave no verdict: 'hard to say'"
    )
    assert set(run.cells.metric) == {"accuracy (judge judge-1)"}
    assert run.samples.score.isna().all()
    stored = (out / "responses.jsonl").read_bytes()
    assert stored.count(b"\n") == 6, "no response is lost"

    endpoint.answer = good
    endpoint.bodies.clear()
    healed = execute(grid(llama_folder, out))
    assert list(healed.cells.status) == ["ok", "ok"]
    assert (out / "responses.jsonl").read_bytes() == stored, "nothing is generated again"
    assert 1 <= len(endpoint.bodies) <= 2
    assert all("letter 1 " in prompt for prompt in endpoint.prompts)


def test_a_wrong_key_stops_before_anything_is_generated(
    llama_folder: str, endpoint: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint.replies(Reply(status=401, error={"message": "who are you?"}))
    arguments = ["--policy", "full", "--task", "quiz", "--model", llama_folder, "--samples", "1"]
    assert call(["run", *arguments, "--out", str(tmp_path / "run")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == (
        f"kvbench: the judge at {endpoint.host} answers 401: who are you?; "
        "set KVBENCH_JUDGE_KEY to a key that can use judge-1"
    )
    assert (tmp_path / "run/responses.jsonl").read_bytes() == b""


def test_without_a_judge_only_the_judged_task_is_left_out(llama_folder: str, quiz: None, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    row = {"context": "A b c. " * 20, "question": "?", "answers": "b", "max_new_tokens": 2}
    own.write_text(json.dumps(row))
    told = Told()
    run = execute(grid(llama_folder, tmp_path / "a", task=f"quiz,{own}"), reporter=told)
    assert set(run.cells.task) == {"own"}
    assert told.lines[:1] == [
        "quiz is left out: no judge is configured; set KVBENCH_JUDGE_URL and KVBENCH_JUDGE_MODEL "
        "(see docs/judge.md), or use --judge local for a trial"
    ]
    with pytest.raises(UserError, match="nothing to run"):
        execute(grid(llama_folder, tmp_path / "b"))


def test_local_scores_are_marked_and_not_compared_with_a_models(
    llama_folder: str,
    endpoint: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = ["--policy", "snapkv:window=8", "--task", "quiz", "--model", llama_folder]
    arguments += ["--samples", "2", "--out", str(tmp_path / "local")]
    assert call(["run", *arguments, "--judge", "local"]) == 0
    shown = capsys.readouterr()
    note = "which only counts shared words: do not compare these scores with those of a model"
    assert f"quiz: scored by the local judge, {note}" in " ".join(shown.out.split())
    assert "quiz is judged locally" in shown.err
    assert endpoint.bodies == []
    assert call(["report", str(tmp_path / "local")]) == 0
    assert f"local judge, {note}" in (tmp_path / "local/report/summary.md").read_text()

    local, _ = kvbench.load(tmp_path / "local")
    other = execute(grid(llama_folder, tmp_path / "model", samples=2)).cells
    assert set(local.cell) == set(other.cell), "the same responses"
    assert not set(local.match) & set(other.match), "but not comparable scores"
    with pytest.raises(UserError) as caught:
        kvbench.load([tmp_path / "local", tmp_path / "model"])
    assert str(caught.value) == (
        f"quiz is scored by accuracy (local judge) in {tmp_path / 'local'} and by accuracy "
        f"(judge judge-1) in {tmp_path / 'model'}, which cannot be compared; give one run at a "
        "time, or use the same judge for both"
    )
    # The other judge can score the same folder again: no response depends on the judge.
    monkeypatch.setenv("KVBENCH_JUDGE", "endpoint")
    before = (tmp_path / "local/responses.jsonl").read_bytes()
    rescored = execute(grid(llama_folder, tmp_path / "local", samples=2))
    assert set(rescored.cells.metric) == {"accuracy (judge judge-1)"}
    assert (tmp_path / "local/responses.jsonl").read_bytes() == before
    kvbench.load([tmp_path / "local", tmp_path / "model"])
