"""`kvbench check`: does a policy hold what every policy must hold?

Small models with random weights, built on the spot, decide through `kvbench.kept`, as a run would,
or through what the first token of an answer reads.
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
from kvbench.engine.session import entries_read, kept
from kvbench.errors import BudgetRefused, UserError, message_of
from kvbench.plugin import Part, Policy
from kvbench.probes import Failed, ReaderProbe, ScoreProbe
from kvbench.spelling import KINDS, policy, spell

_VOCABULARY = 96
_TOKENS = 61
_LENGTHS = (_TOKENS, 40, 17)
_BUDGETS: tuple[str, ...] = ("1", "0.2", "13", "0.73", str(_TOKENS))


@dataclass(frozen=True)
class CheckResult:
    """One invariant.

    Attributes:
        name: What was checked.
        ok: Whether it holds.
        detail: Where it does not: what was expected and what came; else what was tried.
    """

    name: str
    ok: bool
    detail: str


@functools.cache
def _models() -> dict[str, nn.Module]:
    """Random weights large enough that attention is far from even."""
    shape: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,  # a policy may keep some of them whole
        "num_key_value_heads": 2,
        "initializer_range": 0.15,
        "max_position_embeddings": 256,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        llama = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, **shape))
        qwen = Qwen3ForCausalLM(Qwen3Config(num_attention_heads=8, head_dim=8, **shape))
        for weight in (*llama.parameters(), *qwen.parameters()):
            if weight.dim() == 1:  # norms: with weights of 1 all of Qwen3's keys are equally long
                weight.data += 0.3 * torch.randn_like(weight)
    return {"Llama, G=2": llama.eval(), "Qwen3, G=4": qwen.eval()}


@functools.cache
def _folder() -> TemporaryDirectory[str]:
    """Where made-up files lie until the program ends."""
    return TemporaryDirectory()


def _tokens(rows: int, length: int) -> Tensor:
    """Ids `[rows, length]`, no id twice in a row: two equal keys would tie but for rounding."""
    generator = torch.Generator().manual_seed(rows * 1000 + length)
    return torch.rand(rows, _VOCABULARY, generator=generator).argsort(1)[:, :length]


def _keep(
    model: nn.Module, ids: Tensor, p: Policy, budget: str, mask: Tensor | None = None, seed: int = 0
) -> Tensor:
    """What is kept, bool `[L, B, H, T]`; files that a model should have are made up.

    With a reader: what the token after the last one reads, `[L, B, H, T + 1]`.
    """
    p = p.stand_in(model_info(model), Path(_folder().name))
    look = kept if p.read is None else entries_read
    layers = look(model, ids, p, budget, mask, seed=seed)
    return torch.stack([layer for layer in layers if layer is not None])


def run_checks(spec: str) -> list[CheckResult]:
    """Try the invariants that every policy must hold.

    Args:
        spec: A policy's spelling, as `./my_policy.py:MyPolicy`.

    Returns:
        A result per invariant.

    Raises:
        UserError: The policy cannot be loaded.
    """
    p = policy(spec)
    results = [CheckResult("loads", True, str(p))]
    checks: list[tuple[str, Callable[[Policy], str]]] = [
        ("parameters are spelled back", _parameters),
        ("scores are finite and inputs untouched", _clean),
        ("exactly N entries", _exact),
        ("odd and short lengths", _odd),
        ("a padded row keeps what it keeps alone", _padding),
        ("rows do not depend on their batch", _batch),
        ("deterministic", _deterministic),
        ("bfloat16", _bfloat16),
    ]
    for name, check in checks:
        try:
            results.append(CheckResult(name, True, check(p)))
        except Failed as failure:
            results.append(CheckResult(name, False, str(failure)))
        except (Exception, SystemExit) as error:  # a plugin may raise anything
            results.append(CheckResult(name, False, _where(error)))
    if not all(result.ok for result in results):  # the policy may have changed the models
        _models.cache_clear()
        _in_bfloat16.cache_clear()
    return results


def _where(error: BaseException) -> str:
    """An error in one line, with the place in the plugin where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = (__file__, torch.__file__, transformers.__file__)
    folders = tuple(str(Path(file or "").parent) for file in ours)
    own = [f for f in frames if not f.filename.startswith(folders)]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    lines = message_of(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}{place}"


def _small(p: Policy) -> str:
    """A small budget that the policy does not refuse."""
    try:
        _keep(next(iter(_models().values())), _tokens(1, _TOKENS), p, "0.2")
    except BudgetRefused:
        return "0.73"
    except Exception:  # the check itself says what it is
        return "0.2"
    return "0.2"


# --- the invariants -------------------------------------------------------------------------------


def _count(p: Policy, keep: Tensor, budget: str, lengths: list[int], what: str) -> None:
    """Hold the entries of every sequence against the budget."""
    layers, _, heads, _ = keep.shape
    for row, length in enumerate(lengths):
        b = Budget.parse(budget).per_head(length) if p.has_budget else length
        expected, got = layers * heads * b, int(keep[:, row].sum())
        if got != expected:
            raise Failed(
                f"{what}, {length} tokens, budget {budget}: expected N = {layers} x {heads} x {b} "
                f"= {expected} entries, got {got}"
            )


def _exact(p: Policy) -> str:
    met: dict[str, None] = {}
    for name, model in _models().items():
        for budget in _BUDGETS:
            with suppress(BudgetRefused):
                _count(p, _keep(model, _tokens(1, _TOKENS), p, budget), budget, [_TOKENS], name)
                met[budget] = None
    refused = [budget for budget in _BUDGETS if budget not in met]
    said = f"; refused: {', '.join(refused)}" if refused else ""
    return f"{_TOKENS} tokens, budgets {', '.join(met)}, {' and '.join(_models())}{said}"


def _odd(p: Policy) -> str:
    lengths = (1, 2, 3, 7, 33)
    for name, model in _models().items():
        for length in lengths:
            for budget in ("1", "0.4"):
                with suppress(BudgetRefused):
                    keep = _keep(model, _tokens(1, length), p, budget)
                    _count(p, keep, budget, [length], name)
    return f"{', '.join(map(str, lengths))} tokens"


def _padded() -> tuple[Tensor, Tensor]:
    """Ids and mask of a batch padded on the left, `[B, T]` each."""
    mask = torch.arange(_TOKENS) >= _TOKENS - torch.tensor(_LENGTHS)[:, None]
    return _tokens(len(_LENGTHS), _TOKENS), mask


def _padding(p: Policy) -> str:
    ids, mask = _padded()
    for name, model in _models().items():
        for budget in dict.fromkeys(("1", "0.2", "13", _small(p))):
            with suppress(BudgetRefused):
                keep = _keep(model, ids, p, budget, mask)
                _count(p, keep, budget, list(_LENGTHS), f"{name}, padded on the left")
                for row, length in enumerate(_LENGTHS):
                    alone = _keep(model, ids[row : row + 1, -length:], p, budget)
                    padding = f"{length} tokens and {_TOKENS - length} of padding"
                    _same(
                        keep[:, row, :, -alone.shape[-1] :],
                        alone[:, 0],
                        f"{name}, budget {budget}, {padding}",
                    )
    return f"rows of {', '.join(map(str, _LENGTHS))} tokens in one batch"


def _batch(p: Policy) -> str:
    ids, budget = _tokens(3, 33), _small(p)
    for name, model in _models().items():
        together = _keep(model, ids, p, budget)
        turned = _keep(model, ids.flip(0), p, budget).flip(1)
        _same(together, turned, f"{name}, the same rows in another order")
        for row in range(3):
            alone = _keep(model, ids[row : row + 1], p, budget)
            _same(together[:, row], alone[:, 0], f"{name}, row {row} of 3 against itself alone")
    return "three rows together, in another order, and alone"


def _deterministic(p: Policy) -> str:
    seeded, budget = False, _small(p)
    for name, model in _models().items():
        ids = _tokens(2, _TOKENS)
        first = _keep(model, ids, p, budget)
        _same(_keep(model, ids, p, budget), first, f"{name}, twice the same")
        seeded |= not torch.equal(_keep(model, ids, p, budget, seed=1), first)
    return "twice the same; another seed " + ("keeps others" if seeded else "changes nothing")


def _same(got: Tensor, expected: Tensor, what: str) -> None:
    """Compare kept sets `[L, ..., T]`."""
    wrong = got != expected
    if bool(wrong.any()):
        layer = int(wrong.flatten(1).any(1).nonzero()[0])
        token = int(wrong[layer].flatten(0, -2).any(0).nonzero()[0])
        raise Failed(
            f"{what}: {int((got & wrong).sum())} entries are kept and "
            f"{int((expected & wrong).sum())} evicted otherwise than expected, first token {token} "
            f"in layer {layer}"
        )


def _clean(p: Policy) -> str:
    if not p.has_budget:
        return "nothing is scored"
    probe: Any
    if p.score is not None:
        probe = ScoreProbe(p.score)
        watched = replace(p, base=None, score=probe)
    else:
        assert p.read is not None
        probe = ReaderProbe(p.read, dense_layers=p.read.dense_layers)
        watched = replace(p, base=None, read=probe)
    (ids, mask), budget = _padded(), _small(p)
    for name, model in _models().items():
        weights = Weights(model)
        error: Exception | None = None
        try:
            _keep(model, ids, watched, budget, mask)
        except Exception as raised:
            error = raised
        probe.settle()
        if changed := weights.changed():
            raise Failed(f"{name}: the model's parameter {changed} was changed in place")
        if probe.found:  # a change is a better reason than an error that follows from it
            raise Failed(f"{name}: {probe.found[0]}")
        if error is not None:
            raise error
    return "in every layer, with padding"


def _bfloat16(p: Policy) -> str:
    for name, model in _models().items():
        half = _in_bfloat16(model)
        for budget in dict.fromkeys(("1", "0.2", _small(p))):
            with suppress(BudgetRefused):
                keep = _keep(half, _tokens(1, _TOKENS), p, budget)
                _count(p, keep, budget, [_TOKENS], f"{name} in bfloat16")
                _same(_keep(half, _tokens(1, _TOKENS), p, budget), keep, f"{name}, twice the same")
    return "exactly N, twice the same"


@functools.cache
def _in_bfloat16(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(torch.bfloat16)


# --- parameters -----------------------------------------------------------------------------------


def _parameters(p: Policy) -> str:
    if policy(str(p)) != p:
        raise Failed(f"{p} read again gives {policy(str(p))}")
    names = []
    for kind in KINDS:
        piece: Part | None = getattr(p, kind)
        if piece is None:
            continue
        types = piece.parameter_types()
        for key, value in piece.parameters().items():
            names.append(key)
            _spelled_back(p, key, value, types[key])
    return ", ".join(names) or "there are none"


def _spelled_back(p: Policy, key: str, value: object, hint: object) -> None:
    if policy(p, **{key: spell(value)}) != p:
        raise Failed(
            f"{key}={spell(value)}, its own default, is not read back as {value!r}; a parameter is "
            "an int, float, bool, str or a Literal"
        )
    for other in _others(value, hint):
        try:
            changed = policy(p, **{key: other})
        except UserError:
            continue  # out of its range, and said in one line
        except Exception as error:
            raise Failed(
                f"{key}={spell(other)} raises {type(error).__name__}; raise UserError with one "
                "line instead"
            ) from error
        again = policy(str(changed))
        if again != changed or str(again) == str(p):
            raise Failed(f"{key}={spell(other)} is spelled {changed}, which reads as {again}")


def _others(value: object, hint: object) -> Iterator[object]:
    """Values other than the default, in range or not."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        yield from (option for option in options if option != value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 2, max(1, value // 2) if value != 1 else 3, -1)
    elif isinstance(value, float):
        yield from (value / 2 if value else 0.5, 1.0 if value != 1 else 0.25, -1.0)
    elif value is None and int in options:
        yield from (5, -1)
