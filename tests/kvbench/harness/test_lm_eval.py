"""Prompts and scores are lm-eval's own: held against `lm_eval.evaluate` with a replaying model."""

from __future__ import annotations

import json
import logging
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvbench.benchmark import Benchmark, Doc
from kvbench.errors import UserError
from kvbench.harness import rows as data
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.ruler import BENCHMARK as RULER

from ...loading import load_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

YAML = """
task: toy
output_type: generate_until
test_split: test
description: "Sums.\\n\\n"
doc_to_text: "Facts: {{context}}<|kvb_split|>Q: {{question}}"
doc_to_target: outputs
gen_prefix: gen_prefix
num_fewshot: 2
fewshot_config:
  sampler: first_n
  samples:
    - {context: "1 and 1. ", question: "sum?", outputs: ["2"], gen_prefix: "It is"}
    - {context: "2 and 2. ", question: "sum?", outputs: ["4"], gen_prefix: "It is"}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
filter_list:
  - name: number
    filter:
      - {function: regex, regex_pattern: "(-?[0-9]+)"}
      - {function: take_first}
  - name: raw
    filter:
      - {function: take_first}
generation_kwargs: {until: ["\\n"], max_gen_toks: 9, do_sample: false}
"""


def toy_docs(leaf: str, *, samples: int, **_: Any) -> list[Doc]:
    return [
        {
            "context": f"{i} and {i + 1}. ",
            "question": "sum?",
            "outputs": [str(2 * i + 1)],
            "gen_prefix": "It is",
        }
        for i in range(samples)
    ]


@pytest.fixture
def toy(tmp_path: Path) -> Benchmark:
    (tmp_path / "toy.yaml").write_text(YAML)
    return Benchmark(name="toy", leaves=("toy_sum",), docs=toy_docs, yaml=tmp_path, metric="exact_match,number")


def load(
    bench: Benchmark,
    leaf: str,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    *,
    chat: bool = True,
    **changes: Any,
) -> LmEvalTask:
    settings = {"length": 512, "samples": 5, "chat_template": chat}
    return load_task(leaf, bench, tokenizer, cache, **settings | changes)


def evaluated(task: LmEvalTask, answers: list[str], tokenizer: Any, chat: bool) -> Any:
    """What `lm_eval.evaluate` makes of the answers, and the prompts it asked."""
    from lm_eval.api.model import LM
    from lm_eval.evaluator import evaluate

    asked: list[str] = []

    class Replay(LM):
        tokenizer_name = "test"

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            asked.extend(r.args[0] for r in requests)
            return [answers[r.doc_id] for r in requests]

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
            raise NotImplementedError

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return str(
                tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

    logging.disable(logging.WARNING)
    try:
        found = evaluate(
            lm=Replay(),
            task_dict={"tasks": {task.name: task.built}},
            bootstrap_iters=0,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,  # as lm-eval's command line does by default
        )
    finally:
        logging.disable(logging.NOTSET)
    assert found is not None
    return found, asked


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("leaf", ["niah_multivalue", "vt"])
def test_ruler_is_asked_and_scored_as_lm_eval_does(
    leaf: str, chat: bool, bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    task = load(RULER, leaf, bpe_tokenizer, tmp_path, chat=chat)
    rng = random.Random(1)
    answers = [" and ".join(t for t in r.target if rng.random() < 0.5) for r in task.requests]
    scores, total = task.score({(r.sample_id, 0, 0): answers[r.doc_id] for r in task.requests})
    found, asked = evaluated(task, answers, bpe_tokenizer, chat)
    assert total == found["results"][leaf]["string_match,none"]
    assert 0 < total < 1
    single = [s["string_match"] for s in found["samples"][leaf]]
    assert [scores[str(i), 0, 0] for i in range(5)] == single
    assert asked == [r.context + data.SENTINEL + r.question for r in task.requests]
    for r in task.requests:
        assert r.target[0] not in r.question


@pytest.mark.parametrize("chat", [True, False])
def test_filters_few_shot_and_a_third_partys_yaml(
    toy: Benchmark, chat: bool, bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    task = load(toy, "toy_sum", bpe_tokenizer, tmp_path, chat=chat)
    answers = ["so 1!", "3", "it is 6", "none", "9 or 8"]
    scores, total = task.score({(str(i), 0, 0): a for i, a in enumerate(answers)})
    assert list(scores.values()) == [1.0, 1.0, 0.0, 0.0, 1.0]
    found, asked = evaluated(task, answers, bpe_tokenizer, chat)
    assert total == found["results"]["toy_sum"]["exact_match,number"] == 0.6
    raw = load(Benchmark(**{**vars(toy), "metric": "exact_match,raw"}), "toy_sum", bpe_tokenizer, tmp_path)
    assert raw.score({(str(i), 0, 0): a for i, a in enumerate(answers)})[1] == 0.2
    assert found["results"]["toy_sum"]["exact_match,raw"] == 0.2
    for request, prompt in zip(task.requests, asked, strict=True):
        # The examples' sentinels are gone, the last one parts; the answer's start is asked.
        assert request.context + request.question == prompt.replace(data.SENTINEL, "")
        assert request.context.endswith(f"Facts: {request.doc_id} and {request.doc_id + 1}. ")
        assert request.context.count("Facts: ") == 3
        assert request.question.startswith("Q: sum?")
        assert request.question.endswith("It is")
        assert (request.until, request.max_new_tokens) == (("\n",), 9)


def test_a_version_can_rise_for_one_lexicon_and_leaf_alone(
    toy: Benchmark, bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    def both(lexicon: str, versions: dict[str, dict[str, str]]) -> tuple[str, str]:
        bench = Benchmark(**{**vars(toy), "versions": versions})
        task = load(bench, "toy_sum", bpe_tokenizer, tmp_path, lexicon=lexicon)
        return task.version, task.data_hash

    raised = {"natural": {"toy_sum": "2"}}
    assert both("natural", raised)[0] == "2"
    assert both("natural", raised)[1] != both("natural", {})[1]
    assert both("reference", raised) == both("reference", {})
    assert both("natural", {"natural": {"other": "2"}}) == both("natural", {})
    assert both("natural", {})[0] == "1"


def test_leaves_with_sources_need_the_hub_unless_the_benchmark_says_otherwise(
    toy: Benchmark,
) -> None:
    sources = {"toy_sum": ()}
    assert Benchmark(**{**vars(toy), "sources": sources}).hub_leaves == {"toy_sum"}
    optional = Benchmark(**{**vars(toy), "sources": sources, "needs_hub": frozenset()})
    assert optional.hub_leaves == frozenset()
    assert toy.hub_leaves == frozenset()


def test_a_part_of_the_responses_is_scored_alone(
    toy: Benchmark, bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    task = load(toy, "toy_sum", bpe_tokenizer, tmp_path)
    assert task.score({("3", 0, 0): "7", ("1", 0, 0): "0"}) == (
        {("1", 0, 0): 0.0, ("3", 0, 0): 1.0},
        0.5,
    )
    # Repeats count one by one.
    scores, total = task.score({("3", 0, 1): "7", ("3", 0, 0): "8", ("0", 0, 0): "1"})
    assert list(scores.items()) == [
        (("0", 0, 0), 1.0),
        (("3", 0, 0), 0.0),
        (("3", 0, 1), 1.0),
    ]
    assert total == pytest.approx(2 / 3)
    nothing, total = task.score({})
    assert nothing == {}
    assert math.isnan(total)
    with pytest.raises(KeyError):
        task.score({("99", 0, 0): "x"})


def test_it_is_quiet_and_leaves_global_generators_alone(
    toy: Benchmark,
    bpe_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    level = logging.getLogger("lm_eval").level
    load(toy, "toy_sum", bpe_tokenizer, tmp_path).score({("0", 0, 0): "1"})
    load(RULER, "niah_single_2", bpe_tokenizer, tmp_path).score({("0", 0, 0): "1"})
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    assert logging.getLogger("lm_eval").level == level
    assert capfd.readouterr() == ("", "")


def test_listing_a_benchmark_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'transformers', 'lm_eval', 'datasets', 'numpy'}"
    code = (
        "import sys, kvbench.harness.catalogue, kvbench.harness.encode, kvbench_tasks.ruler, "
        f"kvbench_tasks.niah, kvbench_tasks.longgen, "
        f"kvbench_tasks.dialogue; found = {heavy} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_wrong_with_a_benchmark_is_said(
    toy: Benchmark, bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    def broken(**changes: Any) -> None:
        load(Benchmark(**{**vars(toy), **changes}), "toy_sum", bpe_tokenizer, tmp_path / "x")

    with pytest.raises(UserError, match="has no metric 'f2'"):
        broken(metric="f2")
    with pytest.raises(UserError, match="has neither"):
        broken(yaml=tmp_path / "nowhere")
    with pytest.raises(UserError, match="has no prompts in the lexicon"):
        broken(lexicons=("reference",))
    with pytest.raises(UserError, match="row 0: 'outputs' must be"):
        broken(docs=lambda leaf, **_: [{"context": "a", "question": "b"}])
    sentinel = {"context": f"a{data.SENTINEL}", "question": "b", "outputs": ["c"]}
    with pytest.raises(UserError, match="must not contain"):
        broken(docs=lambda leaf, **_: [sentinel])
    (tmp_path / "toy.yaml").write_text(YAML.replace(data.SENTINEL, " "))
    with pytest.raises(UserError, match="must contain"):
        broken()
    with pytest.raises(UserError, match="samples must be at least 1"):
        load(toy, "toy_sum", bpe_tokenizer, tmp_path, samples=0)
    with pytest.raises(UserError, match="has no task"):
        load(toy, "toy_product", bpe_tokenizer, tmp_path)


def test_a_chat_template_that_is_not_there(
    toy: Benchmark, word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no chat template"):
        load(toy, "toy_sum", word_tokenizer, tmp_path)


# --- kept data ------------------------------------------------------------------------------------


def test_kept_rows_are_used_again_extended_and_never_trusted_blindly(tmp_path: Path) -> None:
    made: list[int] = []
    word = "a"

    def make(count: int) -> list[Doc]:
        made.append(count)
        return [{"text": f"{word}{i}"} for i in range(count)]

    path = tmp_path / "data" / "x.jsonl"
    five = data.cached(path, 5, make)
    assert data.cached(path, 3, make) == five[:3]
    assert data.cached(path, 5, make) == five
    assert made == [1, 5, 1, 1]
    assert data.cached(path, 7, make)[:5] == five
    assert data.cached(path, 7, make)[6] == {"text": "a6"}
    head, *lines = path.read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == [f"a{i}" for i in range(7)]
    path.write_text("\n".join([head, *lines[:-1], lines[0]]) + "\n")  # damaged
    made.clear()
    assert data.cached(path, 7, make)[6] == {"text": "a6"}
    assert made == [1, 7]
    assert data.cached(path, 7, make, "new code")[6] == {"text": "a6"}
    assert made == [1, 7, 1, 7], "other code, other rows"
    moved = path.with_name("y.jsonl")
    path.rename(moved)
    assert data.cached(moved, 7, make, "new code")[0] == {"text": "a0"}
    assert made[4:] == [1, 7], "the rows of another name"
    word = "b"  # the generator has changed
    assert data.cached(path, 2, make) == [{"text": "b0"}, {"text": "b1"}]


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rows = data.cached(tmp_path / "file" / "x.jsonl", 2, lambda n: [{"n": i} for i in range(n)])
    assert rows == [{"n": 0}, {"n": 1}]


METRICS = """
task: toy
output_type: generate_until
test_split: test
doc_to_text: "{{context}}<|kvb_split|>{{question}}"
doc_to_target: outputs
num_fewshot: 0
process_results: !function metric.scores
metric_list:
  - {metric: right, aggregation: mean, higher_is_better: true}
  - {metric: loss, aggregation: perplexity, higher_is_better: false}
  - {metric: bleu, aggregation: bleu, higher_is_better: true}
  - {metric: undefined, aggregation: perplexity, higher_is_better: false}
generation_kwargs: {until: ["\\n"], max_gen_toks: 9, do_sample: false}
"""

UNDEFINED = "  - {metric: undefined, aggregation: perplexity, higher_is_better: false}\n"

METRIC = """
MORE = {}
def scores(doc, results):
    text = results[0]
    found = {
        "bleu": (doc["outputs"][0], text), "loss": -len(text) / 2, **MORE,
        "right": float(doc["outputs"][0] in text),
    }
    return found | ({"length": len(text)} if len(text) > 1 else {})
"""


def test_all_metrics_have_the_aggregates_of_lm_eval(bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(METRICS.replace(UNDEFINED, ""))
    (tmp_path / "metric.py").write_text(METRIC)
    bench = Benchmark(name="toy", leaves=("toy_sum",), docs=toy_docs, yaml=tmp_path, metric="right")
    task = load(bench, "toy_sum", bpe_tokenizer, tmp_path, chat=False)
    answers = ["1 it is the one", "4 and so on it is", "it is 5 or so", "7", "9 is the answer to it"]
    responses = {(str(i), 0, 0): text for i, text in enumerate(answers)}
    metrics = {metric.name: metric for metric in task.score_metrics(responses)}
    assert next(iter(metrics)) == "right"
    assert set(metrics) == {"right", "bleu", "loss", "length"}
    found, _ = evaluated(task, answers, bpe_tokenizer, chat=False)
    for name in ("right", "bleu", "loss"):
        assert metrics[name].score == found["results"]["toy_sum"][f"{name},none"]
    assert metrics["right"].aggregate is None and metrics["right"].values["1", 0, 0] == 0.0
    bleu, loss, length = metrics["bleu"], metrics["loss"], metrics["length"]
    assert bleu.values["3", 0, 0] == ("7", "7") and bleu.aggregate is not None
    assert loss.aggregate is not None and not loss.higher_is_better
    assert loss.aggregate([-1.0, -2.0]) == pytest.approx(math.exp(1.5))
    assert ("3", 0, 0) not in length.values and length.higher_is_better
    assert length.score == pytest.approx(sum(map(len, answers[:3] + answers[4:])) / 4)
    assert {metric.filter for metric in metrics.values()} == {""}
    assert task.score(responses) == (dict(metrics["right"].values), 0.8)


def test_a_further_metric_that_fails_has_no_score_and_the_tasks_own_is_an_error(
    bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (tmp_path / "toy.yaml").write_text(METRICS)
    (tmp_path / "metric.py").write_text(METRIC.replace("{}", '{"undefined": "none", "note": "x"}'))
    responses = {("0", 0, 0): "1"}
    for metric in ("right", "undefined"):
        bench = Benchmark(name="toy", leaves=("toy_sum",), docs=toy_docs, yaml=tmp_path, metric=metric)
        task = load(bench, "toy_sum", bpe_tokenizer, tmp_path, chat=False)
        if metric == "right":
            scores = {each.name: each.score for each in task.score_metrics(responses)}
            assert math.isnan(scores["undefined"]) and scores["right"] == 1 and "note" not in scores
        else:
            with pytest.raises(TypeError):
                task.score_metrics(responses)


def test_metrics_name_their_filter_if_there_are_several(
    toy: Benchmark, bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (metric,) = load(toy, "toy_sum", bpe_tokenizer, tmp_path).score_metrics({("0", 0, 0): "1"})
    assert (metric.name, metric.filter, metric.label) == ("exact_match", "number", "exact_match,number")
