"""The evaluation of the reference model: cases, responses and scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from kvbench import reference
from kvbench.reference import grammar, samples
from scripts.reference_model import evaluate


@pytest.mark.parametrize("task", list(evaluate.TASKS))
def test_right_answers_score_one(task: str) -> None:
    for n in range(3):
        case = evaluate.case(task, 512, np.random.default_rng(n))
        assert len(case.prompt) + len(case.answer) <= 512
        assert evaluate.judge(case, case.answer) == (1.0, True)
        assert evaluate.judge(case, [grammar.STOP]) == (0.0, False)


def test_a_response_ends_with_its_first_full_stop(tiny_config: Qwen3Config) -> None:
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(tiny_config).eval()
    prompts = torch.randint(160, 600, (3, 20))
    stop = samples.IDS[grammar.STOP]
    for row, response in zip(prompts, evaluate.respond(model, prompts, 6), strict=True):
        ids = row[None]
        for token in response:  # without a cache, one row at a time
            assert stop not in ids[0, 20:]
            assert int(model(ids).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
        assert len(response) == 6 or response[-1] == stop


def test_shipped_model_answers() -> None:
    folder = reference.path()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.convert_ids_to_tokens(list(range(1024))) == list(grammar.VOCABULARY)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    for task in ("single_2", "multikey_1"):
        assert evaluate.evaluate(model, task, 512, 8)["score"] >= 0.9
