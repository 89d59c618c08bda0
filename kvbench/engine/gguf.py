"""Converts GGUF files into folders that transformers can load: dequantised, once, into the cache.

A folder that is named after the file's digest holds two kinds of copies: a description
(configuration and tokenizer), which is all that planning needs, and a whole model for each dtype.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from tokenizers import pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from kvbench.engine.weights import check_weights
from kvbench.errors import UserError, first_lines, out_of_memory
from kvbench.files import cache_dir, replacing_folder
from kvbench.named import is_gguf, model_digest, resolve_model

PACKAGES = ("gguf", "accelerate")
"""Packages that transformers needs to read a GGUF file."""

OLDEST_TRANSFORMERS = "5.23"
"""5.17 gets BOS, EOS and leading spaces of byte-level tokenizers wrong. Versions between the two
were not tested."""

_CONVERSION = 1
"""Version of the conversion; copies that another version made are not used."""

_MAGIC = b"GGUF"

_MOST_ITEMS = 1 << 22
"""Most items of an array of metadata; the longest are vocabularies, which have fewer."""

_SPARE = 50_000_000
"""Bytes that a copy may take in addition to its weights, mostly for the tokenizer."""

_DIGIT_SPLITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
"""Values of `tokenizer.ggml.pre` that separate all digits before GPT-2's pattern is applied.

See `llm_tokenizer_bpe` in llama.cpp (src/llama-vocab.cpp). transformers does not know them and
applies GPT-2's pattern alone.
"""


@dataclass(frozen=True)
class _Header:
    """What is read from a file before it is converted.

    Attributes:
        architecture: Its `general.architecture`.
        numbers: Number of values in all its tensors.
        splits_digits: Whether its tokenizer separates all digits; see `_DIGIT_SPLITS`.
    """

    architecture: str
    numbers: int
    splits_digits: bool


def gguf_packages(name: str) -> tuple[str, ...]:
    """Packages whose versions can change what a model's GGUF file is converted into."""
    return ("gguf",) if is_gguf(resolve_model(name)) else ()


def described(name: str, file: Path) -> Path:
    """The folder with the configuration and the tokenizer of a GGUF file, without weights.

    Args:
        name: The model as the user named it, for messages.
        file: The GGUF file.

    Raises:
        UserError: A package is missing, or the file cannot be read or converted.
    """
    target = _copies(name, file) / "description"
    if not target.is_dir():
        header = _read_header(name, file)
        with _conversion(name, header):
            config = _unquantised(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        if header.splits_digits:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        with replacing_folder(target) as folder:
            config.save_pretrained(folder)
            GenerationConfig.from_model_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return target


def converted(name: str, file: Path, dtype: torch.dtype) -> Path:
    """The folder with the whole model of a GGUF file, with dequantised weights.

    Args:
        name: The model as the user named it, for messages.
        file: The GGUF file.
        dtype: The dtype of the converted weights. They are dequantised in float32 and rounded once.

    Raises:
        UserError: A package is missing, the disk is full, or the file cannot be read or
            converted.
    """
    target = _copies(name, file) / str(dtype).removeprefix("torch.")
    if not target.is_dir():
        description = described(name, file)
        header = _read_header(name, file)
        _check_disk(name, target, header.numbers * dtype.itemsize)
        with _conversion(name, header):
            loader: Any = AutoModelForCausalLM  # its stubs do not know output_loading_info
            model, report = loader.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True
            )
            plain = _plain_model(model)
        check_weights(name, plain, report, quantised="")
        with replacing_folder(target) as folder:
            plain.save_pretrained(folder)
            other = shutil.ignore_patterns("config.json", "generation_config.json")
            shutil.copytree(description, folder, ignore=other, dirs_exist_ok=True)
    return target


def _copies(name: str, file: Path) -> Path:
    """The folder of the copies of a file that the installed versions of the software make."""
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(
            f"model {name}: a GGUF file needs {' and '.join(missing)}; run "
            "pip install 'kvbench[gguf]'"
        )
    if Version(version("transformers")) < Version(OLDEST_TRANSFORMERS):
        raise UserError(
            f"model {name}: a GGUF file needs transformers {OLDEST_TRANSFORMERS} or later; run "
            "pip install --upgrade transformers"
        )
    software = f"v{_CONVERSION}-transformers-{version('transformers')}-gguf-{version('gguf')}"
    return cache_dir() / "gguf" / model_digest(str(file)) / software


def _read_header(name: str, file: Path) -> _Header:
    """Read what decides whether and how a file can be converted.

    Raises:
        UserError: The file is not a whole GGUF model, or transformers would ignore a part of it.
    """
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(_MAGIC))
        if magic != _MAGIC:
            raise UserError(f"model {name}: {file.name} is not a GGUF file")
        reader = _bounded_reader(file)
        tensors = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except OSError as error:
        raise UserError(f"model {name}: cannot read {file}: {error.strerror}") from None
    except UserError:
        raise
    except Exception as error:  # the reader checks no bounds, so any of its statements can fail
        raise UserError(
            f"model {name}: {file.name} is truncated, damaged or of an unknown version: "
            f"{first_lines(error)}"
        ) from None

    def value(key: str, default: Any) -> Any:
        found = metadata.get(key, default)
        if type(found) is not type(default):
            raise UserError(
                f"model {name}: {file.name} is damaged: {key} has the type "
                f"{type(found).__name__} instead of {type(default).__name__}"
            )
        return found

    architecture = value("general.architecture", "")
    if value("split.count", 1) > 1:
        raise UserError(
            f"model {name}: {file.name} is one part of several; join them with llama-gguf-split "
            "--merge"
        )
    scaling = value(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or any(tensor.startswith("rope_") for tensor in tensors):
        raise UserError(
            f"model {name}: {file.name} scales its rotary embeddings, which transformers does not "
            "read from GGUF files; use the model in safetensors format"
        )
    return _Header(
        architecture=architecture,
        numbers=sum(tensors.values()),
        splits_digits=value("tokenizer.ggml.pre", "") in _DIGIT_SPLITS,
    )


def _bounded_reader(file: Path) -> Any:
    """The reader of `gguf`, which stops where it is told to read what the file does not have.

    By itself it takes what lies beyond the end of the file as empty, and a damaged count of items
    keeps it busy for years.
    """
    from gguf import GGUFReader, GGUFValueType  # an optional package

    class Bounded(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **options: Any) -> Any:
            found = super()._get(offset, dtype, count, *more, **options)
            if len(found) != int(count):
                raise ValueError(f"it ends at byte {len(self.data)}, within a value")
            return found

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == GGUFValueType.ARRAY:
                items = int(super()._get(orig_offs + 4, np.uint64)[0])
                if items > min(_MOST_ITEMS, len(self.data) - orig_offs):
                    raise ValueError(f"an array of its metadata has {items} items")
            return super()._get_field_parts(orig_offs, raw_type)

    return Bounded(file)


def _check_disk(name: str, target: Path, needed: int) -> None:
    """Refuse to write `needed` bytes if the disk of the cache has no room for them.

    Raises:
        UserError: There is not enough room.
    """
    existing = next(folder for folder in target.parents if folder.is_dir())
    free = shutil.disk_usage(existing).free
    if free < needed + _SPARE:
        raise UserError(
            f"model {name}: the converted copy needs {(needed + _SPARE) / 1e9:.2f} GB in "
            f"{cache_dir()}, which has {free / 1e9:.2f} GB free; make room, or set KVBENCH_CACHE "
            "to another folder"
        )


@contextlib.contextmanager
def _conversion(name: str, header: _Header) -> Iterator[None]:
    """Keep transformers quiet, and turn what it raises into one line.

    Raises:
        UserError: transformers cannot read the file.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars that have no switch
            yield
    except UserError:
        raise
    except Exception as error:  # whatever the reader of the architecture raises
        if out_of_memory(error):
            raise
        raise UserError(
            f"model {name}: transformers {version('transformers')} cannot read this GGUF file "
            f"(architecture {header.architecture}): {first_lines(error)}"
        ) from error


def _unquantised(config: Any) -> Any:
    """Remove the note that weights are GGUF blocks: transformers does not save such a model."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _plain_model(model: nn.Module) -> Any:
    """A model with the same weights that transformers does not regard as quantised."""
    config = _unquantised(model.config)
    with torch.device("meta"):
        plain: Any = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return plain
