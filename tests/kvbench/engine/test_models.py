"""Loading real models: placed by accelerate, quantised, or refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import kvbench
from kvbench.engine import quantization
from kvbench.engine.loading import load_config, load_model, load_tokenizer, pick_device
from kvbench.engine.models import model_info
from kvbench.engine.quantization import plain_weight
from kvbench.engine.weights import check_weights
from kvbench.errors import UserError
from kvbench.named import resolve_model
from kvbench.runs.grid import Grid

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CPU = torch.device("cpu")
IDS = torch.arange(5, 45)[None]


def load(folder: str, **options: Any) -> Any:
    return load_model(folder, None, CPU, torch.float32, **options)


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(IDS).logits
    return found


# --- placing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_map", ["auto", {"": "cpu"}])
def test_a_device_map_places_the_model_and_changes_nothing(
    llama_folder: str, tiny_llama: LlamaForCausalLM, device_map: Any
) -> None:
    model = load(llama_folder, device_map=device_map)
    assert {p.device.type for p in model.parameters()} == {pick_device("auto", device_map).type}
    torch.testing.assert_close(logits(model).cpu(), logits(tiny_llama))


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"": "disk"}, r"^model \S+ (does not fit into the memory|cannot be loaded: )"),
        ({"": "nowhere"}, r"^model \S+ cannot be loaded: "),
    ],
)
def test_what_is_not_wholly_in_memory_is_refused(llama_folder: str, device_map: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load(llama_folder, device_map=device_map)
    assert "\n" not in str(raised.value)


def test_weights_that_were_put_off_are_refused(
    llama_folder: str, monkeypatch: pytest.MonkeyPatch, tiny_llama: LlamaForCausalLM
) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    with torch.device("meta"):
        away = LlamaForCausalLM(tiny_llama.config)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (away, {}))
    with pytest.raises(UserError, match=r"does not fit into the memory .* --quantization bnb-4bit"):
        load(llama_folder, device_map="auto")


def test_device_and_device_map_are_not_given_both() -> None:
    grid = {"policies": "snapkv", "tasks": "vt", "device_map": "auto"}
    with pytest.raises(UserError, match="give only one"):
        Grid.from_dict({**grid, "device": "cpu"})
    with pytest.raises(UserError, match=r"must be auto, .* not 'atuo'"):
        Grid.from_dict({**grid, "device_map": "atuo"})
    plain = Grid.from_dict({"policies": "snapkv", "tasks": "vt"})
    assert Grid.from_dict(grid).digest == plain.digest
    placed = Grid.from_dict({**grid, "device_map": {"": "cpu"}})
    assert Grid.from_dict(placed.to_dict()) == placed


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, llama_folder: str) -> None:
    monkeypatch.setattr(quantization.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^--device-map needs accelerate: pip install accelerate$"):
        load(llama_folder, device_map="auto")
    with pytest.raises(
        UserError,
        match=r"^--quantization bnb-8bit needs bitsandbytes and accelerate: pip install bitsand",
    ):
        load(llama_folder, quantization="bnb-8bit")


def test_a_revision_in_the_name_is_told_how_to_be_given() -> None:
    with pytest.raises(UserError, match=r"use --model org/name --revision v1"):
        resolve_model("org/name@v1")


@pytest.mark.parametrize("length", ["x", [], {}])
def test_a_tokenizer_with_damaged_settings_is_refused(llama_folder: str, tmp_path: Path, length: Any) -> None:
    folder = shutil.copytree(llama_folder, tmp_path / "damaged")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": length}))
    with pytest.raises(UserError, match=r"^model \S+ cannot be loaded: its tokenizer: ") as refused:
        load_tokenizer(str(folder))
    assert "\n" not in str(refused.value)


# --- quantised ------------------------------------------------------------------------------------


class Rows(nn.Module):
    """A linear layer whose weight is int8 with a scale for each row, as of no library."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Buffer(linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = nn.Parameter(torch.linspace(-1, 1, linear.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scale).T + self.bias


def test_a_weight_of_any_make_is_given_as_numbers() -> None:
    linear = nn.Linear(12, 8)
    assert plain_weight(linear, 12, torch.float32) is linear.weight
    rows = Rows(linear)
    want = rows.weight * rows.scale
    torch.testing.assert_close(plain_weight(rows, 12, torch.float32), want)
    with pytest.raises(UserError, match=r"^the weights of Linear cannot be dequantised \("):
        plain_weight(linear.to(torch.float8_e4m3fn), 12, torch.float32)


def test_criticalkv_weighs_by_what_a_quantised_projection_does(
    tiny_llama: LlamaForCausalLM,
) -> None:
    import copy

    rounded, own = copy.deepcopy(tiny_llama), copy.deepcopy(tiny_llama)
    for plain, quantised in zip(rounded.model.layers, own.model.layers, strict=True):
        rows = Rows(plain.self_attn.o_proj)
        rows.bias.data.zero_()
        plain.self_attn.o_proj.weight.data = rows.weight * rows.scale
        quantised.self_attn.o_proj = rows
    torch.testing.assert_close(model_info(own).output_weight(1), model_info(rounded).output_weight(1))
    kept = [kvbench.kept(model, IDS, "criticalkv:window=4", 0.4) for model in (rounded, own)]
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "told"), [("gptq", "gptq"), ("awq", "awq"), (None, "unknown")])
def test_a_model_that_is_quantised_on_disk_loads_as_it_is(
    llama_folder: str, tmp_path: Path, method: str | None, told: str
) -> None:
    folder = tmp_path / "quantised"
    shutil.copytree(llama_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"bits": 4, **({"quant_method": method} if method else {})}
    (folder / "config.json").write_text(json.dumps(config))
    read = load_config(str(folder))
    assert quantization.check_quantization(str(folder), read, None, None) == told
    with pytest.raises(UserError, match=rf"is quantised already \({told}\); leave out"):
        quantization.check_quantization(str(folder), read, "bnb-4bit", None)
    with pytest.raises(UserError, match=r"^model \S+ cannot be loaded: ") as raised:
        load(str(folder))  # for want of its library, or of anything that is quantised
    assert "\n" not in str(raised.value)


def test_quantization_is_part_of_a_run(llama_folder: str) -> None:
    grid = {"policies": "snapkv", "tasks": "vt"}
    plain = Grid.from_dict(grid)
    quantised = Grid.from_dict({**grid, "quantization": "bnb-4bit"})
    assert quantised.digest != plain.digest
    with pytest.raises(UserError, match=r"did you mean bnb-4bit, "):
        Grid.from_dict({**grid, "quantization": "bnb4bit"})
    config = load_config(llama_folder)
    assert quantization.check_quantization(llama_folder, config, None, None) == ""
    assert quantization.quantization_packages("torchao-int8") == ("torchao",)


@pytest.mark.parametrize("scheme", list(quantization.PACKAGES))
def test_a_scheme_quantises_and_criticalkv_runs(scheme: str, llama_folder: str, tiny_llama: LlamaForCausalLM) -> None:
    pytest.importorskip(quantization.PACKAGES[scheme])
    model = load(llama_folder, quantization=scheme)
    linear = model.model.layers[1].self_attn.o_proj
    before = tiny_llama.model.layers[1].self_attn.o_proj.weight
    weight = plain_weight(linear, 64, torch.float32)
    # What it multiplies by is what it does to the unit vectors.
    torch.testing.assert_close(weight, linear(torch.eye(64)[None])[0].detach().T, rtol=1e-2, atol=2e-3)
    error = (weight - before).abs().max() / before.abs().max()
    assert 0 < error < (0.2 if "4bit" in scheme else 0.01)
    kept = kvbench.kept(model, IDS, "criticalkv:window=4", 0.4)
    assert [int(layer.sum()) for layer in kept if layer is not None] == [32, 32]
    assert {x.dtype for x in (logits(model), weight)} == {torch.float32}


def test_a_weight_that_a_forward_has_reordered_is_read_through_the_layer() -> None:
    """bitsandbytes reorders 4-bit weights in the first forward on a CPU with AVX-512."""
    linear = nn.Linear(6, 4, bias=False)
    expected = linear.weight.detach().clone()
    reordered = nn.Linear(6, 4, bias=False)
    reordered.register_forward_hook(lambda module, inputs, output: linear(inputs[0]))
    reordered.weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)  # type: ignore[assignment]
    reordered.weight.__class__ = type("Params4bit", (nn.Parameter,), {})
    torch.testing.assert_close(plain_weight(reordered, 6, torch.float32), expected)


class _Quantised(Tensor):
    """A tensor that can be dequantised but not compared, as torchao's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.isfinite, torch.abs, Tensor.abs):
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs or {})

    def dequantize(self) -> Tensor:
        return self.as_subclass(Tensor)


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_quantised_tensors_are_checked_as_the_numbers_that_they_stand_for(value: float) -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(torch.full((2, 2), value).as_subclass(_Quantised), requires_grad=False)
    assert type(model.state_dict()["weight"]) is _Quantised
    if value == 1.0:
        check_weights("tiny", model, {}, "torchao-int8")
    else:
        with pytest.raises(UserError, match="weights are NaN or infinite: weight"):
            check_weights("tiny", model, {}, "torchao-int8")
