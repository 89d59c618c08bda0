"""Conversion of GGUF files into folders that transformers can load: dequantised once, into the cache.

A folder named after the file's digest holds two kinds of copies: a description (configuration and tokenizer), which is
all that planning needs, and a whole model per dtype.
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
from tokenizers import pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from kvbench.engine.weights import check_weights
from kvbench.errors import UserError, first_lines, out_of_memory
from kvbench.files import cache_dir, replacing_folder
from kvbench.named import is_gguf, model_digest, resolve_model

PACKAGES = ("gguf", "accelerate")
"""Packages that transformers needs to read a GGUF file."""

_CONVERSION = 1
"""Version of the conversion; copies from other versions are ignored."""

_MAGIC = b"GGUF"

_MOST_ITEMS = 1 << 22
"""Maximum number of items in a metadata array; the longest are vocabularies, which have fewer."""

_SPARE = 50_000_000
"""Allowance in bytes for a copy beyond its weights, mostly for the tokenizer."""

_DIGIT_SPLITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of `tokenizer.ggml.pre` that separate all digits before GPT-2's pattern is applied.

See `llm_tokenizer_bpe` in llama.cpp (src/llama-vocab.cpp). transformers ignores them and applies GPT-2's pattern alone.
"""


@dataclass(frozen=True)
class _Header:
    """Metadata read from a file before its conversion.

    Attributes:
        architecture: Its `general.architecture`.
        numbers: Number of values in all its tensors.
        splits_digits: Whether its tokenizer separates all digits; see `_DIGIT_SPLITS`.
    """

    architecture: str
    numbers: int
    splits_digits: bool


def gguf_packages(model: str) -> tuple[str, ...]:
    """Return the packages whose versions can change the result of a model's GGUF conversion."""
    return ("gguf",) if is_gguf(resolve_model(model)) else ()


def described(model: str, gguf_path: Path) -> Path:
    """Return the folder with the configuration and tokenizer of a GGUF file, without weights.

    Args:
        model: The model as the user named it, for messages.

    Raises:
        UserError: A package is missing, or the file cannot be read or converted.
    """
    target_folder = _copies(model, gguf_path) / "description"
    if not target_folder.is_dir():
        header = _read_header(model, gguf_path)
        with _conversion(model, header):
            config = _unquantised(AutoConfig.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name))
            tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
        if header.splits_digits:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        with replacing_folder(target_folder) as folder:
            config.save_pretrained(folder)
            GenerationConfig.from_model_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    return target_folder


def converted(model_name: str, gguf_path: Path, dtype: torch.dtype) -> Path:
    """Return the folder with the whole model of a GGUF file, with dequantised weights.

    Args:
        model_name: The model as the user named it, for messages.
        dtype: Dtype of the converted weights. They are dequantised in float32 and rounded once.

    Raises:
        UserError: A package is missing, the disk is full, or the file cannot be read or converted.
    """
    target_folder = _copies(model_name, gguf_path) / str(dtype).removeprefix("torch.")
    if not target_folder.is_dir():
        description = described(model_name, gguf_path)
        header = _read_header(model_name, gguf_path)
        _check_disk(model_name, target_folder, header.numbers * dtype.itemsize)
        with _conversion(model_name, header):
            loader: Any = AutoModelForCausalLM  # its stubs lack output_loading_info
            model, report = loader.from_pretrained(
                gguf_path.parent, gguf_file=gguf_path.name, dtype=dtype, output_loading_info=True
            )
            plain_model = _plain_model(model)
        check_weights(model_name, plain_model, report, quantised="")
        with replacing_folder(target_folder) as folder:
            plain_model.save_pretrained(folder)
            ignore_configs = shutil.ignore_patterns("config.json", "generation_config.json")
            shutil.copytree(description, folder, ignore=ignore_configs, dirs_exist_ok=True)
    return target_folder


def _copies(model: str, gguf_path: Path) -> Path:
    """Return the folder of a file's copies for the installed package versions."""
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise UserError(f"model {model}: a GGUF file needs {' and '.join(missing)}; run pip install 'kvbench[gguf]'")
    software_name = f"v{_CONVERSION}-transformers-{version('transformers')}-gguf-{version('gguf')}"
    return cache_dir() / "gguf" / model_digest(str(gguf_path)) / software_name


def _read_header(model: str, path: Path) -> _Header:
    """Read what decides whether and how a file can be converted.

    Raises:
        UserError: The file is not a whole GGUF model, or transformers would ignore a part of it.
    """
    try:
        with path.open("rb") as handle:
            magic = handle.read(len(_MAGIC))
        if magic != _MAGIC:
            raise UserError(f"model {model}: {path.name} is not a GGUF file")
        reader = _bounded_reader(path)
        tensors = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
        metadata = {field_name: field.contents() for field_name, field in reader.fields.items()}
    except OSError as error:
        raise UserError(f"model {model}: cannot read {path}: {error.strerror}") from None
    except UserError:
        raise
    except Exception as error:  # the reader checks no bounds, so any of its statements can fail
        raise UserError(
            f"model {model}: {path.name} is truncated, damaged or of an unknown version: {first_lines(error)}"
        ) from None

    def typed_value(field_name: str, default: Any) -> Any:
        stored = metadata.get(field_name, default)
        if type(stored) is not type(default):
            raise UserError(
                f"model {model}: {path.name} is damaged: {field_name} has the type "
                f"{type(stored).__name__} instead of {type(default).__name__}"
            )
        return stored

    architecture = typed_value("general.architecture", "")
    if typed_value("split.count", 1) > 1:
        raise UserError(f"model {model}: {path.name} is one part of several; join them with llama-gguf-split --merge")
    scaling = typed_value(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or any(tensor.startswith("rope_") for tensor in tensors):
        raise UserError(
            f"model {model}: {path.name} scales its rotary embeddings, which transformers does not read from "
            "GGUF files; use the model in safetensors format"
        )
    return _Header(
        architecture=architecture,
        numbers=sum(tensors.values()),
        splits_digits=typed_value("tokenizer.ggml.pre", "") in _DIGIT_SPLITS,
    )


def _bounded_reader(gguf_path: Path) -> Any:
    """Return `gguf`'s reader with bounds checks.

    The original takes data beyond the end of the file as empty, and a damaged item count keeps it busy for years.
    """
    from gguf import GGUFReader, GGUFValueType  # an optional package

    class Bounded(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **options: Any) -> Any:
            items = super()._get(offset, dtype, count, *more, **options)
            if len(items) != int(count):
                raise ValueError(f"it ends at byte {len(self.data)}, within a value")
            return items

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == GGUFValueType.ARRAY:
                item_count = int(super()._get(orig_offs + 4, np.uint64)[0])
                if item_count > min(_MOST_ITEMS, len(self.data) - orig_offs):
                    raise ValueError(f"an array of its metadata has {item_count} items")
            return super()._get_field_parts(orig_offs, raw_type)

    return Bounded(gguf_path)


def _check_disk(model: str, target_folder: Path, required: int) -> None:
    """Refuse to write `required` bytes if the cache's disk is too full.

    Raises:
        UserError: There is not enough space.
    """
    existing_folder = next(folder for folder in target_folder.parents if folder.is_dir())
    free = shutil.disk_usage(existing_folder).free
    if free < required + _SPARE:
        raise UserError(
            f"model {model}: the converted copy needs {(required + _SPARE) / 1e9:.2f} GB in {cache_dir()}, "
            f"which has {free / 1e9:.2f} GB free; free some space, or set KVBENCH_CACHE to another folder"
        )


@contextlib.contextmanager
def _conversion(model: str, header: _Header) -> Iterator[None]:
    """Silence transformers and turn its exceptions into one-line errors.

    Raises:
        UserError: transformers cannot read the file.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars that cannot be disabled
            yield
    except UserError:
        raise
    except Exception as error:  # the reader of the architecture can raise anything
        if out_of_memory(error):
            raise
        raise UserError(
            f"model {model}: transformers {version('transformers')} cannot read this GGUF file "
            f"(architecture {header.architecture}): {first_lines(error)}"
        ) from error


def _unquantised(config: Any) -> Any:
    """Remove the GGUF quantisation entry from a configuration: transformers does not save such a model."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _plain_model(model: nn.Module) -> Any:
    """Return a model with the same weights that transformers does not regard as quantised."""
    config = _unquantised(model.config)
    with torch.device("meta"):
        plain_model: Any = type(model)(config)
    plain_model.load_state_dict(model.state_dict(), assign=True)
    plain_model.tie_weights()
    return plain_model
