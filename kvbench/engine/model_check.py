"""The self-test of a loaded model: its attention in kvbench against transformers' own, module by module.

A short text runs on the stock model, and the hidden states that enter and leave every attention module are recorded.
kvbench then runs the same text with the recorded inputs, so that errors do not add up over layers and a narrow limit
holds in any dtype. Nothing that begins after `_TEXT` tokens is tested, such as a longer sliding window.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from kvbench import native
from kvbench.budget import Budget
from kvbench.engine.contract import family_of
from kvbench.engine.driver import engine, feed_one_by_one
from kvbench.engine.hardware import device_name
from kvbench.engine.kernels import launch
from kvbench.engine.kernels.launch import by_triton
from kvbench.engine.models import cache_inputs, decoder_of, devices_of, input_names, is_attention
from kvbench.engine.prefix import Compression, Prefix
from kvbench.errors import UserError, first_lines, out_of_memory
from kvbench.files import State, cache_dir, digest_of, file_digests, replacing, state_of
from kvbench.spelling import policy as build_policy

_PROMPT, _STEPS = 24, 4
_TEXT = _PROMPT + _STEPS
_ONE_BY_ONE = (_PROMPT, *[1] * _STEPS)
_CHUNK = (_PROMPT, _STEPS)
_WHOLE = (_TEXT,)
"""Tokens of each forward, in three ways to run the same text."""

_NOT_RUN = "transformers itself cannot run it"

_KERNEL_HINT = f"; if it runs with {launch.SWITCH}=0, a Triton kernel is at fault"

_LIMIT, _HALF_LIMIT = 1e-3, 5e-2
"""Largest relative error in float32, and with rounded weights or activations.

Correct families stay below 1e-6 and 2e-2; an ignored sink, cap or bias makes more than 0.2.
"""


@dataclass(frozen=True)
class ModuleError:
    """The largest error among a model's modules of one class.

    Attributes:
        kind: Name of the class.
        count: Number of modules.
        layer: Layer of the largest error.
        error: Norm of the difference, relative to the norm of the correct output, of the worst token.
    """

    kind: str
    count: int
    layer: int
    error: float


@dataclass(frozen=True)
class ModelCheck:
    """Result of the self-test.

    Attributes:
        family: Name of the model family.
        limit: Largest error that passes.
        attention: Errors of kvbench's attention.
        chunk: Differences between several tokens on a cache and the same tokens one by one, in the stock model, of
            modules with a recurrent state.
        whole: The same for the whole text without a cache.
        hint: How to rule out a kernel, if one runs on the model's device.
        seconds: Time of the test.
    """

    family: str
    limit: float
    attention: tuple[ModuleError, ...]
    chunk: tuple[ModuleError, ...] = ()
    whole: tuple[ModuleError, ...] = ()
    hint: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def one_by_one(self) -> bool:
        """Return whether new tokens must enter a cache one by one, because the stock model ignores its state."""
        return bool(self._above(self.chunk))

    @property
    def problem(self) -> str:
        """Return why kvbench cannot run the model, in one line; "" if it can."""
        if wrong := self._above(self.attention):
            return (
                f"{self.family} attention differs from transformers' by {wrong[0].error:.2g} in layer "
                f"{wrong[0].layer}; kvbench does not implement it yet{self.hint}"
            )
        if wrong := self._above(self.whole):
            return (
                f"{self.family} in transformers {version('transformers')} computes other states from a cache than "
                f"without one, by {wrong[0].error:.2g} in layer {wrong[0].layer}; kvbench cannot measure it"
            )
        return ""

    def _above(self, errors: Sequence[ModuleError]) -> list[ModuleError]:
        return [module_error for module_error in errors if not module_error.error <= self.limit]


# --- checks that were passed before ---------------------------------------------------------------


class Checked(NamedTuple):
    """What a model is tested for.

    kvbench's engine, the versions of torch and transformers, and the machine count as well.

    Attributes:
        revision: Commit of a hub model, or digest of a local one; "" if it has none, so that it is tested every time.
        dtype: Dtype, with the weight quantisation in brackets.
        device: Device type.
        attention: Implementation that the stock model runs with.
    """

    revision: str
    dtype: str
    device: str
    attention: str

    @property
    def digest(self) -> str:
        """Return the key of the result on any machine."""
        return digest_of([*self, *_software()])

    def digest_for(self, model: nn.Module) -> str:
        """Return the key of the result on the devices of a model, each of which has its own kernels."""
        devices = devices_of(model)
        code = [launch.implementation(device) if device.type == "cuda" else native.build() for device in devices]
        return digest_of([self.digest, *sorted({*map(device_name, devices), *code})])


@functools.cache
def _software() -> tuple[str, ...]:
    """Return what is tested: a digest of our code, which changes between releases in a checkout, and versions."""
    package = Path(__file__).parents[1]
    code_files = [*sorted(package.glob("engine/**/*.py")), *sorted(package.glob("view/*.py"))]
    return digest_of(file_digests(code_files)), version("torch"), version("transformers")


_PASSED: dict[str, dict[str, Any]] = {}
"""Results of this process, for a cache folder that cannot be written."""


def check_model(model: nn.Module, checked: Checked) -> None:
    """Test a model, unless it has passed before, and prepare it for the order in which its tokens must be fed.

    Raises:
        UserError: kvbench does not implement the model's attention.
    """
    local_digest = checked.digest_for(model)
    passed = _passed(local_digest)
    if passed is None:
        result = measure_model(model)
        if result.problem:
            raise UserError(result.problem)
        passed = {"limit": result.limit, "one_by_one": result.one_by_one}
        if checked.revision:
            _store([checked.digest, local_digest], passed)
    if passed["one_by_one"]:
        feed_one_by_one(model)


def recorded_check(checked: Checked) -> str:
    """Return the result of a model's test as recorded with a run; "" if this cache holds no passed test.

    A driver without a GPU records what its workers have tested.
    """
    passed = _passed(checked.digest)
    if passed is None:
        return ""
    order = ", tokens one by one" if passed["one_by_one"] else ""
    return f"passed, errors below {passed['limit']:g}{order}"


def _checks_file() -> Path:
    return cache_dir() / "model_checks.json"


def _passed(digest: str) -> Mapping[str, Any] | None:
    """Return the result of a model that has passed its test; None if it has not been tested."""
    checks_file = _checks_file()
    stored: Mapping[str, Any] = {}
    with contextlib.suppress(OSError):
        stored = _stored(checks_file, state_of(checks_file))
    return _PASSED.get(digest) or stored.get(digest)


@functools.lru_cache(maxsize=1)
def _stored(checks_file: Path, file_state: State) -> dict[str, dict[str, Any]]:
    """Return the results on disk, read again when the file changes."""
    try:
        results = json.loads(checks_file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(results, dict):
        return {}
    return {
        digest: result
        for digest, result in results.items()
        if isinstance(result, dict) and isinstance(result.get("limit"), float) and "one_by_one" in result
    }


def _store(digests: Sequence[str], passed: dict[str, Any]) -> None:
    results = dict.fromkeys(digests, passed)
    _PASSED.update(results)
    checks_file = _checks_file()
    with contextlib.suppress(OSError, UserError):  # the file only saves time
        checks_file.parent.mkdir(parents=True, exist_ok=True)
        stored = _stored(checks_file, state_of(checks_file)) if checks_file.exists() else {}
        with replacing(checks_file) as partial_path:
            partial_path.write_text(json.dumps(stored | results), encoding="utf-8")


# --- the test -------------------------------------------------------------------------------------


@torch.no_grad()
def measure_model(model: nn.Module) -> ModelCheck:
    """Run the self-test on a model outside `engine`. Of a vision model, the text decoder is tested.

    Raises:
        UserError: transformers or kvbench cannot run the model at all.
    """
    started = time.perf_counter()
    decoder = decoder_of(model)
    weights = [parameter for parameter in decoder.parameters() if parameter.is_floating_point()]
    is_exact = all(weight.dtype in (torch.float32, torch.float64) for weight in weights) and not _is_quantised(model)
    token_ids = _text(decoder)
    positions = torch.arange(_TEXT, device=token_ids.device)[None] if "position_ids" in input_names(decoder) else None

    if model is not decoder:  # what is around the decoder can fail by itself
        with _explained(model, _NOT_RUN):
            model(input_ids=token_ids[:, :1], use_cache=False)

    def run_stock(widths: Sequence[int]) -> None:
        cache = DynamicCache(config=decoder.config)
        with _explained(decoder, _NOT_RUN):
            _run(decoder, token_ids, positions, widths, cache)

    attention_records = [_Record(module) for module in decoder.modules() if is_attention(module)]
    state_records = [_Record(module) for module in decoder.modules() if _may_have_state(module)]
    with _hooked([*attention_records, *state_records], _Record.recording):
        run_stock(_ONE_BY_ONE)
    state_records = [record for record in state_records if record.has_cache and record.is_whole]
    hint = _KERNEL_HINT if any(by_triton(parameter) for parameter in decoder.parameters()) else ""
    explained = _explained(decoder, "kvbench cannot run it yet", hint)
    with engine(model), _hooked(attention_records, _Record.replaying), explained:
        prefix = Prefix(model, ())
        _run(decoder, token_ids, positions, [_PROMPT], prefix.cache)
        keep_all = Compression(build_policy("full"), Budget.parse("full"), "context", 0)
        (packed_cache,) = prefix.compress([keep_all])  # decoding has another attention function than the prefill
        _run(decoder, token_ids, positions, _ONE_BY_ONE[1:], packed_cache)
    attention_errors = _errors(attention_records)
    continuations: list[tuple[ModuleError, ...]] = []
    for widths in (_CHUNK, _WHOLE):
        if state_records:
            with _hooked(state_records, _Record.replaying):
                run_stock(widths)
        continuations.append(_errors(state_records) if state_records else ())
    chunk_errors, whole_errors = continuations
    return ModelCheck(
        family_of(decoder),
        _LIMIT if is_exact else _HALF_LIMIT,
        attention_errors,
        chunk_errors,
        whole_errors,
        hint,
        seconds=time.perf_counter() - started,
    )


def _layer_of(module: nn.Module) -> int | None:
    layer = getattr(module, "layer_idx", None)
    return layer if isinstance(layer, int) else None


def _may_have_state(module: nn.Module) -> bool:
    """Return whether a module may update a state of its own, such as a state-space model or a convolution.

    A decoder layer is not tested as a whole, because rounding may send a token to other experts.
    """
    if _layer_of(module) is None or isinstance(module, GradientCheckpointingLayer):
        return False
    has_inner_state = any(_layer_of(inner) is not None for inner in module.modules() if inner is not module)
    return has_inner_state == is_attention(module)


def _is_quantised(model: nn.Module) -> bool:
    return getattr(model, "hf_quantizer", None) is not None


def _text(decoder: Any) -> Tensor:
    """Return a random text, the same at every call."""
    vocabulary = int(decoder.config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(vocabulary, (1, _TEXT), generator=generator)
    return token_ids.to(next(decoder.parameters()).device)


def _run(decoder: Any, token_ids: Tensor, positions: Tensor | None, widths: Sequence[int], cache: Any) -> None:
    """Run the next tokens of a text on a cache, in forwards of the given widths."""
    column = cache.get_seq_length()
    for width in widths:
        columns = slice(column, column := column + width)
        inputs = {} if positions is None else {"position_ids": positions[:, columns]}
        decoder(input_ids=token_ids[:, columns], **cache_inputs(decoder, cache), **inputs)


@contextmanager
def _explained(decoder: nn.Module, reason: str, hint: str = "") -> Iterator[None]:
    """Turn any error of a forward into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the code of an unknown family can raise anything
        if out_of_memory(error):
            raise
        raise UserError(f"{family_of(decoder)}: {reason}: {first_lines(error)}{hint}") from error


class _Record:
    """Hidden states that enter and leave a module over a text, and the largest error of a run that receives the same.

    Attributes:
        has_cache: Whether the module receives the cache.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.column, self.error = 0, 0.0
        self.has_cache = False

    @property
    def is_whole(self) -> bool:
        """Return whether the module maps all tokens of a forward in order, `[1, tokens, width]`."""
        shapes = {hidden_states.shape[:2] for hidden_states in (*self.inputs, *self.outputs)}
        return shapes == {(1, width) for width in _ONE_BY_ONE}

    def recording(self) -> Iterator[Any]:
        """Install the hook of a run that is recorded."""

        def record(module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
            self.has_cache |= any(isinstance(argument, Cache) for argument in (*arguments, *keywords.values()))
            self.inputs.append(arguments[0] if arguments else keywords["hidden_states"])
            self.outputs.append(_first(output))

        yield self.module.register_forward_hook(record, with_kwargs=True)

    def replaying(self) -> Iterator[Any]:
        """Install the hooks of a run that receives the recorded inputs."""
        self.column, self.error = 0, 0.0
        inputs, outputs = torch.cat(self.inputs, 1), torch.cat(self.outputs, 1)

        def replace_input(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
            hidden_states = arguments[0] if arguments else keywords["hidden_states"]
            recorded = inputs[:, self.column : self.column + hidden_states.shape[1]]
            if arguments:
                return (recorded, *arguments[1:]), keywords
            return arguments, {**keywords, "hidden_states": recorded}

        def compare(module: nn.Module, arguments: Any, output: Any) -> None:
            hidden_states = _first(output)
            end = self.column + hidden_states.shape[1]
            self.error = max(self.error, _relative_error(hidden_states, outputs[:, self.column : end]))
            self.column = end

        # Before kvbench's own hooks, which pass the hidden states to observers.
        yield self.module.register_forward_pre_hook(replace_input, with_kwargs=True, prepend=True)
        yield self.module.register_forward_hook(compare)


def _first(output: Any) -> Tensor:
    hidden_states: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_states


def _relative_error(output: Tensor, correct: Tensor) -> float:
    """Return the norm of the difference relative to the correct output, of the worst token.

    Tokens whose correct output is not finite say nothing; decoding reports them.
    """
    output, correct = output.float(), correct.float()
    is_finite = correct.isfinite().all(-1)
    norms = correct.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
    errors = ((output - correct).norm(dim=-1) / norms)[is_finite]
    if not len(errors):
        return 0.0
    return float(errors.nan_to_num(math.inf).max())


@contextmanager
def _hooked(records: Sequence[_Record], install: Callable[[_Record], Iterator[Any]]) -> Iterator[None]:
    """Install hooks on the modules of records within the block."""
    handles: list[Any] = []
    try:
        for record in records:
            handles += install(record)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _errors(records: Sequence[_Record]) -> tuple[ModuleError, ...]:
    """Return the largest error of every class of modules, the largest first."""
    by_kind: dict[str, list[_Record]] = {}
    for record in records:
        by_kind.setdefault(type(record.module).__name__, []).append(record)
    module_errors = []
    for kind, same_kind in by_kind.items():
        worst = max(same_kind, key=lambda record: record.error)
        module_errors.append(ModuleError(kind, len(same_kind), _layer_of(worst.module) or 0, worst.error))
    return tuple(sorted(module_errors, key=lambda module_error: -module_error.error))
