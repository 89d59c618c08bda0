"""Draws any registered parts with any parameters, and the models and batches to try them on.

The parts come from the registry, so that a new one is drawn as soon as it is registered; their
parameters are drawn from their types, and what a part refuses is left at its default.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import reject
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench import registry, spelling
from kvbench.engine.models import model_info
from kvbench.engine.pruning import depth_problem
from kvbench.errors import BudgetRefused, UserError
from kvbench.plugin import ModelInfo, Part, Policy, Score

LAYERS, HEADS, VOCABULARY, FIRST = 2, 2, 128, 70
FILES = tempfile.TemporaryDirectory()
WHOLE = (0, 1, 2, 3, 4, 5, 7, 16, 33)
REAL = (0.0, 0.01, 0.25, 0.29, 0.5, 0.7, 0.9, 1.0, 1.3, 3.0)


def registered(kind: str) -> list[str]:
    """Names of the parts of a kind; those that see the answer are in test_oracle."""
    names = {n.partition(".")[2] for n in registry.names(registry.PARTS) if n.startswith(kind)}
    names |= {n.partition(".")[2] for n in spelling._GENERIC if n.startswith(kind)}
    return sorted(n for n in names if not any(need.informed for need in spelling.part(kind, n).needs))


PARTS = {kind: registered(kind) for kind in spelling.KINDS}


def values(kind: Any) -> list[Any]:
    """What to try for a parameter of a type; nothing for text, which names files."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return list(options)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [v for o in options for v in ([None] if o is type(None) else values(o))]
    return {int: list(WHOLE), float: list(REAL), bool: [False, True]}.get(kind, [])


EVERY = [(kind, name) for kind, names in PARTS.items() for name in names]
"""Every registered part: its kind and name."""


@st.composite
def parts(draw: st.DrawFn, kind: str, name: str = "") -> Part:
    """The part of a name, or any, with a few parameters other than their defaults."""
    made = spelling.part(kind, name or draw(st.sampled_from(PARTS[kind])))
    for name, sort in made.parameter_types().items():
        options = values(sort)
        if options and draw(st.integers(0, 2)) == 0:
            try:
                made = made.replace(**{name: draw(st.sampled_from(options))})
            except UserError:
                continue
    if isinstance(made, Score) and depth_problem(made, LAYERS):
        made = made.replace(layer=LAYERS - 1)
    return made


@st.composite
def policies(draw: st.DrawFn, kind: str = "", name: str = "") -> Policy:
    """Any choice of parts, with the one of this kind and name."""
    named = {kind: name}
    made: Any = [draw(parts(sort, named.get(sort, ""))) for sort in ("score", "allocate", "select")]
    merge: Any = parts("merge", name) if kind == "merge" else st.none() | parts("merge")
    buffer = draw(st.sampled_from((0, 1, 3, 8)))
    return Policy("drawn", *made, merge=draw(merge), buffer=buffer)


def equipped(policy: Policy, model: LlamaForCausalLM | ModelInfo) -> Policy:
    """Give a policy that reads files of a model some to read."""
    info = model if isinstance(model, ModelInfo) else model_info(model)
    return policy.stand_in(info, Path(FILES.name))


@functools.cache
def llama(group: int) -> LlamaForCausalLM:
    """Random weights; the second KV head attends more sharply than the first."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS * group,
        num_key_value_heads=HEADS,
        head_dim=8,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(group)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        for layer in model.model.layers:
            query = layer.self_attn.q_proj.weight
            query.data[len(query) // 2 :] *= 3.0
    return model


def tokens(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Sequences in which no token comes twice (equal keys would be ties but for rounding).

    Ids below `FIRST` are for what follows them: before RoPE, the first layer's keys of a token that
    comes again are equal.
    """
    generator = torch.Generator().manual_seed(seed + sum(lengths))
    return [FIRST + torch.randperm(VOCABULARY - FIRST, generator=generator)[:n] for n in lengths]


def padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows as one batch, padded on the left, and which columns are tokens."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows])
    return ids, torch.arange(width) >= width - torch.tensor([len(row) for row in rows])[:, None]


@contextlib.contextmanager
def unless_refused() -> Iterator[None]:
    """Pass over what a part says it cannot meet (the engine's own checks never may fail)."""
    try:
        yield
    except BudgetRefused:
        reject()
