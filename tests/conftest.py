"""What several rooms' tests build on: a byte-level BPE tokenizer with a chat template, and a model.

Nothing here is word-level: what works with these is not bound to the reference model.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from kvbench.engine import import_hook
from tests.own_tasks import write_own_tasks
from tests.tiny import byte_tokenizer, random_llama

atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
settings.load_profile("any machine")

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.abc import Loader

    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

LONGEST = ("test_interpreter.py", "test_offline.py", "test_lm_eval_truth.py", "test_ray.py")
"""Files with a slow test of half a minute: the others fill the workers beside them."""


def pytest_collection_finish() -> None:
    """Spare every later collection of garbage the modules and tests, which live to the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


def _build_once(loader: Loader, module: Any) -> None:
    """Let lm-eval read the 13,000 YAML files that are installed with it once in a process: ten seconds each time."""
    loader.exec_module(module)
    build = module.TaskIndex.build
    installed_folder = Path(module.__file__).parent

    @functools.cache
    def installed(**options: bool) -> dict[str, Any]:
        return dict(build([installed_folder], **options))

    def build_once(paths: Iterable[Path], **options: bool) -> dict[str, Any]:
        index: dict[str, Any] = {}
        for folder in paths:
            index |= installed(**options) if folder == installed_folder else build([folder], **options)
        return index

    module.TaskIndex.build = staticmethod(build_once)


import_hook.at_import("lm_eval.tasks._index", _build_once)


@pytest.fixture(scope="session", autouse=True)
def described_environment() -> Iterator[None]:
    """Let lm-eval, which asks pip for all packages in every evaluation, ask once: a second each."""
    from torch.utils import collect_env

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collect_env, "get_pretty_env_info", functools.cache(collect_env.get_pretty_env_info))
        yield


@pytest.fixture(scope="session")
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 2000 ids, which puts BOS first, with a ChatML-like template."""
    return byte_tokenizer(2000)


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
    return random_llama(bpe_tokenizer)


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


@pytest.fixture(scope="session")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's own tasks of lm-eval."""
    return write_own_tasks(tmp_path_factory.mktemp("own_tasks"))
