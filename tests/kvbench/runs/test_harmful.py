"""A policy that changes what it is shown fails, and no other cell gets another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvbench import native
from kvbench.checks import run_checks
from kvbench.engine import decide
from kvbench.runs.grid import Grid
from kvbench.runs.runner import execute
from tests.sweeps import slow, slow_but

HEAD = """
from dataclasses import dataclass, replace
from kvbench.parts import FunctionScore, TopK, Uniform
from kvbench.plugin import AnswerAttention, PerToken, Policy, Queries, Score, View

def first(x):
    return x.reshape(-1)[:1]

@dataclass(frozen=True)
class Bad(Score):
    @property
    def needs(self):
        return frozenset({Queries(8)})

    def score(self, v):
        good = v.noise()
        spoil(v)
        return good

bad = Policy("bad", Bad(), Uniform(), TopK())


@dataclass(frozen=True)
class Told(Bad):
    @property
    def needs(self):
        return frozenset({AnswerAttention("full")})

told = Policy("bad", Told(), Uniform(), TopK())
"""

WRITES = {
    "valid": "v.valid.zero_()",
    "valid by data": "v.valid[0, 0].data.zero_()",
    "col": "v.col.numpy()[0, 0] += 1",
    "position": "v.position[0, 0].data.zero_()",
    "length": "v.length.data.zero_()",
    "seed": "v.seed.data.zero_()",
    "turns_ago": "v.turns_ago.data.fill_(1)",
    "visual": "v.visual.data.fill_(True)",
    "key": "v.key.mul_(0)",
    "key by data": "v.key.data.mul_(0)",
    "key by numpy": "v.key.numpy()[:] = 0",
    "value by numpy": "v.value.numpy()[:] = 0",
    "obs": "next(iter(v.obs.values())).zero_()",
    "obs by data": "next(iter(v.obs.values())).data.zero_()",
    "output weight": "w = v.model.output_weight(v.layer)\n    w /= w.norm()",
    "parameter": (
        "next(c.cell_contents for c in v.model.project.__closure__"
        " if isinstance(c.cell_contents, list))[0].q_proj.weight.data.zero_()"
    ),
    "buffer": (
        "next(c.cell_contents for c in v.model.rotary.__closure__"
        " if hasattr(c.cell_contents, 'inv_freq')).inv_freq.data.mul_(3)"
    ),
    "once": "v.once('mine', lambda v: v.key.norm(dim=-1)).data.zero_()",
}


def plugin(folder: Path, write: str) -> str:
    file = folder / "mine.py"
    file.write_text(f"{HEAD}\ndef spoil(v):\n    {write}\n")
    return f"{file}:bad"


USUAL: dict[str, Any] = {"budget": "0.3,0.6", "task": "niah_single_1", "length": 256, "samples": 2}


def run(out: Path, policy: str, **changes: Any) -> pd.DataFrame:
    return execute(Grid.from_dict({**USUAL, "policy": policy, "out": str(out), **changes})).cells


def scores(cells: pd.DataFrame) -> dict[tuple[str, str], float]:
    good = cells[~cells.policy.str.contains("bad")]
    return {(c.policy, c.budget): c.score for c in good.itertuples()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], float]:
    cells = run(tmp_path_factory.mktemp("alone"), "snapkv:window=8")
    assert (cells.status == "ok").all()
    found = scores(cells)
    assert max(found.values()) > 0.9, "a score of 0 could hide a broken model"
    return found


@pytest.mark.parametrize("field", slow_but(WRITES, "valid by data", "key by numpy", "parameter"))
def test_a_write_fails_its_cells_and_no_others(field: str, tmp_path: Path, alone: dict[tuple[str, str], float]) -> None:
    bad = plugin(tmp_path, WRITES[field])
    cells = run(tmp_path / "run", f"{bad},snapkv:window=8")
    failed = cells[cells.status != "ok"]
    assert set(failed.policy) == {bad} and len(failed) == 2
    assert failed.error.str.contains("in place; change a copy instead").all(), list(failed.error)
    assert scores(cells) == alone


@pytest.mark.parametrize("field", slow_but(WRITES, "valid by data", "key by numpy", "parameter"))
def test_check_reports_the_write(field: str, tmp_path: Path) -> None:
    results = {r.name: r for r in run_checks(plugin(tmp_path, WRITES[field]))}
    found = results["scores are finite, inputs unmodified"]
    assert not found.ok and "in place" in found.detail
    assert all(r.ok for r in run_checks("random")), "later checks have sound models"


@pytest.mark.skipif(native.library() is None, reason="cells have copies without native code")
@pytest.mark.parametrize("policies", ["snapkv:window=8,random,{mine}:bad", "{mine}:told,snapkv:window=8,random"])
def test_a_write_harms_no_cell_that_reads_the_same_prefill(
    policies: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, "_COPIED", 1)  # policies see the prefill's own K and V
    plugin(tmp_path, WRITES["key by data"])

    def responses(out: str, policy: str) -> dict[Any, str]:
        changes = {"policy": policy, "out": str(tmp_path / out), "moment": "context", "full": False, "budget": "0.5"}
        samples = execute(Grid.from_dict({**USUAL, **changes})).samples
        good = samples[~samples.policy.str.contains("mine")]
        return {(row.policy, row.budget, row.sample_id): row.response for row in good.itertuples()}

    alone = responses("alone", "snapkv:window=8,random")
    assert len(alone) == 4 and responses("beside", policies.format(mine=tmp_path / "mine.py")) == alone


OBSERVERS = {
    "hidden": "hidden.data.zero_()",
    "key": "key.data.zero_()",
    "parameter": (
        "next(c.cell_contents for c in model.project.__closure__"
        " if isinstance(c.cell_contents, list))[layer].k_proj.weight.data.zero_()"
    ),
}


@pytest.mark.parametrize("field", OBSERVERS)
def test_what_an_observer_writes_harms_no_other_cell(
    field: str, tmp_path: Path, alone: dict[tuple[str, str], float]
) -> None:
    file = tmp_path / "gate.py"
    file.write_text(
        HEAD
        + "@dataclass(frozen=True)\n"
        + "class Gate(PerToken):\n"
        + "    def measure(self, layer, hidden, key, value, model):\n"
        + "        number = key.float().norm(dim=-1)\n"
        + f"        {OBSERVERS[field]}\n"
        + "        return number\n"
        + "@dataclass(frozen=True)\n"
        + "class Gated(Score):\n"
        + "    @property\n"
        + "    def needs(self):\n"
        + "        return frozenset({Gate()})\n"
        + "    def score(self, v):\n"
        + "        return v.obs[Gate()]\n"
        + "bad = Policy('bad', Gated(), Uniform(), TopK())\n"
    )
    cells = run(tmp_path / "run", f"{file}:bad,snapkv:window=8")
    assert scores(cells) == alone
    failed = cells[cells.status != "ok"]
    if field == "parameter":  # the other writes go to copies
        assert set(failed.policy) == {f"{file}:bad"} and len(failed) == 2
        assert failed.error.str.contains("changed the model's parameter").all()
    else:
        assert failed.empty


@pytest.mark.parametrize(
    ("moment", "field"),
    [
        ("decode", "key by numpy"),
        ("question", "parameter"),
        slow("question", "key by numpy"),
        *(slow(moment, "parameter") for moment in ("decode", "chunked:64")),
    ],
)
def test_a_write_at_another_moment(moment: str, field: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"moment": moment, "budget": "120"}
    alone = run(tmp_path / "alone", "snapkv:window=8", **more)
    bad = plugin(tmp_path, WRITES[field])
    cells = run(tmp_path / "run", f"{bad},snapkv:window=8", **more)
    failed = cells[cells.status != "ok"]
    assert set(failed.policy) == {bad}
    assert failed.error.str.contains("in place").all()
    assert scores(cells) == scores(alone)


@pytest.mark.parametrize(
    ("cast", "kind"),
    [("long()", "int64"), ("bool()", "bool"), ("to(torch.complex64)", "complex64")],
)
def test_scores_that_are_not_floating_point_fail_in_a_run_as_in_check(cast: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import torch\ndef bad(v):\n    return v.value.float().norm(dim=-1).{cast}\n")
    cells = run(tmp_path / "run", f"{file}:bad,snapkv:window=8")
    failed = cells[cells.status != "ok"]
    assert set(failed.policy) == {f"{file}:bad"}
    text = f"the score returned {kind}, not floating-point; convert it"
    assert failed.error.str.contains(text, regex=False).all()
    found = {r.name: r for r in run_checks(f"{file}:bad")}
    assert text in found["scores are finite, inputs unmodified"].detail
