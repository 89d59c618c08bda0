"""Gates made of other projects' checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbench.engine.models import model_info
from kvbench.errors import UserError
from kvbench_policies.gates import load, save
from kvbench_policies.gates.convert import convert, main, read_checkpoint

from . import oracles_retention as o
from .drawing import llama
from .test_gates import MODEL, inputs

pytestmark = pytest.mark.usefixtures("seeded")


def checkpoint(layers: int = 3, *, biased: bool, linear: bool = False) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(2)
    found = {"model.embed_tokens.weight": torch.ones(4, 24)}
    for i in range(layers):
        name = f"model.layers.{i}.self_attn.retention_gate."
        if not linear:
            found[name + "linear1.weight"] = torch.randn(6, 24, generator=g)
        found[name + "linear2.weight"] = torch.randn(2, 24 if linear else 6, generator=g)
        found[name + "bias"] = torch.full((1,), 8.0) if biased else torch.tensor([8.0, 7.5])
        if biased:
            found[name + "linear1.bias"] = torch.randn(6, generator=g)
            found[name + "linear2.bias"] = torch.randn(2, generator=g)
    return found


@pytest.mark.parametrize(("biased", "linear"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_public_checkpoint_is_converted(biased: bool, linear: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {k: v.to(dtype) for k, v in checkpoint(biased=biased, linear=linear).items()}
    half = len(tensors) // 2
    for part, names in enumerate((list(tensors)[:half], list(tensors)[half:])):
        save_file({n: tensors[n] for n in names}, tmp_path / f"model-{part}.safetensors")
    gates = convert(read_checkpoint(tmp_path), MODEL)
    again = load(save(gates, tmp_path / "gates"), MODEL)
    assert (again.config.kind, again.config.gating) == ("trimkv", "multiplicative")
    hidden = inputs()[0]
    for i in range(3):
        own = {k.replace(f"model.layers.{i}.self_attn.retention_gate", f"layers.{i}"): v for k, v in tensors.items()}
        weights = {k: v.float().numpy() for k, v in own.items()}
        found = again.log_beta(i, hidden)
        for row in range(2):
            for t in range(9):
                logits = o.gate(hidden[row, t].double().numpy(), weights, i)
                want = [o.log_sigmoid(float(z)) for z in logits]
                assert found[row, :, t].tolist() == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.self_attn.retention_gate.linear2.weight": None}, "is missing"),
        (
            {"model.layers.1.self_attn.retention_gate.linear2.weight": torch.ones(3, 6)},
            "layer 1: linear2.weight is [3, 6], but this model needs [2, 6]",
        ),
        (
            {"model.layers.1.self_attn.retention_gate.linear1.bias": torch.ones(5)},
            "linear1.bias is [5]",
        ),
        (
            {"model.layers.1.self_attn.retention_gate.bias": torch.ones(3)},
            "has 3 numbers instead of 1 or 2",
        ),
        ({"model.layers.1.self_attn.retention_gate.norm": torch.ones(3)}, "norm is unknown"),
        (
            {"model.layers.3.self_attn.retention_gate.bias": torch.ones(2)},
            "has gates for 4 layers, but model made/up has 3",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_one_line(
    change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    tensors: dict[str, Any] = {**checkpoint(biased=True), **change}
    save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / "a.safetensors")
    with pytest.raises(UserError) as error:
        convert(read_checkpoint(tmp_path / "a.safetensors"), MODEL)
    assert message in str(error.value)


@pytest.mark.parametrize("linear", [False, True])
def test_a_published_surrogate_of_kvzap_is_converted(linear: bool, tmp_path: Path) -> None:
    """It says what torch's own layers say with the same weights."""
    layers = torch.nn.ModuleList(
        torch.nn.Linear(24, 2)
        if linear
        else torch.nn.Sequential(torch.nn.Linear(24, 6), torch.nn.GELU(), torch.nn.Linear(6, 2))
        for _ in range(3)
    )
    save_file(
        {f"layers.{name}": x.detach() for name, x in layers.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    gates = convert(read_checkpoint(tmp_path), MODEL)
    again = load(save(gates, tmp_path / "gates"), MODEL)
    assert (again.config.kind, again.config.activation) == ("kvzap", "gelu")
    assert again.config.gate == ("linear" if linear else "mlp")
    hidden = inputs()[0]
    for i, layer in enumerate(layers):
        torch.testing.assert_close(again.score(i, hidden), layer(hidden).transpose(1, 2))


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_published_retaining_heads_of_locret_are_converted(suffix: str, tmp_path: Path) -> None:
    """They say what the authors' `fc2(act(fc1(cat(q, k, v))))` says with the same weights."""
    width = (MODEL.query_heads + 2 * MODEL.kv_heads) * MODEL.head_dim
    g = torch.Generator().manual_seed(3)
    tensors = {"model.layers.0.self_attn.q_proj.weight": torch.ones(2), "lm_head.weight": torch.ones(2)}
    for i in range(3):
        tensors[f"model.layers.{i}.self_attn.fc1.weight"] = torch.randn(16, width, generator=g)
        tensors[f"model.layers.{i}.self_attn.fc2.weight"] = torch.randn(2, 16, generator=g)
    source = tmp_path / f"retaining_heads.{suffix}"
    torch.save(tensors, source) if suffix == "bin" else save_file(tensors, source)
    for found in (source, tmp_path):
        again = load(save(convert(read_checkpoint(found), MODEL), tmp_path / "gates"), MODEL)
    assert (again.config.kind, again.config.input, again.config.hidden_dim) == ("locret", "qkv", 16)
    hidden, qkv = inputs()[0], torch.randn(2, 9, width, generator=g)
    for i in range(3):
        fc1, fc2 = (tensors[f"model.layers.{i}.self_attn.fc{n}.weight"] for n in (1, 2))
        expected = torch.nn.functional.silu(qkv @ fc1.T) @ fc2.T
        torch.testing.assert_close(again.score(i, hidden, qkv=qkv), expected.transpose(1, 2))
    broken = {**tensors, "model.layers.1.self_attn.fc2.weight": torch.ones(3, 16)}
    save_file(broken, tmp_path / "broken.safetensors")
    with pytest.raises(UserError, match=r"layer 1: linear2.weight is \[3, 16\], but this model needs \[2, 16\]"):
        convert(read_checkpoint(tmp_path / "broken.safetensors"), MODEL)


def test_a_bin_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"model.layers.0.self_attn.fc1.weight": Runs()}, tmp_path / "heads.bin")
    with pytest.raises(UserError, match="is not a file of plain tensors"):
        read_checkpoint(tmp_path / "heads.bin")
    assert not (tmp_path / "ran").exists()


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    torch.save(checkpoint(biased=True), tmp_path / "pytorch_model.bin")
    for source in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(UserError, match="pickle"):
            read_checkpoint(source)
    save_file({"other": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="has no tensors of a retention_gate"):
        read_checkpoint(tmp_path)


def test_the_converter_is_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    model = llama(2)
    model.save_pretrained(tmp_path / "model")
    info = model_info(model)
    g = torch.Generator().manual_seed(0)
    tensors = {}
    for i in range(info.layers):
        name = f"model.layers.{i}.self_attn.retention_gate."
        tensors[name + "linear1.weight"] = torch.randn(6, info.hidden_size, generator=g)
        tensors[name + "linear2.weight"] = torch.randn(info.kv_heads, 6, generator=g)
        tensors[name + "bias"] = torch.ones(1)
    source = tmp_path / "theirs.safetensors"
    save_file(tensors, source)
    out = tmp_path / "out"
    assert main([str(source), str(out), "--model", str(tmp_path / "model")]) == 0
    gates = load(out, info)
    assert gates.config.activation == "silu"
    assert gates.config.training == {"converted_from": "theirs.safetensors"}
    assert gates.config.base_revision
    capsys.readouterr()
    assert main([str(tmp_path / "none"), str(out), "--model", str(tmp_path / "model")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
