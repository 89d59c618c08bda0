"""What YAML and rows say about answers becomes requests; what thinking models say is scored."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvbench.benchmark import Benchmark, Doc
from kvbench.cli import call
from kvbench.decoding import Sampling
from kvbench.errors import LeftOut, UserError
from kvbench.harness import catalogue
from kvbench.harness.encode import split_encode
from kvbench.harness.lm_eval import LmEvalTask

from ...loading import load_task

METRIC = """
import json

def perplexity(doc, results):
    found = json.loads(results[0])
    return {"score": found["nll"] / found["tokens"]}
"""
YAML = """
task: toy
output_type: generate_until
test_split: test
doc_to_text: "{{context}}<|kvb_split|>{{question}}"
doc_to_target: outputs
num_fewshot: 0
repeats: 4
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
generation_kwargs: {until: ["."], max_gen_toks: 9, do_sample: true, temperature: 0.6, top_k: 20}
"""
ROWS: list[Doc] = [{"context": f"The mountain {i}. " * 9, "question": "What?", "outputs": [f"{i}"]} for i in range(3)]


def bench(folder: Path, rows: list[Doc], yaml: str = YAML, **changes: Any) -> Benchmark:
    (folder / "toy.yaml").write_text(yaml)
    usual: dict[str, Any] = {
        "sized": False,
        "metric": "exact_match",
        "docs": lambda leaf, **_: copy.deepcopy(rows),
    }
    return Benchmark(name="toy", leaves=("toy",), yaml=folder, **{**usual, **changes})


def load(given: Benchmark, tokenizer: Any, folder: Path, **changes: Any) -> LmEvalTask:
    settings = {"length": 512, "samples": 5, "chat_template": True}
    return load_task("toy", given, tokenizer, folder, **settings | changes)


@pytest.fixture
def thinker(bpe_tokenizer: Any) -> Any:
    made = copy.deepcopy(bpe_tokenizer)
    made.add_tokens(["<think>", "</think>"])
    return made


SHOTS = [
    {"user": "The lake 7.\nWhat?", "assistant": "It is 7.", "end": "\n\n"},
    {"user": "The lake 8.\nWhat? ", "assistant": "It is 8.", "end": "\n"},
]


def test_worked_examples_are_turns_where_there_is_a_chat_template(bpe_tokenizer: Any, tmp_path: Path) -> None:
    rows = [{**row, "shots": SHOTS, "gen_prefix": "It is"} for row in ROWS]
    made = bench(tmp_path, rows, YAML + "gen_prefix: gen_prefix\n")
    for request, row in zip(load(made, bpe_tokenizer, tmp_path).requests, ROWS, strict=True):
        assert request.context == (
            "<|bos|><|im_start|>user\nThe lake 7.\nWhat?<|im_end|>\n"
            "<|im_start|>assistant\nIt is 7.<|im_end|>\n"
            "<|im_start|>user\nThe lake 8.\nWhat? <|im_end|>\n"
            "<|im_start|>assistant\nIt is 8.<|im_end|>\n"
            f"<|im_start|>user\n{row['context']}"
        )
        assert request.question == "What?<|im_end|>\n<|im_start|>assistant\nIt is"
    plain = load(made, bpe_tokenizer, tmp_path, chat_template=False)
    for request, row in zip(plain.requests, ROWS, strict=True):
        assert request.context == ("The lake 7.\nWhat? It is 7.\n\nThe lake 8.\nWhat? It is 8.\n" + row["context"])
        assert request.question == "What? It is"


@pytest.mark.parametrize("chat", [True, False])
def test_worked_examples_count_in_the_size_of_a_prompt(chat: bool, bpe_tokenizer: Any, tmp_path: Path) -> None:
    sizes = []

    def docs(leaf: str, *, size: Any, **_: Any) -> list[Doc]:
        sizes.append(size(ROWS[0]["context"], "What?", "It is", SHOTS))
        return [{**ROWS[0], "shots": SHOTS, "gen_prefix": "It is"}]

    made = bench(tmp_path, [], YAML + "gen_prefix: gen_prefix\n", docs=docs, sized=True)
    (request,) = load(made, bpe_tokenizer, tmp_path, chat_template=chat).requests
    assert {sum(map(len, split_encode(bpe_tokenizer, request.context, request.question)))} == {*sizes}


@pytest.mark.parametrize(
    "shots",
    [
        "x",
        ["x"],
        [{"user": "a", "assistant": "b"}],
        [{**SHOTS[0], "end": 3}],
        [{**SHOTS[0], "x": ""}],
    ],
)
def test_what_is_wrong_with_worked_examples_is_said(shots: Any, bpe_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="toy, row 0: 'shots' must be a list of objects with the"):
        load(bench(tmp_path, [{**ROWS[0], "shots": shots}]), bpe_tokenizer, tmp_path)


def test_a_dialogue_has_no_worked_examples(bpe_tokenizer: Any, tmp_path: Path) -> None:
    turn = {"context": "a", "question": "b", "outputs": ["c"], "answer": "c", "shots": SHOTS}
    row = {"turns": [turn], "frame": {"user": "", "assistant": "", "end": ""}}
    with pytest.raises(UserError, match="turn 0: a dialogue cannot have 'shots'"):
        load(bench(tmp_path, [row]), bpe_tokenizer, tmp_path)


def test_sampling_and_repeats_are_the_yamls(bpe_tokenizer: Any, tmp_path: Path) -> None:
    task = load(bench(tmp_path, ROWS), bpe_tokenizer, tmp_path)
    assert {r.sampling for r in task.requests} == {Sampling(0.6, 1.0, 20)}
    assert {(r.repeats, r.max_new_tokens, r.until) for r in task.requests} == {(4, 9, (".",))}
    greedy = YAML.replace("do_sample: true", "do_sample: false").replace("repeats: 4\n", "")
    task = load(bench(tmp_path, ROWS, greedy), bpe_tokenizer, tmp_path)
    assert {(r.sampling, r.repeats) for r in task.requests} == {(None, 1)}


def test_the_score_of_repeats_is_their_mean(bpe_tokenizer: Any, tmp_path: Path) -> None:
    task = load(bench(tmp_path, ROWS), bpe_tokenizer, tmp_path)
    said = {(f"{i}", 0, k): f"{i}" if k < i else "no" for i in range(3) for k in range(4)}
    scores, mean = task.score(said)
    assert sum(scores.values()) == 0 + 1 + 2
    assert mean == pytest.approx(3 / 12)


def test_what_follows_the_thinking_is_scored(bpe_tokenizer: Any, thinker: Any, tmp_path: Path) -> None:
    said = {
        ("0", 0, 0): "<think>no. 2</think>\n\n0. And more",
        ("1", 0, 0): "1",
        ("2", 0, 0): "<think>2",
    }
    task = load(bench(tmp_path, ROWS), thinker, tmp_path)
    assert task.score(said)[0] == {("0", 0, 0): 1, ("1", 0, 0): 1, ("2", 0, 0): 0}
    plain = load(bench(tmp_path, ROWS), bpe_tokenizer, tmp_path)
    assert plain.score(said)[0] == {("0", 0, 0): 0, ("1", 0, 0): 1, ("2", 0, 0): 0}


def test_given_text_is_measured_whatever_the_yaml_samples(thinker: Any, tmp_path: Path) -> None:
    rows = [{**row, "given": f" It is {i}."} for i, row in enumerate(ROWS)]
    task = load(bench(tmp_path, rows), thinker, tmp_path)
    assert [r.given for r in task.requests] == [" It is 0.", " It is 1.", " It is 2."]
    assert {(r.sampling, r.repeats) for r in task.requests} == {(None, 1)}


def test_given_text_is_in_all_rows_or_in_none(bpe_tokenizer: Any, tmp_path: Path) -> None:
    rows = [{**ROWS[0], "given": "x"}, {**ROWS[1], "given": ""}]
    with pytest.raises(UserError, match="toy: either all rows or no row can have 'given'"):
        load(bench(tmp_path, rows), bpe_tokenizer, tmp_path)
    with pytest.raises(UserError, match="toy, row 0: 'given' must be a str"):
        load(bench(tmp_path, [{**ROWS[0], "given": 3}]), bpe_tokenizer, tmp_path)
    turn = {"context": "a", "question": "b", "outputs": ["c"], "answer": "c", "given": "d"}
    row = {"turns": [turn], "frame": {"user": "", "assistant": "", "end": ""}}
    with pytest.raises(UserError, match="toy, row 0, turn 0: a dialogue cannot have 'given'"):
        load(bench(tmp_path, [row]), bpe_tokenizer, tmp_path)


def test_perplexity_goes_the_whole_way(llama_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import kvbench

    (tmp_path / "metric.py").write_text(METRIC)
    yaml = YAML[: YAML.index("metric_list")] + (
        "process_results: !function metric.perplexity\n"
        "metric_list:\n  - {metric: score, aggregation: mean, higher_is_better: false}\n"
        "generation_kwargs: {until: []}\n"
    )
    rows = [{**row, "question": "", "given": f"The river {i} is green." * 3} for i, row in enumerate(ROWS)]
    made = bench(tmp_path, rows, yaml, metric="score", plain=frozenset({"toy"}))
    monkeypatch.setattr(catalogue, "resolve_task", lambda spec, *_: [("toy", made)])
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    grid = {"policy": "snapkv:window=8", "budget": "0.2", "task": "toy", "model": llama_folder}
    done = kvbench.run({**grid, "samples": 3, "out": str(tmp_path / "run"), "moment": "context,question"})
    assert (done.cells.status == "ok").all()
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    want = []
    for row in rows:
        prompt, whole = (tokenizer(t)["input_ids"] for t in (row["context"], row["context"] + row["given"]))
        same = [a == b for a, b in zip(prompt, whole, strict=False)]
        cut = (*same, False).index(False)
        with torch.no_grad():
            logs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
        want.append(-sum(float(logs[i - 1, whole[i]]) for i in range(cut, len(whole))) / (len(whole) - cut))
    full = done.cells[done.cells.policy == "full"].iloc[0]
    assert full.score == pytest.approx(sum(want) / 3, rel=1e-5)
    assert (done.cells[done.cells.policy != "full"]["diff"].abs() > 1e-4).all()
    assert set(done.samples.stop) == {"given"}


def test_the_template_is_told_whether_to_think(bpe_tokenizer: Any, tmp_path: Path) -> None:
    told = copy.deepcopy(bpe_tokenizer)
    told.chat_template += "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    made = bench(tmp_path, ROWS)
    for thinking, end in ((None, "assistant\n"), (True, "True"), (False, "False")):
        task = load(made, told, tmp_path, thinking=thinking)
        assert all(r.question.endswith(end) for r in task.requests)
    task = load(made, told, tmp_path, thinking=True, chat_template=False)
    assert task.requests[0].question == "What?"


def test_a_task_without_prompts_for_the_model_is_left_out(
    bpe_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made = bench(tmp_path, ROWS, lexicons=("natural",), sized=True)
    with pytest.raises(LeftOut, match="the reference model knows only its own 900 words"):
        load(made, bpe_tokenizer, tmp_path, lexicon="reference")
    found = catalogue.resolve_task
    monkeypatch.setattr(catalogue, "resolve_task", lambda spec, *_: [("toy", made)] if spec == "toy" else found(spec))
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    out = str(tmp_path / "run")
    usual = ["run", "--policy", "knorm", "--samples", "1", "--length", "200", "--out", out]
    assert call([*usual, "--task", "toy,niah_single_2", "--length", "300"]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "toy" in line]
    assert len(said) == 1 and "toy is left out: the reference model" in said[0]
    shutil.rmtree(out)
    assert call([*usual, "--task", "toy"]) == 2
    assert "nothing to run: none of the tasks is available here" in capsys.readouterr().err
