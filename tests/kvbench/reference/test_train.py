"""Training reduces the loss, and a run that was interrupted ends like one that was not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from kvbench import reference
from kvbench.reference import evaluate, grammar, samples, train
from kvbench.reference.curriculum import Feed, Stage
from kvbench.reference.samples import Knobs

_FEEDS = (
    Feed(512, (64,), {"multikey": 1.0, "repeat": 1.0}, 0.8),
    Feed(256, (128,), {"cwe": 1.0, "fwe": 1.0}, 0.2),
)
_SHORT = (
    Stage("first", 20 * 768, (1.0, 1.0), _FEEDS, Knobs(questions=4)),
    Stage("second", 40 * 768, (1.0, 0.1), _FEEDS),
)


def _tiny() -> Qwen3Config:
    config = train.model_config()
    config.update(
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    )
    config.layer_types = ["full_attention"] * 2
    return config


def _loss(folder: Path) -> float:
    """Return the loss on answers of the model in `folder`, on a batch it has not seen."""
    rng = np.random.default_rng(99)
    batch = samples.batch(rng, 8, 64, _FEEDS[0].mix, Knobs())
    return train.answer_loss(Qwen3ForCausalLM.from_pretrained(folder), batch, rng)[1]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Run on one thread: sums in a fixed order, so that equal runs are equal to the bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_shipped_model_has_a_little_over_a_million_parameters() -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(train.model_config())
    assert 1_000_000 < sum(p.numel() for p in model.parameters()) < 1_300_000


def test_training_reduces_the_loss_and_resumes_exactly(tmp_path: Path) -> None:
    whole = train.train(tmp_path / "whole", _SHORT, _tiny())
    (line,) = (tmp_path / "whole" / "training.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 50
    assert _loss(whole) < np.log(1024) - 0.4

    train.train(tmp_path / "cut", _SHORT, _tiny(), max_steps=30)
    cut = train.train(tmp_path / "cut", _SHORT, _tiny())
    expected, found = (load_file(f / "model.safetensors") for f in (whole, cut))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "cut" / "latest")
    assert model.config.model_type == "qwen3"
    assert not model.generation_config.do_sample
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "cut" / "latest")
    assert len(tokenizer) == 1024


def test_muon_agrees_with_torchs_own() -> None:
    torch.manual_seed(0)
    start = torch.randn(24, 8)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    first = train.Muon([ours], lr=0.02)
    second = torch.optim.Muon(
        [theirs], lr=0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original"
    )
    for _ in range(3):
        gradient = torch.randn(24, 8)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    # torch's rounds to bfloat16 on the way.
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


@pytest.mark.parametrize("task", list(evaluate.TASKS))
def test_right_answers_score_one(task: str) -> None:
    for n in range(3):
        case = evaluate.case(task, 512, np.random.default_rng(n))
        assert len(case.prompt) + len(case.answer) <= 512
        assert evaluate.judge(case, case.answer) == (1.0, True)
        assert evaluate.judge(case, [grammar.STOP]) == (0.0, False)


def test_batched_responses_equal_generate() -> None:
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(_tiny()).eval()
    prompts = torch.randint(160, 600, (3, 20))
    responses = evaluate.respond(model, prompts, 6)
    whole = model.generate(prompts, max_new_tokens=6, do_sample=False, eos_token_id=5)
    for response, row in zip(responses, whole[:, 20:].tolist(), strict=True):
        assert row[: len(response)] == response
        assert len(response) == 6 or response[-1] == samples.IDS[grammar.STOP]


def test_shipped_model_answers() -> None:
    folder = reference.path()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.convert_ids_to_tokens(list(range(1024))) == list(grammar.VOCABULARY)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    for task in ("single_2", "multikey_1"):
        assert evaluate.evaluate(model, task, 512, 8)["score"] >= 0.9
