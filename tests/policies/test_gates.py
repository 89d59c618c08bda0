"""Gates as files: written, read back, looked for, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvbench.engine.models import model_info
from kvbench.errors import UserError
from kvbench.plugin import ModelInfo
from kvbench.runs.grid import Grid
from kvbench.runs.planning import plan
from kvbench.spelling import policy
from kvbench_policies.gates import GateConfig, RetentionGates, files, load, save

from . import oracles_retention as o
from .drawing import llama

MODEL = ModelInfo("made/up", 3, 2, 4, 8, 24, lambda layer: torch.empty(0))
pytestmark = pytest.mark.usefixtures("seeded")
VARIANTS: list[dict[str, Any]] = [
    {"kind": "trimkv"},
    {"kind": "trimkv", "gate": "linear"},
    {"kind": "trimkv", "input": "kv", "activation": "gelu_pytorch_tanh"},
    {"kind": "dbtrimkv", "gate_dim": 5},
    {"kind": "dbtrimkv", "tied": False},
    {"kind": "dbtrimkv", "gate": "linear", "gate_dim": 3, "input": "qkv"},
    {"kind": "locret"},
    {"kind": "locret", "gate": "linear"},
    {"kind": "kvzap", "activation": "gelu"},
    {"kind": "kvzap", "gate": "linear"},
]


def made(kind: str = "trimkv", **changes: Any) -> GateConfig:
    return GateConfig.of(kind, MODEL, **{"hidden_dim": 7, **changes})  # type: ignore[arg-type]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    shapes = ((2, 9, 24), (2, 2, 9, 8), (2, 2, 9, 8), (2, 9, 64))
    hidden, key, value, qkv = (torch.randn(*s, generator=g).to(dtype) for s in shapes)
    return hidden, key, value, qkv


@pytest.mark.parametrize("changes", VARIANTS)
def test_what_is_saved_is_read_back_to_the_bit(changes: dict[str, Any], tmp_path: Path) -> None:
    config = made(**changes, training={"steps": 3, "data": "none"}, base_revision="abc")
    gates = RetentionGates(config)
    folder = save(gates, tmp_path / "deep" / "gates")
    assert sorted(p.name for p in folder.iterdir()) == ["gates.json", "gates.safetensors"]
    again = load(folder, MODEL)
    assert again.config == config
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    for layer in range(3):
        before, after = gates.score(layer, *inputs()), again.score(layer, *inputs())
        assert torch.equal(before, after)
        assert before.shape == (2, 2, 9)
        if config.is_retention:
            assert bool((before <= 0).all())
            assert float(before.detach().min()) > -0.1, "training begins with little forgotten"


@pytest.mark.parametrize("changes", VARIANTS)
def test_a_gate_is_float32_inside(changes: dict[str, Any]) -> None:
    gates = RetentionGates(made(**changes))
    half = inputs(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gates.score(1, *half)
    assert found.dtype == torch.float32
    assert torch.equal(found, gates.score(1, *(x.float() for x in half)))


@pytest.mark.parametrize("changes", [VARIANTS[0], VARIANTS[1], VARIANTS[3], VARIANTS[6]])
def test_a_gate_is_its_equation(changes: dict[str, Any]) -> None:
    gates = RetentionGates(made(**changes))
    hidden, key, value, qkv = inputs()
    weights = {name: x.numpy() for name, x in gates.state_dict().items()}
    found = gates(2, hidden, key, value, qkv).detach()
    source = qkv if gates.config.input == "qkv" else hidden
    for row in range(2):
        for t in range(9):
            x = source[row, t].double().numpy()
            want: Any = o.tied_gate(x, weights, 2, 2) if gates.config.tied else o.gate(x, weights, 2)
            assert found[row, :, t].double().numpy() == pytest.approx(np.array(want), rel=1e-5, abs=1e-5)


def test_the_papers_sizes() -> None:
    shapes = {
        kind: {n: tuple(x.shape) for n, x in RetentionGates(GateConfig.of(kind, MODEL)).state_dict().items()}  # type: ignore[arg-type]
        for kind in ("trimkv", "dbtrimkv", "locret", "kvzap")
    }
    assert shapes["trimkv"]["layers.0.linear1.weight"] == (512, 24)
    assert shapes["trimkv"]["layers.2.linear2.weight"] == (2, 512)
    assert shapes["trimkv"]["layers.2.bias"] == (2,)
    assert shapes["dbtrimkv"]["layers.0.linear2.weight"] == (2 * 64, 512)
    assert shapes["dbtrimkv"]["readout"] == (64,)
    assert shapes["dbtrimkv"]["bias"] == ()
    assert shapes["locret"] == {
        f"layers.{i}.{name}": shape
        for i in range(3)
        for name, shape in (("linear1.weight", (1024, 64)), ("linear2.weight", (2, 1024)))
    }
    assert shapes["kvzap"] == shapes["trimkv"]


def test_gradients_reach_every_parameter() -> None:
    for changes in VARIANTS:
        gates = RetentionGates(made(**changes))
        torch.stack([gates.score(i, *inputs()).sum() for i in range(3)]).sum().backward()
        for name, p in gates.named_parameters():
            assert p.grad is not None, name
            assert bool((p.grad != 0).any()), name


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "other"}, "unknown kind=other; use trimkv or dbtrimkv or locret or kvzap"),
        ({"gate": "big"}, "unknown gate=big; use mlp or linear"),
        ({"input": "x"}, "unknown input=x; use hidden or kv or qkv"),
        ({"gating": "x"}, "unknown gating=x; use additive or multiplicative"),
        ({"hidden_dim": 0}, "hidden_dim=0 is invalid; use a whole number, 1 or more"),
        ({"gate_dim": True}, "gate_dim=True is invalid; use a whole number"),
        ({"kv_heads": 3}, "4 query heads is not a multiple of 3 KV heads"),
        ({"bias": float("inf")}, "bias=inf is invalid; use a finite number"),
        ({"activation": "sile"}, "activation=sile"),
        ({"kind": "locret", "tied": True}, "tied=true"),
        ({"kind": "kvzap", "tied": True}, "the gates of kvzap have no readout to tie"),
        ({"kind": "kvzap", "input": "kv"}, "input=kv is invalid for kvzap; use hidden"),
        ({"tied": "yes"}, "tied=yes"),
        ({"training": []}, "training is not a JSON object"),
    ],
)
def test_a_wrong_configuration_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        replace(made(), **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def wrong_json(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / "gates.json").read_text())
    content |= changes
    content = {k: v for k, v in content.items() if v is not None}
    (folder / "gates.json").write_text(json.dumps(content))


def wrong_tensors(folder: Path, **changes: Tensor | None) -> None:
    state = load_file(folder / "gates.safetensors")
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_file(state, folder / "gates.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: wrong_json(f, format=9), "its format is 9"),
        (lambda f: wrong_json(f, wings=2), "wings is unknown"),
        (lambda f: wrong_json(f, layers=None), "layers is missing"),
        (lambda f: wrong_json(f, layers="3"), "layers=3 is invalid; use a whole number"),
        (lambda f: wrong_json(f, hidden_dim=8), "gates.json says"),
        (lambda f: wrong_json(f, layers=4), "are for 4 layers, 2 KV and 4 query heads of 8"),
        (lambda f: wrong_json(f, d_model=32), "hidden size 32, but model made/up has"),
        (lambda f: (f / "gates.json").write_text("{"), "it is not JSON"),
        (lambda f: (f / "gates.json").write_text("[]"), "it is not a JSON object"),
        (lambda f: (f / "gates.json").write_bytes(b"\xff\xfe"), "it is not text"),
        (lambda f: (f / "gates.json").unlink(), "no gates.json in that folder"),
        (lambda f: (f / "gates.safetensors").unlink(), "cannot read the gates"),
        (lambda f: (f / "gates.safetensors").write_text("no"), "is not a safetensors file"),
        (lambda f: wrong_tensors(f, layers__1__bias=None), "layers.1.bias is missing"),
        (lambda f: wrong_tensors(f, more=torch.ones(1)), "tensor more is not one that"),
        (lambda f: wrong_tensors(f, layers__1__bias=torch.ones(3)), "layers.1.bias is [3]"),
        (
            lambda f: wrong_tensors(f, layers__0__bias=torch.tensor([1.0, float("nan")])),
            "tensor layers.0.bias is not finite",
        ),
    ],
)
def test_damaged_or_foreign_files_are_one_line(damage: Any, message: str, tmp_path: Path) -> None:
    folder = save(RetentionGates(made()), tmp_path)
    damage(folder)
    with pytest.raises(UserError) as error:
        load(folder, MODEL)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["trimkv", "dbtrimkv", "locret", "kvzap"])
def test_half_precision_halves_the_file_and_keeps_the_scores(kind: Any, tmp_path: Path) -> None:
    gates = RetentionGates(GateConfig.of(kind, MODEL, hidden_dim=256))
    whole, half = save(gates, tmp_path / "whole"), save(gates, tmp_path / "half", half=True)
    sizes = [(folder / "gates.safetensors").stat().st_size for folder in (whole, half)]
    assert sizes[1] < 0.6 * sizes[0]
    hidden, key, value, qkv = inputs()
    again = load(half, MODEL)
    assert all(p.dtype == torch.float32 for p in again.parameters())
    torch.testing.assert_close(
        again.score(1, hidden, key, value, qkv),
        gates.score(1, hidden, key, value, qkv),
        rtol=5e-3,
        atol=5e-3,
    )


def test_gates_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    gates = RetentionGates(made())
    with torch.no_grad():
        next(gates.parameters()).fill_(float("nan"))
    with pytest.raises(UserError, match="not finite"):
        save(gates, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# --- which gates ----------------------------------------------------------------------------------


def test_named_then_shipped_then_the_users_own(cache: Path, tmp_path: Path) -> None:
    name = MODEL.name
    with pytest.raises(UserError) as error:
        files.find(name, "trimkv")
    assert "`kvbench train gates --model made/up --policy trimkv`" in str(error.value)
    own = save(RetentionGates(made()), files.GATES.user_path(name, "trimkv"))
    assert own.is_relative_to(cache)
    assert files.find(name, "trimkv") == own
    shipped = save(RetentionGates(made(base_model=name)), files.GATES.shipped / "up-trimkv")
    assert files.find(name, "trimkv") == shipped
    assert files.GATES.locate("up-trimkv") == shipped
    other = ModelInfo("other/up", 3, 2, 4, 8, 24, lambda layer: torch.empty(0))
    with pytest.raises(UserError, match="has no trimkv gates"):
        files.find(other.name, "trimkv")
    named = save(RetentionGates(made()), tmp_path / "mine")
    assert files.find(name, "trimkv", str(named)) == named
    with pytest.raises(UserError, match="no such folder"):
        files.find(name, "trimkv", str(tmp_path / "none"))
    with pytest.raises(UserError, match="is a file"):
        files.find(name, "trimkv", str(named / "gates.json"))


def test_gates_of_other_weights_are_not_taken(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    llama(2).save_pretrained(folder)
    from kvbench.named import model_digest

    path = files.GATES.user_path(str(folder), "trimkv")
    save(RetentionGates(made(base_revision="other")), path)
    with pytest.raises(UserError, match=r"made for other weights .*kvbench train gates"):
        files.find(str(folder), "trimkv")
    save(RetentionGates(made(base_revision=model_digest(str(folder)))), path)
    assert files.find(str(folder), "trimkv") == path


def test_the_fingerprint_is_that_of_the_content(cache: Path, tmp_path: Path) -> None:
    one, two = save(RetentionGates(made()), tmp_path / "1"), tmp_path / "2"
    save(load(one), two)
    first = policy("trimkv", gates=str(one)).fingerprint("any/model")
    assert len(first) == 16
    assert policy("trimkv", gates=str(two)).fingerprint("any/model") == first
    wrong_tensors(two, layers__0__bias=torch.ones(2))
    assert policy("trimkv", gates=str(two)).fingerprint("any/model") != first


@pytest.mark.parametrize("name", ["trimkv", "dbtrimkv", "locret", "kvzap", "lococo"])
def test_all_leaves_out_a_policy_without_gates(
    name: str, llama_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"context": "a b c", "question": "?", "answers": "a"}\n')
    said: list[str] = []
    place = {"tasks": (str(mine),), "models": (llama_folder,)}
    planned = plan(Grid(policies=("all",), **place), said.append)
    cells = planned.stages[0].jobs[0].cells
    assert name not in {str(cell.policy) for cell in cells} and len(cells) > 20
    reason = f"model {llama_folder} has no {name} gates; run "
    assert planned.left_out[name].startswith(reason)
    assert any(line.startswith(f"{name} is left out: {reason}") for line in said)
    with pytest.raises(UserError, match=f"kvbench train gates --model {llama_folder}"):
        plan(Grid(policies=(name, "snapkv"), **place), said.append)


@pytest.mark.parametrize("kind", ["locret", "dbtrimkv"])
def test_a_score_refuses_gates_of_another_policy(kind: str, tmp_path: Path) -> None:
    import kvbench

    model = llama(2)
    found = policy(kind).stand_in(model_info(model), tmp_path)
    assert found.score is not None
    wrong = policy("trimkv", gates=found.score.parameters()["gates"])
    with pytest.raises(UserError, match=f"are for {kind}; use gates trained for trimkv"):
        kvbench.kept(model, torch.arange(9)[None], wrong, "4")
    with pytest.raises(UserError, match=f"are for {kind}; use gates trained for trimkv"):
        wrong.fingerprint("any/model")  # when a run is planned
