"""GSM8K: boxed, and with lm-eval's five examples; fixtures in the hub's own schema."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks._yaml_loader import load_yaml

import kvbench
from kvbench.benchmark import Benchmark
from kvbench.data.sources import keep
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.gsm8k import BENCHMARK, FEWSHOT, STRICT

from ...loading import load_task

FIXTURES = Path(__file__).parent / "fixtures"
THEIRS = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml"


def raw(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FIXTURES / f"{split}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    for source in FEWSHOT.sources["gsm8k_fewshot"]:
        keep(source, raw(source.split), folder)
    return folder


def load(bench: Benchmark, tokenizer: Any, cache: Path, seed: int = 0, chat: bool = False) -> LmEvalTask:
    return load_task(bench.name, bench, tokenizer, cache, seed=seed, chat_template=chat)


def test_zero_shot_asks_for_a_box(bpe_tokenizer: Any, cache: Path) -> None:
    task = load(BENCHMARK, bpe_tokenizer, cache)
    for request, row in zip(task.requests, raw("test"), strict=True):
        assert request.context + request.question == (
            row["question"] + "\nPlease reason step by step, and put your final answer within \\boxed{}."
        )
        assert (request.repeats, request.max_new_tokens) == (8, 8192)
    assert [request.target for request in task.requests] == [("10",), ("1050",)]
    scores, total = task.score(
        {
            ("0", 0, 0): r"12 - 2 = 10, so \boxed{10}",
            ("0", 0, 1): "The answer is 10.",
            ("1", 0, 0): r"\boxed{\$1,050.00}",
            ("1", 0, 1): r"\boxed{1050 \text{ dollars}}",
        }
    )
    assert list(scores.values()) == [1, 0, 1, 1]
    assert total == 0.75


def lm_evals_own(shots: list[dict[str, Any]]) -> Any:
    """lm-eval's own gsm8k over our fixture, its examples given."""
    import datasets

    config = load_yaml(THEIRS, resolve_func=True)
    table = datasets.Dataset.from_list(raw("test"))
    config |= {
        "task": "theirs",
        "tag": None,
        "fewshot_config": {"sampler": "first_n", "samples": shots},
        "fewshot_split": None,
        "training_split": None,
        "custom_dataset": lambda **_: {"test": table},
    }
    return ConfigurableTask(config=config)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("bench", [FEWSHOT, STRICT])
def test_five_examples_are_asked_as_lm_eval_asks(bench: Benchmark, chat: bool, bpe_tokenizer: Any, cache: Path) -> None:
    def render(messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            bpe_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        )

    by_question = {row["question"]: row for row in raw("train")}
    requests = load(bench, bpe_tokenizer, cache, chat=chat).requests
    for request, row in zip(requests, raw("test"), strict=True):
        shots = [by_question[text] for text in re.findall(r"Question: (.*)\n", request.context)]
        assert len({shot["question"] for shot in shots}) == 5
        # What lm-eval's command line and `simple_evaluate` do: with a chat template, turns.
        theirs = lm_evals_own(shots).fewshot_context(
            row,
            num_fewshot=5,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
            chat_template=render,
        )
        assert request.context + request.question == theirs
        asked = f"Question: {row['question']}\nAnswer:"
        assert request.question.startswith(asked)
        assert request.context.count("<|im_start|>user\n") == (6 if chat else 0)
        end = "<|im_end|>\n<|im_start|>assistant\n" if chat else ""
        assert request.question == asked + end
        assert (request.repeats, request.sampling, request.max_new_tokens) == (1, None, 256)
        assert request.until == ("Question:", "</s>", "<|im_end|>")


def test_lm_eval_makes_turns_of_examples_where_it_applies_a_chat_template(tmp_path: Path) -> None:
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.evaluator import simple_evaluate

    assert inspect.signature(simple_evaluate).parameters["fewshot_as_multiturn"].default is True
    for chat in (True, False):
        file = tmp_path / "config.yaml"
        file.write_text(f"model: dummy\ntasks: [gsm8k]\napply_chat_template: {str(chat).lower()}\n")
        assert bool(EvaluatorConfig.from_config(file).fewshot_as_multiturn) is chat


def test_examples_depend_on_seed_and_question_alone(bpe_tokenizer: Any, cache: Path) -> None:
    here, again, other, strict = (
        [request.context for request in load(bench, bpe_tokenizer, cache, seed).requests]
        for bench, seed in ((FEWSHOT, 0), (FEWSHOT, 0), (FEWSHOT, 1), (STRICT, 0))
    )
    assert here == again == strict
    assert here != other
    assert here[0] != here[1]


def test_flexible_and_strict_extraction_are_lm_evals(bpe_tokenizer: Any, cache: Path) -> None:
    given = {
        ("0", 0, 0): " 12-2=<<12-2=10>>10 left.\n#### 10",
        ("0", 0, 1): " She has 10 left.",
        ("0", 0, 2): " It is 10, not 12.",
        ("1", 0, 0): " #### 1,050",
        ("1", 0, 1): " So $1,050.",
        ("1", 0, 2): " I cannot say.",
    }
    flexible, mean = load(FEWSHOT, bpe_tokenizer, cache).score(given)
    assert list(flexible.values()) == [1, 1, 0, 1, 1, 0]
    assert mean == pytest.approx(4 / 6)
    strict, mean = load(STRICT, bpe_tokenizer, cache).score(given)
    assert list(strict.values()) == [1, 0, 0, 1, 0, 0]
    assert mean == pytest.approx(2 / 6)


def test_run(llama_folder: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(cache))
    run = kvbench.run(
        {
            "policy": "snapkv:window=8",
            "budget": "0.2",
            "task": "gsm8k,gsm8k_fewshot,gsm8k_strict",
            "model": llama_folder,
            "samples": 2,
            "max_new_tokens": 6,
            "out": str(tmp_path / "run"),
        }
    )
    assert (run.cells.status == "ok").all()
    assert len(run.cells) == 2 * 3
    counts = run.samples.groupby("task").size()
    assert counts.to_dict() == {"gsm8k": 32, "gsm8k_fewshot": 4, "gsm8k_strict": 4}
