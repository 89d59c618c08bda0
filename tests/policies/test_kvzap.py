"""KVzap keeps what a slow loop over its networks' weights keeps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.engine.models import model_info
from kvbench.errors import UserError
from kvbench.spelling import policy
from kvbench_policies.gates import GateConfig, RetentionGates, load, save

from . import oracles as o
from .drawing import HEADS, llama, padded, tokens
from .test_kvzip import hidden_states

LENGTHS = (45, 31, 9)


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def predicted(weights: dict[str, np.ndarray], layer: int, x: np.ndarray) -> list[float]:
    """What the network of a layer says of one token, per KV head."""
    own = {name.removeprefix(f"layers.{layer}."): w.astype(np.float64) for name, w in weights.items()}
    if "linear1.weight" in own:
        inner = [
            sum(float(w) * float(z) for w, z in zip(row, x, strict=True)) + float(b)
            for row, b in zip(own["linear1.weight"], own["linear1.bias"], strict=True)
        ]
        x = np.array([gelu(z) for z in inner])
    return [
        sum(float(w) * float(z) for w, z in zip(row, x, strict=True)) + float(b)
        for row, b in zip(own["linear2.weight"], own["bias"], strict=True)
    ]


def gates_of(model: Any, gate: Literal["mlp", "linear"], folder: Path) -> Path:
    """Random gates that tell tokens, layers and heads apart."""
    torch.manual_seed(5)
    gates = RetentionGates(GateConfig.of("kvzap", model_info(model), gate=gate, hidden_dim=12))
    with torch.no_grad():
        for weight in gates.parameters():
            weight += torch.randn_like(weight) * 0.3
    return save(gates, folder / f"kvzap-{gate}")


@torch.no_grad()
def ranked(model: Any, folder: Path, ids: Tensor, window: int) -> list[o.Ranked]:
    """Scores and classes of one sequence, by layer."""
    weights = {name: w.numpy() for name, w in load(folder).state_dict().items()}
    with hidden_states(model) as hidden:
        model(ids[None])
    length = len(ids)
    classes = [o.last_class(t, length, window) for t in range(length)]
    out = []
    for i, states in enumerate(hidden):
        said = [predicted(weights, i, x) for x in states.double().numpy()]
        out.append(o.Ranked([[row[h] for row in said] for h in range(HEADS)], [classes] * HEADS))
    return out


@pytest.mark.parametrize(("group", "gate", "window"), [(1, "mlp", 5), (2, "linear", 0), (4, "mlp", 128), (2, "mlp", 8)])
def test_kept_sets_agree_with_the_oracle(
    group: int, gate: Literal["mlp", "linear"], window: int, tmp_path: Path
) -> None:
    model: Any = llama(group)
    folder = gates_of(model, gate, tmp_path)
    spec = f"kvzap:window={window}:gates={folder}"
    for lengths in (LENGTHS[:1], LENGTHS):
        rows = tokens(lengths)
        ids, mask = padded(rows)
        by_row = [ranked(model, folder, row, window) for row in rows]
        for allocate, shares in (("global", o.global_shares), ("uniform", o.uniform)):
            for budget in (1, 7, 8, 9, 30, 45):
                kept = kvbench.kept(model, ids, f"{spec}:allocate={allocate}", budget, mask)
                for r, layers in enumerate(by_row):
                    counts = shares(layers, min(budget, lengths[r]))
                    want = [
                        [sorted(o.order_head(x, h)[:n]) for h, n in enumerate(own)]
                        for x, own in zip(layers, counts, strict=True)
                    ]
                    got = [
                        [h.nonzero()[:, 0].sub(max(lengths) - lengths[r]).tolist() for h in of[r]]
                        for of in kept
                        if of is not None
                    ]
                    assert got == want, (allocate, budget, r)


def test_the_default_budget_is_that_of_a_threshold(tmp_path: Path) -> None:
    """Without a window, all that is kept scores at least as high as all that is not."""
    model: Any = llama(2)
    folder = gates_of(model, "mlp", tmp_path)
    (row,) = tokens([33])
    kept = kvbench.kept(model, row[None], f"kvzap:window=0:gates={folder}", 11)
    scores = [x.value for x in ranked(model, folder, row, 0)]
    flags = torch.stack([of[0] for of in kept if of is not None]).flatten(0, 1)
    values = torch.tensor([head for layer in scores for head in layer])
    threshold = values[flags].min()
    assert torch.equal(flags, values >= threshold)
    assert len({int(n) for n in flags.sum(-1)}) > 1, "heads hold different numbers of entries"


def test_gates_of_other_kinds_are_refused(tmp_path: Path) -> None:
    model: Any = llama(2)
    found = policy("locret").stand_in(model_info(model), tmp_path)
    assert found.score is not None
    wrong = policy("kvzap", gates=found.score.parameters()["gates"])
    with pytest.raises(UserError, match="are for locret; use gates trained for kvzap"):
        kvbench.kept(model, torch.arange(9)[None], wrong, "4")
