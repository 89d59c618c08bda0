"""Gates of SeerAttention-R as its authors publish them rate blocks as their code does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.engine.models import model_info
from kvbench.errors import UserError
from kvbench.plugin import Blocks, ModelInfo
from kvbench_policies.gates import load, save
from kvbench_policies.gates.block_gates import BlockGates
from kvbench_policies.gates.convert import main, read_checkpoint
from kvbench_policies.gates.published_blocks import WEIGHTS, convert_blocks, read_settings

from .drawing import llama
from .test_readers import DIM, HEADS, shown, turned

SETTINGS = {
    "seerattn_gate_block_size": 5,
    "seerattn_k_seq_pooling_type": "Kmaxminavg",
    "seerattn_q_head_pooling_type": "Qproj",
    "seerattn_use_rope": True,
}


def published(model: ModelInfo, width: int, *, norms: bool = False, mean: bool = False) -> dict[str, Tensor]:
    """Tensors under the authors' names."""
    g = torch.Generator().manual_seed(4)
    heads, dim, group = model.kv_heads, model.head_dim, model.query_heads // model.kv_heads
    of_query = (heads, dim, width) if mean else (heads, group, dim, width)
    found = {"lm_head.weight": torch.ones(2)}
    for i in range(model.layers):
        name = f"model.layers.{i}.self_attn.attn_gate.attngate_"
        found[name + "linear_q.weight"] = torch.randn(of_query, generator=g)
        found[name + "linear_k.weight"] = torch.randn(heads, 3 * dim, width, generator=g)
        if norms:
            found[name + "qnorm.weight"] = torch.rand(width, generator=g) + 0.5
            found[name + "knorm.weight"] = torch.rand(width, generator=g) + 0.5
    return found


def written(folder: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    torch.save(tensors, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(SETTINGS | settings))
    return folder


def converted(folder: Path, model: ModelInfo) -> BlockGates:
    return convert_blocks(read_checkpoint(folder), model, read_settings(folder))


def normed(x: list[float], weight: list[float]) -> list[float]:
    size = math.sqrt(sum(a * a for a in x) / len(x) + 1e-6)
    return [a / size * w for a, w in zip(x, weight, strict=True)]


def slow_rating(tensors: dict[str, Tensor], v: Blocks, h: int, n: int, k: int) -> float:
    """The logit of a block, number by number, as `AttnGate.forward` has it in a prefill."""
    name = f"model.layers.{v.layer}.self_attn.attn_gate.attngate_"
    of_query, of_key = (tensors[f"{name}linear_{x}.weight"][h].tolist() for x in "qk")
    place, size, group = int(v.query_position[n]), v.key.shape[2], v.query.shape[1]
    plain = [turned(v.query[h, g, n].tolist(), -place) for g in range(group)]
    if tensors[f"{name}linear_q.weight"].dim() == 3:
        plain = [[sum(column) / group for column in zip(*plain, strict=True)]]
        of_query = [of_query]
    width = len(of_key[0])
    query = [0.0] * width
    for own, weight in zip(plain, of_query, strict=True):
        for i, number in enumerate(own):
            for o in range(width):
                query[o] += number * weight[i][o]
    keys = [turned(v.key[h, k, e].tolist(), -(k * size + e)) for e in range(size)]
    columns = list(zip(*keys, strict=True))
    pooled = [f(x) for f in (max, min, lambda x: sum(x) / size) for x in columns]
    key = [sum(number * of_key[i][o] for i, number in enumerate(pooled)) for o in range(width)]
    if f"{name}qnorm.weight" in tensors:
        query = normed(query, tensors[f"{name}qnorm.weight"].tolist())
        key = normed(key, tensors[f"{name}knorm.weight"].tolist())
    query, key = turned(query, place), turned(key, k * size)
    return sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(width)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("width", [4, DIM])
@pytest.mark.parametrize(("norms", "mean"), [(False, False), (True, False), (True, True)])
def test_a_published_gate_rates_as_the_authors_code(
    group: int, width: int, norms: bool, mean: bool, tmp_path: Path
) -> None:
    v = shown(group, 5, 23)
    tensors = published(v.model, width, norms=norms, mean=mean)
    gates = converted(written(tmp_path, tensors), v.model)
    again = load(save(gates, tmp_path / "out"), v.model)
    assert isinstance(again, BlockGates)
    assert (again.block, again.config.gate_dim, again.config.norm) == (5, width, norms)
    with torch.no_grad():
        rating = again.rate(v)
    for h in range(HEADS):
        for n in range(3):
            for k in range(4):
                expected = slow_rating(tensors, v, h, n, k)
                assert float(rating[h, n, k]) == pytest.approx(expected, rel=1e-3, abs=1e-3)


NAME = "model.layers.1.self_attn.attn_gate.attngate_"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NAME + "linear_q.weight": None}, "layer 1: attngate_linear_q.weight is missing"),
        ({NAME + "linear_k.weight": None}, "layer 1: attngate_linear_k.weight is missing"),
        (
            {NAME + "linear_k.weight": torch.ones(2, 16, 4)},
            "layer 1: attngate_linear_k.weight is [2, 16, 4], but this model needs [2, 24, 4]",
        ),
        ({NAME + "linear_q.weight": torch.ones(2, 4, 8, 4)}, "this model needs [2, 2, 8, 4]"),
        ({NAME + "qnorm.weight": torch.ones(4)}, "layer 1: attngate_qnorm.weight is unknown"),
        ({NAME + "linear_v.weight": torch.ones(4)}, "layer 1: attngate_linear_v.weight is unknown"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    model = shown(2, 5, 23).model
    tensors = {**published(model, 4), **change}
    written(tmp_path, {k: x for k, x in tensors.items() if x is not None})
    with pytest.raises(UserError) as error:
        converted(tmp_path, model)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seerattn_k_seq_pooling_type": "Kmaxmin"}, "key pooling Kmaxmin is not supported"),
        ({"seerattn_use_rope": False}, "without RoPE"),
        ({"seerattn_gate_block_size": 0}, "block=0 is invalid"),
    ],
)
def test_gates_that_kvbench_does_not_have_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = shown(2, 5, 23).model
    written(tmp_path, published(model, 4), **settings)
    with pytest.raises(UserError, match=message):
        converted(tmp_path, model)


def test_a_wider_gate_than_the_head_is_refused(tmp_path: Path) -> None:
    model = shown(2, 5, 23).model
    with pytest.raises(UserError, match="gate_dim=16 is invalid"):
        converted(written(tmp_path, published(model, 16)), model)


class Harmful:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("harmed"),))


def test_no_code_of_a_checkpoint_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model.layers.0.attn_gate.attngate_x": Harmful()}, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match="is not a file of plain tensors"):
        read_checkpoint(tmp_path)
    assert not (tmp_path / "harmed").exists()
    torch.save({"model.layers.0.attn_gate.attngate_x": 3}, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match="holds more than tensors"):
        read_checkpoint(tmp_path / WEIGHTS)


@pytest.mark.usefixtures("cache")
def test_the_program_converts_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama(2)
    model.save_pretrained(tmp_path / "model")
    info = model_info(model)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    written(theirs, published(info, info.head_dim, norms=True))
    arguments = [str(theirs), str(tmp_path / "out"), "--model", str(tmp_path / "model")]
    assert main(arguments) == 0
    gates = load(tmp_path / "out", info)
    assert gates.config.training == {"converted_from": "theirs"}
    assert gates.config.base_revision
    capsys.readouterr()
    few = {k: x for k, x in published(info, 4).items() if ".layers.0." not in k}
    written(theirs, few)
    assert main(arguments) == 2
    assert f"has gates for {info.layers - 1} layers" in capsys.readouterr().err
    (theirs / WEIGHTS).unlink()
    (theirs / "config.json").unlink()
    save_file(published(info, info.head_dim), theirs / "model.safetensors")
    assert main(arguments) == 2
    assert "it defines the block size" in capsys.readouterr().err
