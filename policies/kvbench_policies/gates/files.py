"""Gate files: a folder with `gates.json` and `gates.safetensors`, and the lookup of a model's gates.

LoCoCo's convolutions are stored in the same way. Nothing is ever unpickled. The base model's weights are not included.
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
    """Write gates to a folder, creating it if needed; each file is written atomically.

    Args:
        gates: The gates, on any device.
        folder: The folder.
        half: Store matrices in float16; everything else is stored in float32.

    Returns:
        The folder.

    Raises:
        UserError: The folder is not writable, or a weight is not finite.
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
        raise UserError(f"gates not saved: {invalid_name} is not finite")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The configuration is moved into place last: without it, the folder holds no gates.
        with replacing(folder / CONFIG) as config_path, replacing(folder / WEIGHTS) as weights_path:
            save_file(state_dict, weights_path, metadata={"format": "pt"})
            config_path.write_text(gates.config.to_json(), encoding="utf-8")
    except OSError as error:
        raise cannot("write gates to", folder, error) from None
    except SafetensorError as error:
        raise UserError(f"cannot write gates to {folder}: {error}") from None
    return folder


def load(source: str | Path, model: ModelInfo | None = None) -> Gates:
    """Load and validate gates.

    Args:
        source: A folder, the name of gates that ship with kvbench, or a hub id (`organisation/name`, or
            `organisation/name@revision`).
        model: The model that they must fit, or None.

    Returns:
        Gates on the CPU, in float32, without gradients.

    Raises:
        UserError: The gates are missing, damaged or made for another model.
    """
    folder = GATES.locate(str(source))
    config = read_config(folder / CONFIG)
    mismatch = "" if model is None else config.mismatch(model)
    if mismatch:
        raise UserError(f"the gates in {folder} are {mismatch}; use gates trained for that model")
    with torch.random.fork_rng(devices=[]):
        gates = build(config)
    gates.load_state_dict(_weights(folder / WEIGHTS, gates.state_dict()))
    return gates.eval().requires_grad_(False)


def build(config: GateConfig | ConvolutionConfig) -> Gates:
    """Build the module that a configuration describes, with freshly initialised parameters."""
    if isinstance(config, ConvolutionConfig):
        return MergeConvolutions(config)
    return BlockGates(config) if config.is_of_blocks else RetentionGates(config)


def read_config(config_path: Path) -> GateConfig | ConvolutionConfig:
    """Read and validate a configuration.

    Raises:
        UserError: The file cannot be read or is not a gate configuration.
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
    """Read the tensors of a file and check their names and shapes."""
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
    """Return the name of a tensor with non-finite or non-float values, or ""."""
    invalid_names = (
        tensor_name
        for tensor_name, tensor in state_dict.items()
        if not (tensor.is_floating_point() and bool(tensor.isfinite().all()))
    )
    return next(invalid_names, "")


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
    """Find the gates of a model: those named, those shipped, or the user's own.

    Args:
        model: `ModelInfo.name` or what `--model` names: `reference`, a folder or a hub id.
        kind: The policy that uses them, such as `trimkv` or `lococo`.
        gates: A source as in `load`, or None.

    Returns:
        A folder that holds gates.

    Raises:
        UserError: No gates were found (the message names the training command), or they were trained for another
            policy.
    """
    folder = GATES.find(model, (kind,), gates)
    trained_kind = read_config(folder / CONFIG).kind
    if trained_kind != kind:
        raise UserError(f"the gates in {folder} are for {trained_kind}; use gates trained for {kind}")
    return folder


def fingerprint(model: str, kind: str, gates: str | None = None) -> str:
    """Return a 16-digit hex digest of the files in the folder that `find` returns.

    Raises:
        UserError: No gates were found.
    """
    return GATES.digest(find(model, kind, gates))
