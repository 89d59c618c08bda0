"""What several rooms' tests build on: a byte-level BPE tokenizer with a chat template, and a model.

Nothing here is word-level: what works with these is not bound to the reference model.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile
import uuid
from itertools import islice
from typing import TYPE_CHECKING

os.environ["HF_HUB_OFFLINE"] = "1"
# The user's own caches could hold data that a test expects to be missing.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="kvbench-tests-")
os.environ.pop("HF_HUB_CACHE", None)
os.environ.pop("HF_DATASETS_CACHE", None)
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Two torch threads of several workers spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

import kvbench  # noqa: F401 - before any test imports transformers: torchvision may be broken

atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
settings.load_profile("any machine")

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


LONGEST = ("test_interpreter.py", "test_offline.py", "test_smollm2.py", "test_ray.py")
"""Files with a test of half a minute: the others fill the workers beside them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session")
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 2000 ids, which puts BOS first, with a ChatML-like template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    from kvbench_tasks.synthetic.words import prose

    rng = random.Random(0)
    text = [" ".join(words) for words in islice(prose(rng), 2000)]
    text += [str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(100)]
    text += [str(rng.getrandbits(24)) for _ in range(100)]
    special = ["<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=2000,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    """A stand-in for the reference model's tokenizer: one id per word, BOS first, no template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from kvbench.reference.grammar import BOS, EOS, PAD, UNK, VOCABULARY

    ids = {word: i for i, word in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNK)


@pytest.fixture(scope="session")
def tiny_llama(bpe_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama with random weights for `bpe_tokenizer`: 2 layers, 4 heads, 2 KV heads, float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(bpe_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.15,
        bos_token_id=bpe_tokenizer.bos_token_id,
        eos_token_id=bpe_tokenizer.eos_token_id,
        pad_token_id=bpe_tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def llama_folder(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_llama: LlamaForCausalLM,
    bpe_tokenizer: PreTrainedTokenizerFast,
) -> str:
    """`tiny_llama` with its tokenizer as a local model folder."""
    folder = str(tmp_path_factory.mktemp("models") / "tiny-llama")
    tiny_llama.save_pretrained(folder)
    bpe_tokenizer.save_pretrained(folder)
    return folder
