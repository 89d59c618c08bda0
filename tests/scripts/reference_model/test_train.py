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

from kvbench.reference import grammar
from kvbench.reference.samples import Knobs
from scripts.reference_model import train
from scripts.reference_model.batches import make_batch
from scripts.reference_model.curriculum import Feed, Stage

_FEEDS = (
    Feed(512, (64,), {"multikey": 1.0, "repeat": 1.0}, 0.8),
    Feed(256, (128,), {"cwe": 1.0, "fwe": 1.0}, 0.2),
)
_SHORT = (
    Stage("first", 20 * 768, (1.0, 1.0), _FEEDS, Knobs(questions=4)),
    Stage("second", 40 * 768, (1.0, 0.1), _FEEDS),
)


def _loss(folder: Path) -> float:
    """Return the loss on answers of the model in `folder`, on a batch it has not seen."""
    rng = np.random.default_rng(99)
    batch = make_batch(rng, 8, 64, _FEEDS[0].mix, Knobs())
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


@pytest.mark.slow
def test_training_reduces_the_loss_and_resumes_exactly(tiny_config: Qwen3Config, tmp_path: Path) -> None:
    whole = train.train(tmp_path / "whole", _SHORT, tiny_config)
    (line,) = (tmp_path / "whole" / "training.jsonl").read_text().splitlines()
    assert json.loads(line)["step"] == 50
    assert _loss(whole) < np.log(1024) - 0.4

    train.train(tmp_path / "cut", _SHORT, tiny_config, max_steps=30)
    cut = train.train(tmp_path / "cut", _SHORT, tiny_config)
    expected, resumed = (load_file(f / "model.safetensors") for f in (whole, cut))
    assert expected.keys() == resumed.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, resumed[name]), name

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
    second = torch.optim.Muon([theirs], lr=0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original")
    for _ in range(3):
        gradient = torch.randn(24, 8)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    # torch's rounds to bfloat16 on the way.
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)


def test_text_round_trips_through_the_saved_tokenizer(tmp_path: Path) -> None:
    train.build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    words = grammar.VOCABULARY
    text = " ".join(words)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == list(range(len(words)))
    assert tokenizer.decode(ids) == text
    assert tokenizer("let . #1")["input_ids"] == [1, words.index("let"), 5, 64]
    assert tokenizer("unheard")["input_ids"] == [1, words.index("<unk>")]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
