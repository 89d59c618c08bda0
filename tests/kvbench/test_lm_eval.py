"""kvbench as a model of lm-eval: the full cache equals `hf`, and an eviction equals a masked forward."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvbench.cli.app import call
from kvbench.engine.implementations import chosen_attention
from kvbench.errors import UserError
from kvbench.lm_eval import KVBenchLM
from kvbench.reference import path as reference_path
from tests.devices import gpu
from tests.kvbench.analysis.perturbation.oracles import Eager

YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}, train: {shots}}}}}
test_split: test
fewshot_split: train
fewshot_config: {{sampler: first_n}}
doc_to_text: "{{{{passage}}}}\\nwhat is the {{{{question}}}} ?\\nanswer :"
"""
CHOICES = """output_type: multiple_choice
num_fewshot: 2
doc_to_choice: options
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_mutual_info}]
"""
TEXT = """output_type: generate_until
doc_to_target: "red"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
filter_list:
  - {name: whole, filter: [{function: take_first}]}
  - {name: words, filter: [{function: regex, regex_pattern: "(\\\\w+)"}, {function: take_first}]}
"""
ROLLING = """output_type: loglikelihood_rolling
doc_to_target: "{{passage}}"
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    words = ["red", "blue one", "green", "a very black one"]
    rows = [
        {
            "passage": " ".join(f"the {thing} number {i} is {words[(i + j) % 4]} ." for j, thing in enumerate("abcd")),
            "question": "abcd"[i % 4],
            "options": words,
            "label": i % 4,
        }
        for i in range(6)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows[:-2])))
    (folder / "shots.jsonl").write_text("\n".join(map(json.dumps, rows[-2:])))
    for name, body in {"mc": CHOICES, "text": TEXT, "rolling": ROLLING}.items():
        head = YAML.format(name=f"my_{name}", rows=folder / "rows.jsonl", shots=folder / "shots.jsonl")
        (folder / f"{name}.yaml").write_text(head + body)
    return folder


def evaluate(tasks: Path, model: Any, *names: str, **options: Any) -> Any:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(
        model=model, tasks=[*names], task_manager=manager, bootstrap_iters=0, log_samples=True, limit=4, **options
    )


@pytest.fixture(scope="module")
def expected(tasks: Path) -> Any:
    model = HFLM(pretrained=str(reference_path()), device="cpu", dtype="float32", batch_size=2)
    return evaluate(tasks, model, "my_mc", "my_text", "my_rolling")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"moment": "context", "context": "fewshot"},
        {"moment": "context", "policy": "snapkv", "budget": 1.0},
        {"moment": "context", "policy": "snapkv", "budget": 1.0, "device": "cuda"},
    ],
)
def test_a_cache_that_keeps_everything_equals_hf(tasks: Path, expected: Any, settings: dict[str, Any]) -> None:
    names = ["my_mc", "my_text"] + ["my_rolling"] * (not settings)
    settings = {"device": "cpu", "dtype": "float32", "batch_size": 3, **settings}
    with gpu() if settings["device"] == "cuda" else nullcontext():
        found = evaluate(tasks, KVBenchLM("reference", **settings), *names)
    for name in names:
        for mine, theirs in zip(found["samples"][name], expected["samples"][name], strict=True):
            for one, other in zip(mine["filtered_resps"], theirs["filtered_resps"], strict=True):
                if isinstance(other, str):
                    assert one == other
                else:
                    assert one == pytest.approx(other, abs=1e-4)
        for metric, value in expected["results"][name].items():
            assert found["results"][name][metric] == (pytest.approx(value) if isinstance(value, float) else value)


def test_an_eviction_equals_a_masked_forward_choice_by_choice(tasks: Path) -> None:
    model = KVBenchLM("reference", device="cpu", dtype="float32", policy="adakv:window=4", budget=0.3, moment="context")
    contexts: list[tuple[tuple[int, ...], list[torch.Tensor]]] = []
    compress, asked = model._compress, model._loglikelihood_tokens

    def recorded(token_ids: Any) -> Any:
        cache = compress(token_ids)
        kept = [mask[0] for mask in cache.kept() if mask is not None]
        contexts.append((tuple(token_ids), kept))
        return cache

    requests: list[Any] = []

    def seen(given: list[Any], **options: Any) -> Any:
        requests.extend(given)
        return asked(given, **options)

    model._compress, model._loglikelihood_tokens = recorded, seen  # type: ignore[method-assign]
    evaluate(tasks, model, "my_mc")
    model._compress, model._loglikelihood_tokens = compress, asked  # type: ignore[method-assign]
    measured = model._loglikelihood_tokens(requests)
    eager = Eager(str(reference_path()))
    compared = 0
    for (_, context_ids, continuation), (total, greedy) in zip(requests, measured, strict=True):
        ours = [entry for entry in contexts if len(entry[0]) < len(context_ids)]
        ours = [entry for entry in ours if entry[0] == tuple(context_ids[: len(entry[0])])]
        if not ours:  # the unconditional choices of acc_mutual_info
            continue
        token_ids, kept = max(ours, key=lambda entry: len(entry[0]))
        assert not all(bool(mask.all()) for mask in kept)
        rest = [*context_ids[len(token_ids) :], *continuation[:-1]]
        last, _, _ = eager.run([token_ids, rest], kept)
        logs = last.logits[0, -len(continuation) :].log_softmax(-1)
        chosen = logs.gather(1, torch.tensor(continuation)[:, None])
        assert total == pytest.approx(float(chosen.sum()), abs=2e-4)
        assert greedy == bool((logs.argmax(-1) == torch.tensor(continuation)).all())
        compared += 1
    assert compared == 16


def test_prompts_that_share_their_examples_are_prefilled_once(tasks: Path) -> None:
    model = KVBenchLM("reference", device="cpu", policy="snapkv", budget=0.5, moment="context", context="fewshot")
    compress, lengths = model._compress, []

    def counted(token_ids: Any) -> Any:
        lengths.append(len(token_ids))
        return compress(token_ids)

    model._compress = counted  # type: ignore[method-assign]
    evaluate(tasks, model, "my_mc")
    assert len(lengths) == 1  # unconditional choices have no context at all


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"moment": "decode"}, "--moment decode; use context or question"),
        ({"context": "documnt"}, "did you mean document"),
        ({"policy": "snapvk"}, "did you mean snapkv"),
        ({"policy": "divprune"}, "prunes images"),
        ({"budget": 1.5}, "budget"),
        ({"attn": "eagr"}, "unknown attn 'eagr'; did you mean eager"),
        ({"policy": "snapkv", "buget": 0.5}, "no argument 'buget'; did you mean budget"),
        ({"max_lenght": 512}, "no argument 'max_lenght'; did you mean max_length"),
        ({"policy": "snapkv"}, "policy=snapkv needs a budget"),
    ],
)
def test_bad_settings_are_refused_before_a_model_is_loaded(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        KVBenchLM("no/such_model", **settings)


def test_what_has_no_context_is_refused_in_one_line(tasks: Path) -> None:
    model = KVBenchLM("reference", device="cpu", policy="snapkv", budget=0.5, attn="eager")
    assert chosen_attention(model.model) == "eager"
    with pytest.raises(UserError, match=r"my_rolling measures whole texts .*use policy=full"):
        evaluate(tasks, model, "my_rolling")


def test_settings_that_nothing_follows_are_refused(tasks: Path) -> None:
    model = KVBenchLM("reference", device="cpu", policy="snapkv", budget=0.5)
    with pytest.raises(UserError, match=r"my_text: generation_kwargs: num_beams=3 is not followed; there are until"):
        evaluate(tasks, model, "my_text", gen_kwargs="num_beams=3")


@pytest.mark.slow
def test_the_command_is_lm_evals_own(
    tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["lm-eval", "run", "--model", "kvbench", "--tasks", "my_mc", "--include_path", str(tasks)]
    settings = "pretrained=reference,policy=snapkv:window=8,budget=0.5,moment=context,context=fewshot"
    assert call([*arguments, "--model_args", settings, "--device", "cpu", "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert "|my_mc|" in out and "snapkv:window=8" in out
    assert call([*arguments, "--model_args", "policy=snapvk", "--device", "cpu"]) == 2
    assert "did you mean snapkv" in capsys.readouterr().err
