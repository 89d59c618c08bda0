"""Parsing of grid values from flags, Python or a YAML file, with error locations."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvbench.budget import Budget
from kvbench.errors import UserError, nearest, quoted, shorten, unknown
from kvbench.moments import Timing
from kvbench.runs.generation import Truncation
from kvbench.runs.prompt_lengths import TokenRange
from kvbench.runs.yaml_loader import Loader, read_text

_DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTIONS = ("auto", "sdpa", "eager", "flash_attention_2")
"""Attention implementations of transformers."""

_EXECUTORS = ("local", "ray")
DEFAULT_TEMPLATE = "default"
"""What `--apply-chat-template` without a name stands for."""
_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_HOT, _TINY = 100, 1e-6
_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([KMGT]?)i?B?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MOST = 1000
"""Maximum number of values in one list; building that many policies takes seconds."""
_INT32 = 2**31 - 1
INT64 = 2**63 - 1
_DIGITS = 400
"""Maximum length of an integer's text; Python refuses integers of more than 4,300 digits."""


def read_yaml(path: str | Path) -> tuple[dict[Any, Any], dict[Any, int]]:
    """Read a YAML mapping.

    Returns:
        The mapping, and the line of each key, counted from 1.

    Raises:
        UserError: The file cannot be read, is not a YAML mapping, or has a key twice.
    """
    try:
        yaml_text = read_text(Path(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: it is not UTF-8 (byte {error.start})") from None
    except ValueError as error:  # such as a path with a NUL byte
        raise UserError(f"cannot read {path}: {error}") from None
    try:
        return _mapping(Loader(yaml_text), path)
    except yaml.YAMLError as error:
        problem_mark = getattr(error, "problem_mark", None)
        line_number = (
            problem_mark.line + 1 if problem_mark else yaml_text.count("\n", 0, getattr(error, "position", 0)) + 1
        )
        problem = getattr(error, "problem", None) or getattr(error, "reason", None)
        raise UserError(f"{path}:{line_number}: {problem or str(error).splitlines()[0]}") from None
    except RecursionError:
        raise UserError(f"{path}: the YAML is nested too deeply") from None


def _mapping(loader: Loader, path: str | Path) -> tuple[dict[Any, Any], dict[Any, int]]:
    """Return the mapping of a document, and the line of each key."""
    mapping: dict[Any, Any] = {}
    key_lines: dict[Any, int] = {}
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{path}:1: a grid must be a mapping of keys to values")
        for key_node, value_node in node.value:
            line_number = key_node.start_mark.line + 1
            for child_node in (key_node, value_node):
                _check_plain(child_node, path, set())
            key = loader.construct_object(key_node, deep=True)
            value = loader.construct_object(value_node, deep=True)
            if not isinstance(key, Hashable):
                raise UserError(f"{path}:{line_number}: {quoted(key)} cannot be a key")
            if key in mapping:
                raise UserError(f"{path}:{line_number}: {quoted(key)} is given twice, first in line {key_lines[key]}")
            key_lines[key] = line_number
            mapping[key] = value
    finally:
        loader.dispose()
    return mapping, key_lines


_AS_WRITTEN = {
    "int": (re.compile(r"[-+]?(0|[1-9][0-9]*)"), "another number"),
    "float": (
        re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?", re.IGNORECASE),
        "another number",
    ),
    "timestamp": (re.compile(r"(?!)"), "a date"),
}
"""By type, the words that YAML reads as written, and what it takes others for."""


def _check_plain(node: yaml.Node, path: str | Path, checked: set[int]) -> None:
    """Refuse a word that YAML takes for another value, such as `1:30` (90) or `010` (8).

    Raises:
        UserError: There is one; the message names file, line and word.
    """
    if id(node) in checked:  # an alias
        return
    checked.add(id(node))
    if not isinstance(node, yaml.ScalarNode):
        pairs = node.value if isinstance(node, yaml.MappingNode) else [node.value]
        for child_node in (child_node for pair in pairs for child_node in pair):
            _check_plain(child_node, path, checked)
    elif node.style is None:
        plain_pattern, wrong_type = _AS_WRITTEN.get(node.tag.rpartition(":")[2], (_ANYTHING, ""))
        if not plain_pattern.fullmatch(node.value):
            raise UserError(
                f"{path}:{node.start_mark.line + 1}: YAML takes {node.value} for {wrong_type}; "
                "quote it, or write the value that you mean"
            )


_ANYTHING = re.compile(r".*", re.DOTALL)


def _items(value: Any, label: str) -> list[Any]:
    if isinstance(value, str):
        items: list[Any] = [entry.strip() for entry in value.split(",") if entry.strip()]
    elif isinstance(value, Iterable) and not isinstance(value, Mapping):
        items = [
            entry for element in value for entry in (_items(element, label) if isinstance(element, str) else [element])
        ]
    else:
        items = [value]
    if not items or any(element is None or isinstance(element, (Mapping, list, tuple)) for element in items):
        raise UserError(f"{label} must be a value or a list of values, not {quoted(value)}")
    if len(items) > _MOST:
        raise UserError(f"{len(items):,} {label} are too many for a run; use at most {_MOST:,}")
    return items


def names(label: str) -> Callable[[Any], tuple[str, ...]]:
    def read(value: Any) -> tuple[str, ...]:
        items = _items(value, label)
        if wrong_items := [item for item in items if not isinstance(item, str)]:
            raise UserError(f"{label} must be names, not {quoted(wrong_items[0])}")
        return tuple(dict.fromkeys(items))

    return read


def budgets(value: Any) -> tuple[str, ...]:
    parsed = [Budget.parse(spelling) for spelling in _items(value, "budgets")]
    return tuple(dict.fromkeys(str(budget) for budget in parsed))


def moments(value: Any) -> tuple[str, ...]:
    parsed = [Timing.parse(spelling) for spelling in names("moments")(value)]
    return tuple(dict.fromkeys(str(timing) for timing in parsed))


def integer(label: str, minimum: int, maximum: int = _INT32) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, str) and value.strip().isdecimal() and len(value) < _DIGITS:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            raise UserError(f"{label} must be an integer from {minimum} to {maximum}, not {quoted(value)}")
        return value

    return read


def lengths(value: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(integer("length", 1)(length) for length in _items(value, "lengths")))


def batch(label: str) -> Callable[[Any], int | str]:
    return lambda value: "auto" if value == "auto" else integer(label, 1)(value)


def memory(value: Any, label: str = "cache_memory") -> int:
    match = _MEMORY.fullmatch(str(value).strip()) if not isinstance(value, bool) else None
    byte_count = float(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 1 <= byte_count <= INT64:
        raise UserError(f"{label} must be a size such as 40GB or 512MB, not {quoted(value)}")
    return int(byte_count)


def text(label: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{label} must be a name, not {quoted(value)}")
        return value.strip()

    return read


def folder(value: Any) -> str:
    if not str(value).strip():
        raise UserError("out must be a folder, not an empty name")
    return str(value)


def dtype(value: Any) -> str:
    if value not in _DTYPES:
        raise unknown("dtype", value, _DTYPES)
    return str(value)


def attention(value: Any) -> str:
    if value not in ATTENTIONS:
        raise unknown("attn", value, ATTENTIONS)
    return str(value)


def template(value: Any) -> str | None:
    if value is None or value is False:
        return None
    return DEFAULT_TEMPLATE if value is True else text("apply_chat_template")(value)


def gen_kwargs(value: Any) -> dict[str, Any]:
    """Read `key=value,key=value` as lm-eval does, or a mapping."""
    if isinstance(value, Mapping):
        return dict(value)
    settings: dict[str, Any] = {}
    for pair in filter(None, str(value).split(",")):
        key, separator, setting = pair.partition("=")
        if not separator or not key.strip():
            raise UserError(f"gen_kwargs must be such as max_gen_toks=64,temperature=0.7, not {quoted(value)}")
        try:
            settings[key.strip()] = yaml.safe_load(setting)
        except yaml.YAMLError:
            settings[key.strip()] = setting
    return settings


def device_map(value: Any) -> str | dict[str, str | int]:
    if isinstance(value, Mapping) and value:
        if all(isinstance(module, str) and isinstance(device, str | int) for module, device in value.items()):
            return dict(value)
    elif value in _DEVICE_MAPS:
        return str(value)
    raise UserError(
        f"device_map must be {', '.join(_DEVICE_MAPS)} or a mapping of module names to devices, not {quoted(value)}"
    )


def choice(label: str, choices: Sequence[str]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            hint = nearest(str(value), choices) or f"; use {' or '.join(choices)}"
            raise UserError(f"--{label} {shorten(str(value))}{hint}")
        return str(value)

    return read


def at_least(label: str, minimum: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise UserError(f"--{label} {value}: use a whole number from {minimum}")
        return value

    return read


def executor(value: Any) -> str:
    if value not in _EXECUTORS:
        raise unknown("executor", value, _EXECUTORS)
    return str(value)


def gpus(value: Any) -> float:
    expected = "a fraction of a GPU or a whole number of GPUs"
    gpu_count = _number("gpus_per_cell", _TINY, _INT32, expected)(value)
    if gpu_count > 1 and gpu_count != int(gpu_count):
        raise UserError(f"gpus_per_cell must be {expected}, not {quoted(value)}")
    return gpu_count


def truth(label: str) -> Callable[[Any], bool]:
    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise UserError(f"{label} must be true or false, not {quoted(value)}")
        return value

    return read


def _number(label: str, minimum: float, maximum: float, expected: str) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not minimum <= number <= maximum:
            raise UserError(f"{label} must be {expected}, not {quoted(value)}")
        return number

    return read


def temperature(value: Any) -> float:
    return _number("temperature", 0, _HOT, f"a number from 0 (greedy) to {_HOT}")(value)


def probability(label: str) -> Callable[[Any], float]:
    return _number(label, _TINY, 1, "a number above 0 and at most 1")


def token_range(value: Any) -> str:
    return str(TokenRange.parse(str(value)))


def truncation(value: Any) -> str:
    return str(Truncation.parse(str(value)))


def optional(read: Callable[[Any], Any], *unset: str) -> Callable[[Any], Any]:
    return lambda value: None if value is None or value in unset else read(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        contents = value.items() if isinstance(value, Mapping) else value
        for item in contents:
            yield from _texts(item)


def check_texts(label: str, value: Any) -> None:
    """Refuse texts that cannot be used in file names or tables."""
    for contained in _texts(value):
        if "\0" in contained:
            raise UserError(f"{label} contains a NUL character: {quoted(contained)}")
        if re.search("[\ud800-\udfff]", contained):
            raise UserError(f"{label} contains a character that is not UTF-8: {quoted(contained)}")
