"""A checkpoint that is incomplete, damaged or contradictory is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kvbench import cli
from kvbench.engine.loading import load_config, load_model, load_tokenizer
from kvbench.errors import UserError, first_lines
from kvbench.named import model_digest
from kvbench.reference import path as reference

WEIGHTS = "model.safetensors"
Edit = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the reference model that a test can damage."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    shutil.copytree(reference(), tmp_path / "model")
    return tmp_path / "model"


def edited(folder: Path, edit: Edit) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load(folder: Path) -> Any:
    return load_model(str(folder), None, torch.device("cpu"), torch.float32)


def without_an_mlp(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "layers.1.mlp" in name]:
        del tensors[name]


def with_a_stranger(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.ones(2, 2)


def with_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(3)


def with_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = torch.nan


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (without_an_mlp, r"lacks weights of the model: model\.layers\.1\.mlp\.down_proj\.weight, "),
        (with_a_stranger, r"holds weights that the model does not have: model\.layers\.9\.mlp"),
        (with_another_shape, r"of another shape than the model's: model\.norm\.weight"),
        (with_nan, r"NaN or infinite: model\.layers\.0\.self_attn\.q_proj\.weight"),
    ],
)
def test_a_wrong_checkpoint_names_its_tensors(folder: Path, edit: Edit, says: str) -> None:
    edited(folder, edit)
    with pytest.raises(UserError, match=says) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_tied_weights_are_not_missing(folder: Path) -> None:
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert "lm_head.weight" not in load_file(folder / WEIGHTS)
    load(folder)


@pytest.mark.parametrize("content", [b"", b"half", b"\xff" * 4096])
def test_damaged_weights_are_one_line(folder: Path, content: bytes) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2] if content == b"half" else content)
    with pytest.raises(UserError, match="cannot be loaded: SafetensorError") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_attention_heads": 5},
        {"num_key_value_heads": 0},
        {"hidden_size": "x"},
        {"layer_types": ["full_attention"]},
        {"num_hidden_layers": 7},
    ],
)
def test_a_config_that_contradicts_itself_is_one_line(folder: Path, wrong: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(UserError, match=f"model {folder}") as caught:
        load(folder)
    assert "\n" not in str(caught.value) and "above report" not in str(caught.value)


def shard(folder: Path, name: str) -> None:
    names = list(load_file(folder / WEIGHTS))
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).rename(target)
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_an_index_may_not_name_a_file_outside_its_folder(folder: Path) -> None:
    shard(folder, "../elsewhere.safetensors")
    with pytest.raises(UserError, match=r"names '\.\./elsewhere\.safetensors', which is outside"):
        load(folder)


def test_an_index_may_not_name_a_file_that_is_missing(folder: Path) -> None:
    shard(folder, "part.safetensors")
    (folder / "part.safetensors").unlink()
    with pytest.raises(UserError, match=r"names 'part\.safetensors', which is missing"):
        load_config(str(folder))


def test_the_digest_covers_shards_in_subfolders(folder: Path) -> None:
    shard(folder, "shards/part.safetensors")
    load(folder)
    before = model_digest(str(folder))
    tensors = load_file(folder / "shards/part.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "shards/part.safetensors", metadata={"format": "pt"})
    assert model_digest(str(folder)) != before


def test_a_model_without_a_tokenizer_says_so(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(UserError, match="tokenizer") as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


def test_a_family_that_needs_a_tokenizer_file_says_what_to_do(tmp_path: Path) -> None:
    AutoConfig.for_model("mistral").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no tokenizer that can be loaded; copy the tokenizer's files"):
        load_tokenizer(str(tmp_path))


def test_the_command_exits_with_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edited(folder, without_an_mlp)
    flags = ["--policy", "random", "--task", "vt", "--length", "128", "--samples", "1"]
    out = str(folder.parent / "run")
    assert cli.call(["run", *flags, "--model", str(folder), "--out", out]) == 2
    assert "lacks weights of the model" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert cli.call(["run", "--policy", "knorm", "--task", "vt", "--model", str(folder)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"model {folder} has no usable tokenizer" in said
    assert "tokenizer.json" in said


def test_no_message_points_to_a_report_that_is_not_shown() -> None:
    told = "We could not convert the weights. For details look at the `X` entries of the above report!"
    assert first_lines(RuntimeError(told)) == ("RuntimeError: We could not convert the weights.")


@pytest.mark.parametrize("problem", ["cannot be reached (test)", ""])
def test_a_hub_that_cannot_be_reached_is_not_asked_again(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[dict[str, Any]] = []

    def from_pretrained(name: str, **options: Any) -> None:
        requests.append(options)
        raise OSError("no such file")

    monkeypatch.setattr("kvbench.engine.loading.unreachable", lambda: problem)
    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(UserError, match="model org/model cannot be loaded: ") as refused:
        load_config("org/model")
    assert [options.get("local_files_only", False) for options in requests] == [bool(problem)]
    assert ("the hub cannot be reached (test); use --model" in str(refused.value)) == bool(problem)
    assert "\n" not in str(refused.value)
