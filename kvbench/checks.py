"""`kvbench check`: test the invariants that every policy must satisfy.

The checks run `kvbench.kept` on small models with random weights; for a policy with a reader, they use the entries that
the first answer token reads.
"""

from __future__ import annotations

import copy
import functools
import traceback
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from kvbench.budget import Budget
from kvbench.engine.integrity import Weights
from kvbench.engine.models import model_info
from kvbench.engine.session import attach, entries_read, kept
from kvbench.errors import BudgetRefused, UserError, message_of
from kvbench.plugin import Part, Policy
from kvbench.probes import Failed, ReaderProbe, ScoreProbe
from kvbench.spelling import KINDS, policy, spell

_VOCABULARY = 96
_TOKENS = 61
_LENGTHS = (_TOKENS, 40, 17)
_FOLLOWING = 7
"""Tokens of question and answer together."""
_PROMPT, _DECODED_BUDGET, _BUFFER = 33, 12, 4
"""Tokens and budget of the check while decoding, and entries beyond the budget after which a head evicts."""
_BUDGETS: tuple[str, ...] = ("1", "0.2", "13", "0.73", str(_TOKENS))


@dataclass(frozen=True)
class CheckResult:
    """Result of checking one invariant.

    Attributes:
        name: The invariant.
        ok: Whether it holds.
        detail: Expected and actual results if it fails, otherwise the cases tried.
    """

    name: str
    ok: bool
    detail: str


@functools.cache
def _models() -> dict[str, nn.Module]:
    """Build models with random weights large enough for uneven attention."""
    config_values: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,  # a policy may treat some of them as dense
        "num_key_value_heads": 2,
        "initializer_range": 0.15,
        "max_position_embeddings": 256,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        llama = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **config_values))
        qwen = Qwen3ForCausalLM(Qwen3Config(num_attention_heads=8, head_dim=8, **config_values))
        for parameter in (*llama.parameters(), *qwen.parameters()):
            if parameter.dim() == 1:  # norms: with weights of 1, all keys of Qwen3 have the same norm
                parameter.data += 0.3 * torch.randn_like(parameter)
    return {"Llama, G=2": llama.eval(), "Qwen3, G=4": qwen.eval()}


@functools.cache
def _folder() -> TemporaryDirectory[str]:
    """Return the folder of synthetic files, which exists until the program ends."""
    return TemporaryDirectory()


def _tokens(row_count: int, length: int) -> Tensor:
    """Return ids `[rows, length]`, distinct within a row: equal keys would tie up to rounding."""
    generator = torch.Generator().manual_seed(row_count * 1000 + length)
    return torch.rand(row_count, _VOCABULARY, generator=generator).argsort(1)[:, :length]


def _keep(
    model: nn.Module,
    token_ids: Tensor,
    candidate: Policy,
    budget: str,
    attention_mask: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """Return the kept entries, bool `[L, B, H, T]`, using synthetic model files.

    For a policy with a reader, return the entries that the next token reads, `[L, B, H, T + 1]`.
    """
    candidate = candidate.stand_in(model_info(model), Path(_folder().name))
    if candidate.read is None:
        # A policy that sees question and answer is told a few tokens, which depend on nothing but the row.
        following = token_ids[:, -_FOLLOWING:].flip(1) if candidate.is_informed else None
        layer_masks = kept(model, token_ids, candidate, budget, attention_mask, seed=seed, following=following)
    else:
        layer_masks = entries_read(model, token_ids, candidate, budget, attention_mask, seed=seed)
    return torch.stack([layer_mask for layer_mask in layer_masks if layer_mask is not None])


def run_checks(policy_spec: str) -> list[CheckResult]:
    """Check a policy such as `./my_policy.py:MyPolicy` and return a result per invariant.

    Raises:
        UserError: The policy cannot be loaded.
    """
    candidate = policy(policy_spec)
    results = [CheckResult("loads", True, str(candidate))]
    checks: list[tuple[str, Callable[[Policy], str]]] = [
        ("parameters round-trip", _parameters),
        ("scores are finite, inputs unmodified", _clean),
        ("exactly N entries", _exact),
        ("odd and short lengths", _odd),
        ("padding does not change kept entries", _padding),
        ("rows do not depend on their batch", _batch),
        ("deterministic", _deterministic),
        ("bfloat16", _bfloat16),
        ("eviction while decoding", _decoding),
    ]
    for check_name, check in checks:
        try:
            results.append(CheckResult(check_name, True, check(candidate)))
        except Failed as failure:
            results.append(CheckResult(check_name, False, str(failure)))
        except (Exception, SystemExit) as error:  # a plugin may raise anything
            results.append(CheckResult(check_name, False, _where(error)))
    if not all(result.ok for result in results):  # the policy may have changed the models
        _models.cache_clear()
        _in_bfloat16.cache_clear()
    return results


def _where(error: BaseException) -> str:
    """Describe an error in one line, with its location in the plugin."""
    stack_frames = traceback.extract_tb(error.__traceback__)
    own_files = (__file__, torch.__file__, transformers.__file__)
    own_folders = tuple(str(Path(module_file or "").parent) for module_file in own_files)
    plugin_frames = [stack_frame for stack_frame in stack_frames if not stack_frame.filename.startswith(own_folders)]
    location = f" ({plugin_frames[-1].filename}:{plugin_frames[-1].lineno})" if plugin_frames else ""
    message_lines = message_of(error).splitlines()
    return f"{type(error).__name__}: {message_lines[0] if message_lines else ''}{location}"


def _small(candidate: Policy) -> str:
    """Return a small budget that the policy accepts."""
    try:
        _keep(next(iter(_models().values())), _tokens(1, _TOKENS), candidate, "0.2")
    except BudgetRefused:
        return "0.73"
    except Exception:  # the check itself reports it
        return "0.2"
    return "0.2"


# --- the invariants -------------------------------------------------------------------------------


def _count(candidate: Policy, kept_masks: Tensor, budget: str, lengths: list[int], description: str) -> None:
    """Compare the number of entries of every sequence with the budget."""
    layer_count, _, head_count, _ = kept_masks.shape
    for row_index, length in enumerate(lengths):
        head_budget = Budget.parse(budget).per_head(length) if candidate.has_budget else length
        expected_count, actual_count = (
            layer_count * head_count * head_budget,
            int(kept_masks[:, row_index].sum()),
        )
        if actual_count != expected_count:
            raise Failed(
                f"{description}, {length} tokens, budget {budget}: expected N = {layer_count} x "
                f"{head_count} x {head_budget} = {expected_count} entries, got {actual_count}"
            )


def _exact(candidate: Policy) -> str:
    accepted: dict[str, None] = {}
    for model_name, model in _models().items():
        for budget in _BUDGETS:
            with suppress(BudgetRefused):
                _count(
                    candidate,
                    _keep(model, _tokens(1, _TOKENS), candidate, budget),
                    budget,
                    [_TOKENS],
                    model_name,
                )
                accepted[budget] = None
    refused_budgets = [budget for budget in _BUDGETS if budget not in accepted]
    refusals = f"; refused: {', '.join(refused_budgets)}" if refused_budgets else ""
    return f"{_TOKENS} tokens, budgets {', '.join(accepted)}, {' and '.join(_models())}{refusals}"


def _odd(candidate: Policy) -> str:
    lengths = (1, 2, 3, 7, 33)
    for model_name, model in _models().items():
        for length in lengths:
            for budget in ("1", "0.4"):
                with suppress(BudgetRefused):
                    kept_masks = _keep(model, _tokens(1, length), candidate, budget)
                    _count(candidate, kept_masks, budget, [length], model_name)
    return f"{', '.join(map(str, lengths))} tokens"


def _padded() -> tuple[Tensor, Tensor]:
    """Return ids and mask of a left-padded batch, `[B, T]` each."""
    attention_mask = torch.arange(_TOKENS) >= _TOKENS - torch.tensor(_LENGTHS)[:, None]
    return _tokens(len(_LENGTHS), _TOKENS), attention_mask


def _padding(candidate: Policy) -> str:
    token_ids, attention_mask = _padded()
    for model_name, model in _models().items():
        for budget in dict.fromkeys(("1", "0.2", "13", _small(candidate))):
            with suppress(BudgetRefused):
                kept_masks = _keep(model, token_ids, candidate, budget, attention_mask)
                _count(
                    candidate,
                    kept_masks,
                    budget,
                    list(_LENGTHS),
                    f"{model_name}, padded on the left",
                )
                for row_index, length in enumerate(_LENGTHS):
                    single_masks = _keep(model, token_ids[row_index : row_index + 1, -length:], candidate, budget)
                    padding_text = f"{length} tokens and {_TOKENS - length} of padding"
                    _same(
                        kept_masks[:, row_index, :, -single_masks.shape[-1] :],
                        single_masks[:, 0],
                        f"{model_name}, budget {budget}, {padding_text}",
                    )
    return f"rows of {', '.join(map(str, _LENGTHS))} tokens in one batch"


def _batch(candidate: Policy) -> str:
    token_ids, budget = _tokens(3, 33), _small(candidate)
    for model_name, model in _models().items():
        batch_masks = _keep(model, token_ids, candidate, budget)
        reversed_masks = _keep(model, token_ids.flip(0), candidate, budget).flip(1)
        _same(batch_masks, reversed_masks, f"{model_name}, the same rows in another order")
        for row_index in range(3):
            single_masks = _keep(model, token_ids[row_index : row_index + 1], candidate, budget)
            _same(
                batch_masks[:, row_index],
                single_masks[:, 0],
                f"{model_name}, row {row_index} of 3 vs the same row alone",
            )
    return "three rows together, in another order, and alone"


def _deterministic(candidate: Policy) -> str:
    seed_matters, budget = False, _small(candidate)
    for model_name, model in _models().items():
        token_ids = _tokens(2, _TOKENS)
        first_masks = _keep(model, token_ids, candidate, budget)
        _same(_keep(model, token_ids, candidate, budget), first_masks, f"{model_name}, repeated")
        seed_matters |= not torch.equal(_keep(model, token_ids, candidate, budget, seed=1), first_masks)
    return "identical when repeated; another seed changes " + ("the kept entries" if seed_matters else "nothing")


def _same(actual_masks: Tensor, expected_masks: Tensor, description: str) -> None:
    """Compare kept sets `[L, ..., T]`."""
    differences = actual_masks != expected_masks
    if bool(differences.any()):
        layer_index = int(differences.flatten(1).any(1).nonzero()[0])
        token_index = int(differences[layer_index].flatten(0, -2).any(0).nonzero()[0])
        raise Failed(
            f"{description}: {int((actual_masks & differences).sum())} entries are kept and "
            f"{int((expected_masks & differences).sum())} evicted unexpectedly, the first at token {token_index} in "
            f"layer {layer_index}"
        )


def _clean(candidate: Policy) -> str:
    if not candidate.has_budget:
        return "nothing is scored"
    probe: Any
    if candidate.score is not None:
        probe = ScoreProbe(candidate.score)
        probed_policy = replace(candidate, base=None, score=probe)
    else:
        assert candidate.read is not None
        probe = ReaderProbe(candidate.read, dense_layers=candidate.read.dense_layers)
        probed_policy = replace(candidate, base=None, read=probe)
    (token_ids, attention_mask), budget = _padded(), _small(candidate)
    for model_name, model in _models().items():
        weights = Weights(model)
        error: Exception | None = None
        try:
            _keep(model, token_ids, probed_policy, budget, attention_mask)
        except Exception as raised:
            error = raised
        probe.settle()
        if changed_name := weights.changed():
            raise Failed(f"{model_name}: the model's parameter {changed_name} was modified in place")
        if probe.problems:  # report the modification rather than an error that follows from it
            raise Failed(f"{model_name}: {probe.problems[0]}")
        if error is not None:
            raise error
    return "in every layer, with padding"


def _bfloat16(candidate: Policy) -> str:
    for model_name, model in _models().items():
        half_model = _in_bfloat16(model)
        for budget in dict.fromkeys(("1", "0.2", _small(candidate))):
            with suppress(BudgetRefused):
                kept_masks = _keep(half_model, _tokens(1, _TOKENS), candidate, budget)
                _count(candidate, kept_masks, budget, [_TOKENS], f"{model_name} in bfloat16")
                _same(
                    _keep(half_model, _tokens(1, _TOKENS), candidate, budget),
                    kept_masks,
                    f"{model_name} in bfloat16, repeated",
                )
    return "exactly N, identical when repeated"


@functools.cache
def _in_bfloat16(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(torch.bfloat16)


@torch.no_grad()
def _decoding(candidate: Policy) -> str:
    if candidate.is_informed:
        return "none: the policy sees the answer"
    evicts = candidate.evicts and candidate.has_budget and candidate.read is None
    for model_name, model in _models().items():
        standing_in = candidate.stand_in(model_info(model), Path(_folder().name))
        soon_full = replace(standing_in, base=None, buffer=_BUFFER)
        with suppress(BudgetRefused), attach(model, soon_full, _DECODED_BUDGET, moment="decode") as cache:
            logits = model(input_ids=_tokens(2, _PROMPT), past_key_values=cache).logits
            for _ in range(3 * _BUFFER):
                logits = model(input_ids=logits[:, -1:].argmax(-1), past_key_values=cache).logits
            if not bool(logits.isfinite().all()):
                raise Failed(f"{model_name}: logits are not finite")
            info, most_per_head = model_info(model), _DECODED_BUDGET + _BUFFER
            for row in range(2) if evicts else ():
                held, most = cache.live_entries(row), info.layers * info.kv_heads * most_per_head
                if held > most:
                    raise Failed(f"{model_name}: {held} entries are held; budget and buffer allow {most}")
    return f"budget {_DECODED_BUDGET}, {_PROMPT} tokens and {3 * _BUFFER} more"


# --- parameters -----------------------------------------------------------------------------------


def _parameters(candidate: Policy) -> str:
    if policy(str(candidate)) != candidate:
        raise Failed(f"{candidate} is parsed as {policy(str(candidate))}")
    parameter_keys = []
    for part_kind in KINDS:
        component: Part | None = getattr(candidate, part_kind)
        if component is None:
            continue
        value_types = component.parameter_types()
        for parameter_key, default_value in component.parameters().items():
            parameter_keys.append(parameter_key)
            _spelled_back(candidate, parameter_key, default_value, value_types[parameter_key])
    return ", ".join(parameter_keys) or "no parameters"


def _spelled_back(candidate: Policy, parameter_key: str, default_value: object, type_hint: object) -> None:
    if policy(candidate, **{parameter_key: spell(default_value)}) != candidate:
        raise Failed(
            f"{parameter_key}={spell(default_value)}, the default, is not parsed as {default_value!r}; a parameter "
            "must be an int, float, bool, str or a Literal"
        )
    for other_value in _others(default_value, type_hint):
        try:
            changed_policy = policy(candidate, **{parameter_key: other_value})
        except UserError:
            continue  # out of range and reported in one line, as required
        except Exception as error:
            raise Failed(
                f"{parameter_key}={spell(other_value)} raises {type(error).__name__}; raise UserError with "
                "one line instead"
            ) from error
        reparsed_policy = policy(str(changed_policy))
        if reparsed_policy != changed_policy or str(reparsed_policy) == str(candidate):
            raise Failed(
                f"{parameter_key}={spell(other_value)} is spelled {changed_policy} but parsed as {reparsed_policy}"
            )


def _others(default_value: object, type_hint: object) -> Iterator[object]:
    """Yield values other than the default, in range or not."""
    choices = typing.get_args(type_hint)
    if typing.get_origin(type_hint) is typing.Literal:
        yield from (choice for choice in choices if choice != default_value)
    elif isinstance(default_value, bool):
        yield not default_value
    elif isinstance(default_value, int):
        yield from (default_value + 2, max(1, default_value // 2) if default_value != 1 else 3, -1)
    elif isinstance(default_value, float):
        yield from (
            default_value / 2 if default_value else 0.5,
            1.0 if default_value != 1 else 0.25,
            -1.0,
        )
    elif default_value is None and int in choices:
        yield from (5, -1)
