"""Gates on disk: a folder with `gates.json` and `gates.safetensors`, and the gates of a model.

LoCoCo's convolutions are stored in the same way.

Nothing is ever unpickled. The weights of the base model are not stored with the gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvbench.artifacts import Artifacts, MadeFor
from kvbench.errors import UserError
from kvbench.files import cannot, replacing
from kvbench.plugin import ModelInfo
from kvbench_policies.gates.block_gates import BlockGates
from kvbench_policies.gates.config import GateConfig, parse
from kvbench_policies.gates.convolutions import ConvolutionConfig, MergeConvolutions
from kvbench_policies.gates.modules import RetentionGates

CONFIG = "gates.json"
WEIGHTS = "gates.safetensors"

Gates = RetentionGates | BlockGates | MergeConvolutions


def save(gates: Gates, folder: str | Path, *, half: bool = False) -> Path:
    """Write gates into a folder, creating it if it is missing; each file completely or not at all.

    Args:
        gates: The gates, on any device.
        folder: The folder.
        half: Whether matrices are stored in float16; everything else is stored in float32.

    Returns:
        The folder.

    Raises:
        UserError: The folder cannot be written to, or a weight is not finite.
    """
    folder = Path(folder).expanduser()
    state_dict = {
        tensor_name: tensor.detach().float().cpu().contiguous() for tensor_name, tensor in gates.state_dict().items()
    }
    if half:
        state_dict = {
            tensor_name: tensor.half() if tensor.dim() > 1 else tensor for tensor_name, tensor in state_dict.items()
        }
    invalid_name = _not_finite(state_dict)
    if invalid_name:
        raise UserError(f"the gates were not saved, because {invalid_name} is not finite")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The configuration takes its place last: without it, the folder holds no gates.
        with replacing(folder / CONFIG) as config_path, replacing(folder / WEIGHTS) as weights_path:
            save_file(state_dict, weights_path, metadata={"format": "pt"})
            config_path.write_text(gates.config.to_json(), encoding="utf-8")
    except OSError as error:
        raise cannot("write gates to", folder, error) from None
    except SafetensorError as error:
        raise UserError(f"cannot write gates to {folder}: {error}") from None
    return folder


def load(source: str | Path, model: ModelInfo | None = None) -> Gates:
    """Read and check gates.

    Args:
        source: A folder, the name of gates that ship with kvbench, or a hub id
            (`organisation/name`, or `organisation/name@revision`).
        model: The model that they must fit, or None.

    Returns:
        Gates on the CPU, in float32, without gradients.

    Raises:
        UserError: There are none, they are damaged, or they were made for another model.
    """
    folder = GATES.locate(str(source))
    config = read_config(folder / CONFIG)
    mismatch = "" if model is None else config.mismatch(model)
    if mismatch:
        raise UserError(f"the gates in {folder} are {mismatch}; name gates of that model")
    with torch.random.fork_rng(devices=[]):
        gates = build(config)
    gates.load_state_dict(_weights(folder / WEIGHTS, gates.state_dict()))
    return gates.eval().requires_grad_(False)


def build(config: GateConfig | ConvolutionConfig) -> Gates:
    """Make the module that a configuration describes, with new parameters."""
    if isinstance(config, ConvolutionConfig):
        return MergeConvolutions(config)
    return BlockGates(config) if config.is_of_blocks else RetentionGates(config)


def read_config(config_path: Path) -> GateConfig | ConvolutionConfig:
    """Read and check a configuration.

    Raises:
        UserError: It cannot be read or is not a configuration of gates; the message says why.
    """
    try:
        content = parse(config_path.read_text(encoding="utf-8"))
        if content.get("kind") == "lococo":
            return ConvolutionConfig.from_content(content)
        return GateConfig.from_content(content)
    except OSError as error:
        raise UserError(f"cannot read {config_path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{config_path} is not a configuration of gates: it is not text") from None
    except UserError as error:
        raise UserError(f"{config_path} is not a configuration of gates: {error}") from None


def _weights(weights_path: Path, expected_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors of a file, and check that all expected ones are there, of their shapes."""
    try:
        state_dict: dict[str, Tensor] = load_file(weights_path)
    except OSError as error:
        raise UserError(f"cannot read the gates {weights_path}: {error.strerror or error}") from None
    except SafetensorError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{weights_path} is not a safetensors file: {reason}") from None
    mismatched = sorted(set(state_dict) ^ set(expected_tensors))
    if mismatched:
        problem = "is missing" if mismatched[0] in expected_tensors else f"is not one that {CONFIG} describes"
        raise UserError(f"{weights_path}: tensor {mismatched[0]} {problem}")
    for tensor_name, tensor in state_dict.items():
        if tensor.shape != expected_tensors[tensor_name].shape:
            raise UserError(
                f"{weights_path}: tensor {tensor_name} is {list(tensor.shape)}, but {CONFIG} says "
                f"{list(expected_tensors[tensor_name].shape)}"
            )
    invalid_name = _not_finite(state_dict)
    if invalid_name:
        raise UserError(f"{weights_path}: tensor {invalid_name} is not finite")
    return {tensor_name: tensor.float() for tensor_name, tensor in state_dict.items()}


def _not_finite(state_dict: Mapping[str, Tensor]) -> str:
    """Name of a tensor that is not of finite numbers; "" if there is none."""
    invalid_names = (
        tensor_name
        for tensor_name, tensor in state_dict.items()
        if not (tensor.is_floating_point() and bool(tensor.isfinite().all()))
    )
    return next(invalid_names, "")


# --- the gates of a model -------------------------------------------------------------------------


def _made_for(folder: Path) -> MadeFor:
    config = read_config(folder / CONFIG)
    return MadeFor(config.base_model, config.base_revision)


GATES = Artifacts(
    noun="gates",
    option="gates",
    shipped=Path(__file__).resolve().parent / "shipped",
    folder="gates",
    pattern="{model}-{kind}",
    command="kvbench train gates --model {model} --policy {kind}",
    made_for=_made_for,
    files=(CONFIG, WEIGHTS),
)


def find(model: str, kind: str, gates: str | None = None) -> Path:
    """Find the gates of a model: the named ones, the shipped ones, or the user's own.

    Args:
        model: `ModelInfo.name` or what `--model` names: `reference`, a folder or a hub id.
        kind: The policy that reads them, such as `trimkv` or `lococo`.
        gates: A source as in `load`, or None.

    Returns:
        A folder that holds gates.

    Raises:
        UserError: There are none (the message names the command that trains them), or they were
            trained for another policy.
    """
    folder = GATES.find(model, (kind,), gates)
    trained_kind = read_config(folder / CONFIG).kind
    if trained_kind != kind:
        raise UserError(f"the gates in {folder} are for {trained_kind}; name gates for {kind}")
    return folder


def fingerprint(model: str, kind: str, gates: str | None = None) -> str:
    """16 hex digits of the content of the files in the folder that `find` gives.

    Raises:
        UserError: There are none.
    """
    return GATES.digest(find(model, kind, gates))
