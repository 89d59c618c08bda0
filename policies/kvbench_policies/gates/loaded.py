"""In-memory cache of gates and convolutions, reloaded when their files change."""

from __future__ import annotations

from pathlib import Path

import torch

from kvbench.files import state_of
from kvbench.plugin import ModelInfo
from kvbench_policies.gates.config import KINDS, GateConfig
from kvbench_policies.gates.convolutions import ConvolutionConfig
from kvbench_policies.gates.files import CONFIG, WEIGHTS, Gates, build, find, load, save

_cache: dict[tuple[str, str | None, str, torch.device], tuple[object, Gates]] = {}


def loaded(kind: str, gates: str | None, model: ModelInfo, device: torch.device, *, anew: bool) -> Gates:
    """Return the gates of a policy on a device.

    Args:
        kind: The policy, as for `files.find`.
        gates: A source as in `files.load`, or None for the model's own.
        model: The model that they must fit.
        device: Target device.
        anew: Check whether the files have changed, and reload them if so.

    Raises:
        UserError: No gates were found, or they do not fit the model or the policy.
    """
    cache_key = (kind, gates, model.name, device)
    cached = _cache.get(cache_key)
    if cached is not None and not anew and not cached[1].config.mismatch(model):
        return cached[1]
    folder = find(model.name, kind, gates)
    file_states = tuple(
        state_of(folder / file_name) for file_name in (CONFIG, WEIGHTS) if (folder / file_name).exists()
    )
    source_state = (folder, file_states)
    if cached is None or cached[0] != source_state or cached[1].config.mismatch(model):
        cached = (source_state, load(folder, model).to(device))
        _cache[cache_key] = cached
    return cached[1]


def random_gates(kind: str, model: ModelInfo, folder: Path) -> Path:
    """Write random gates with distinct outputs per token, the same at every call.

    Args:
        kind: Kind of gates.
        model: The model that they must fit.
        folder: Parent of the gates' folder, which is named after kind and shapes.
    """
    dimensions = (model.layers, model.kv_heads, model.query_heads, model.head_dim, model.hidden_size)
    gates_folder = folder / "-".join(map(str, (kind, *dimensions)))
    if not (gates_folder / CONFIG).is_file():
        config: GateConfig | ConvolutionConfig
        if kind in KINDS:
            config = GateConfig.of(kind, model, hidden_dim=16, bias=0.0, block=4, base_model="")
        else:
            config = ConvolutionConfig.of(model, slots=5, kernel_size=3, base_model="")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            gates = build(config)
            for parameter in gates.parameters() if isinstance(config, GateConfig) else ():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
        save(gates, gates_folder)
    return gates_folder
