"""A GGUF file becomes the model that was written into it; what cannot become one is one line."""

from __future__ import annotations

import copy
import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

import kvbench
from kvbench import artifacts, cli
from kvbench.engine import gguf as conversion
from kvbench.engine.loading import load_config, load_model, load_tokenizer
from kvbench.engine.models import model_info
from kvbench.errors import UserError
from kvbench.files import cache_dir
from kvbench.named import model_digest, resolve_model
from tests.tiny import byte_tokenizer, random_llama

from ..gguf_files import dequantised_q8_0, write_llama

CPU = torch.device("cpu")
TEXT = "The special number is 1234567.\n\n2. the  34 words"
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def bpe_tokenizer() -> Any:
    """Of few ids: every reading of a file takes as long as it has tokens."""
    return byte_tokenizer(300)


@pytest.fixture(scope="module")
def tiny_llama(bpe_tokenizer: Any) -> Any:
    return random_llama(bpe_tokenizer)


@pytest.fixture(scope="module")
def llama_folder(tiny_llama: Any, bpe_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("models") / "tiny-llama")
    tiny_llama.save_pretrained(folder)
    bpe_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def write(tmp_path: Path, tiny_llama: Any, bpe_tokenizer: Any, cache: Path) -> Write:
    def write(name: str = "tiny.gguf", **options: Any) -> Path:
        return write_llama(tmp_path / name, tiny_llama, bpe_tokenizer, **options)

    return write


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(str(path), None, CPU, dtype)


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"model {path}: ")
    assert not list(cache_dir().rglob("*.part")) and not list(cache_dir().rglob("*.safetensors"))
    return message.removeprefix(f"model {path}: ")


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_written_ones(write: Write, tiny_llama: Any, dtype: torch.dtype) -> None:
    model = load(write(), dtype)
    weights = tiny_llama.state_dict()
    assert model.state_dict().keys() == weights.keys()
    for name, weight in model.state_dict().items():
        assert weight.dtype == dtype
        assert torch.equal(weight, weights[name].to(dtype)), name
    if dtype == torch.float32:
        ids = torch.arange(5, 25)[None]
        assert torch.equal(model(ids).logits, tiny_llama(ids).logits)


def test_quantised_weights_are_dequantised(write: Write, tiny_llama: Any) -> None:
    model = load(write(quantised=True))
    for name, weight in tiny_llama.state_dict().items():
        expected = dequantised_q8_0(weight) if weight.ndim == 2 else weight
        assert torch.equal(model.state_dict()[name], expected), name
    assert not hasattr(model.config, "quantization_config")


def test_tied_weights_stay_tied(tmp_path: Path, tiny_llama: Any, bpe_tokenizer: Any, cache: Path) -> None:
    path = write_llama(tmp_path / "tied.gguf", tiny_llama, bpe_tokenizer, leave_out="lm_head")
    model = load(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tiny_llama.model.embed_tokens.weight)


def test_shapes_are_in_the_config(write: Write, tiny_llama: Any) -> None:
    config = load_config(str(write()))
    for key in (
        "num_hidden_layers",
        "num_key_value_heads",
        "max_position_embeddings",
        "vocab_size",
    ):
        assert getattr(config, key) == getattr(tiny_llama.config, key)
    assert config.rope_parameters == tiny_llama.config.rope_parameters
    assert not list(cache_dir().rglob("*.safetensors"))  # planning converts no weights


# --- tokenizer ------------------------------------------------------------------------------------


def test_the_tokenizer_is_the_written_one(write: Write, bpe_tokenizer: Any) -> None:
    tokenizer = load_tokenizer(str(write()))
    assert tokenizer(TEXT)["input_ids"] == bpe_tokenizer(TEXT)["input_ids"]
    messages = [{"role": "user", "content": TEXT}]
    rendered = [
        t.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] for t in (tokenizer, bpe_tokenizer)
    ]
    assert rendered[0] == rendered[1]
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(tokenizer, role) == getattr(bpe_tokenizer, role)


def test_digits_are_split_off_where_the_file_says_so(tmp_path: Path, cache: Path) -> None:
    whole = byte_tokenizer(2000)  # enough ids for numbers of several digits
    splitting = copy.deepcopy(whole)
    splitting.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    expected = splitting(TEXT)["input_ids"]
    assert expected != whole(TEXT)["input_ids"]
    path = write_llama(tmp_path / "tiny.gguf", random_llama(whole), whole, pre="smollm")
    assert load_tokenizer(str(path))(TEXT)["input_ids"] == expected


# --- names, digests and copies --------------------------------------------------------------------


def test_the_digest_is_that_of_the_file_alone(write: Write, tmp_path: Path) -> None:
    path = write()
    expected = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    load(path)
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(path, folder / "other.gguf")
    assert model_digest(str(path)) == model_digest(str(folder)) == expected


def test_a_file_is_converted_once(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    load(path)
    monkeypatch.setattr(conversion, "_read_header", lambda *_: pytest.fail("it converts again"))
    load(path.rename(path.with_name("renamed.gguf")))


@pytest.mark.slow
def test_a_changed_file_is_converted_again(write: Write, tiny_llama: Any) -> None:
    load(write())
    model = load(write(quantised=True))
    assert not torch.equal(model.lm_head.weight, tiny_llama.lm_head.weight)


def test_a_folder_stands_for_its_only_file(write: Write, tmp_path: Path) -> None:
    path = write()
    assert resolve_model(str(tmp_path)) == str(path)
    write("more.gguf")
    with pytest.raises(UserError, match=r"several GGUF files \(more\.gguf, tiny\.gguf\)"):
        resolve_model(str(tmp_path))
    path.unlink()
    (tmp_path / "more.gguf").unlink()
    with pytest.raises(UserError, match=r"the folder has no config\.json and no GGUF file"):
        resolve_model(str(tmp_path))


def test_a_folder_with_a_config_is_not_a_gguf_model(write: Write, llama_folder: str) -> None:
    folder = write().parent / "whole"
    shutil.copytree(llama_folder, folder)
    shutil.copy(folder.parent / "tiny.gguf", folder)
    assert resolve_model(str(folder)) == str(folder)


def test_a_missing_file_is_not_taken_for_a_hub_id() -> None:
    with pytest.raises(UserError, match=r"model models/none\.gguf: no such file"):
        resolve_model("models/none.gguf")


def test_artifacts_are_found_by_the_name_of_the_file(write: Write, tmp_path: Path) -> None:
    path = write("Tiny.Q8_0.gguf")
    assert model_info(load(path)).name == str(path)
    assert artifacts.slug(str(path)).startswith("Tiny.Q8_0-")
    assert artifacts.slug(str(path)) == artifacts.slug(str(tmp_path))


# --- what is refused ------------------------------------------------------------------------------


def test_what_is_not_gguf_is_refused(write: Write) -> None:
    path = write()
    path.write_bytes(b"PK\x03\x04" + path.read_bytes()[4:])
    assert refused(path) == "tiny.gguf is not a GGUF file"


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused(write: Write, share: float) -> None:
    path = write()
    content = path.read_bytes()
    path.write_bytes(content[: max(4, int(len(content) * share))])
    assert refused(path).startswith("tiny.gguf is truncated, damaged or of an unknown version: ")


def metadata_at(content: bytes, key: str) -> int:
    """Where the type of a metadata value is written."""
    name = key.encode()
    return content.index(len(name).to_bytes(8, "little") + name) + 8 + len(name)


@pytest.mark.parametrize("key", ["tokenizer.ggml.token_type", "tokenizer.ggml.tokens"])
@pytest.mark.parametrize("items", [1 << 23, 1 << 40, (1 << 64) - 1])
def test_an_array_that_claims_more_items_than_the_file_can_hold_is_refused_at_once(
    write: Write, key: str, items: int
) -> None:
    path = write()
    content = bytearray(path.read_bytes())
    at = metadata_at(content, key) + 8  # behind the types of the value and of its items
    content[at : at + 8] = items.to_bytes(8, "little")
    path.write_bytes(content)
    start = time.monotonic()
    message = refused(path)
    assert time.monotonic() - start < 30  # counted item by item, 2^40 would take weeks
    assert message.startswith("tiny.gguf is truncated, damaged or of an unknown version: ")
    assert message.endswith(f"an array of its metadata has {items} items")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("split.count", "three", "split.count has the type str instead of int"),
        ("llama.rope.scaling.type", 7, "llama.rope.scaling.type has the type int instead of str"),
    ],
)
def test_metadata_of_the_wrong_type_is_refused(write: Write, key: str, value: Any, told: str) -> None:
    assert refused(write(more={key: value})) == f"tiny.gguf is damaged: {told}"


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.pre", "tokenizer.ggml.model"])
def test_text_that_became_a_number_is_refused(write: Write, key: str) -> None:
    path = write()
    content = bytearray(path.read_bytes())
    at = metadata_at(content, key)
    content[at : at + 4] = (10).to_bytes(4, "little")  # uint64: the length of the text is its value
    length = int.from_bytes(content[at + 4 : at + 12], "little")
    del content[at + 12 : at + 12 + length]
    path.write_bytes(content)
    assert "\n" not in refused(path)


def test_an_architecture_that_transformers_cannot_read_is_refused(write: Write) -> None:
    message = refused(write(architecture="mysterious"))
    assert message.startswith("transformers ")
    assert "cannot read this GGUF file (architecture mysterious): " in message


@pytest.mark.parametrize(
    "options",
    [
        {"more": {"llama.rope.scaling.type": "linear"}},
        {"extra": {"rope_freqs.weight": np.ones(8, np.float32)}},
        # transformers takes the length of the key for its value.
        {"architecture": "gpt-oss", "more": {"gpt-oss.rope.scaling.type": "yarn"}},
    ],
)
def test_scaled_rotary_embeddings_are_refused(write: Write, options: dict[str, Any]) -> None:
    assert "scales its rotary embeddings" in refused(write(**options))


def test_a_part_of_a_model_is_refused(write: Write) -> None:
    assert "is one part of several" in refused(write(more={"split.count": 3}))


def test_missing_weights_are_refused(write: Write) -> None:
    message = refused(write(leave_out="layers.1.mlp.up_proj"))
    assert message == "the checkpoint lacks weights of the model: model.layers.1.mlp.up_proj.weight"


def test_too_little_disk_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    usage = shutil.disk_usage(path.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    message = refused(path)
    assert message.startswith("the converted copy needs 0.05 GB in ")
    assert message.endswith("free some space, or set KVBENCH_CACHE to another folder")


def test_missing_packages_are_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    monkeypatch.setattr(conversion.importlib.util, "find_spec", lambda name: None)
    expected = "a GGUF file needs gguf and accelerate; run pip install 'kvbench[gguf]'"
    assert refused(path) == expected


# --- the command ----------------------------------------------------------------------------------


def test_a_run_gives_what_the_folder_gives(write: Write, llama_folder: str, tmp_path: Path) -> None:
    path, runs = write(), {}
    for model in (str(path), llama_folder):
        out = str(tmp_path / f"run-{len(runs)}")
        flags = ["--policy", "snapkv", "--budget", "0.5", "--task", "vt", "--length", "512"]
        assert cli.call(["run", *flags, "--samples", "2", "--model", model, "--out", out]) == 0
        runs[model] = kvbench.load(out)
    cells, samples = runs[str(path)]
    assert set(cells["model_revision"]) == {model_digest(str(path))}
    assert list(samples["response"]) == list(runs[llama_folder][1]["response"])
