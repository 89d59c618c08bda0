"""Tiny models with one, two and four query heads per KV head, and a file of questions."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvbench_tasks.synthetic.words import prose
from tests.sweeps import slow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session", params=[slow(1), 2, slow(4)])
def folder(
    request: pytest.FixtureRequest,
    bpe_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """A random Llama of three layers and four heads with G = 1, 2 and 4."""
    return saved(bpe_tokenizer, tmp_path_factory.mktemp("model"), 4 // request.param)


@pytest.fixture(scope="session")
def grouped(bpe_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The one with G = 2."""
    return saved(bpe_tokenizer, tmp_path_factory.mktemp("model"), 2)


def saved(tokenizer: PreTrainedTokenizerFast, path: Path, kv_heads: int) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        head_dim=16,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1024,
        initializer_range=0.15,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(kv_heads)
        LlamaForCausalLM(config).save_pretrained(str(path))
    tokenizer.save_pretrained(str(path))
    return str(path)


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three contexts of about 60 tokens, the first with two questions."""
    rng = random.Random(0)
    rows = []
    for i in range(3):
        context = ". ".join(" ".join(words) for words in islice(prose(rng), 4))
        asked = [" What is green?", " Who has read the letter?"][: 2 - bool(i)]
        rows += [{"context": context, "question": q, "answers": "x", "max_new_tokens": 2} for q in asked]
    file = tmp_path_factory.mktemp("data") / "mine.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)
