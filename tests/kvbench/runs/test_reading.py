"""Policies that read few entries of all in a run: their own cells, exact counts, the same rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.runs.runner import Run
from kvbench.runs.schema import Response
from kvbench.runs.store import RunStore
from tests.sweeps import slow_but

GRIDS: dict[str, dict[str, Any]] = {
    "context": {"policy": "quest,snapkv", "budget": "0.1,0.3", "task": "vt"},
    "question": {
        "policy": "seerattn_r",
        "budget": "13,0.5",
        "task": "niah_single_1",
        "moment": "question",
    },
    "decode": {
        "policy": "quest:page=8,h2o:buffer=3",
        "budget": "20",
        "task": "longgen_copy",
        "moment": "decode",
        "max_new_tokens": 32,
    },
    "chunked": {"policy": "quest", "budget": "0.3", "task": "vt", "moment": "chunked:60"},
    "turns": {"policy": "quest:page=8", "budget": "0.4", "task": "dialogue", "moment": "turns"},
}
KEY = ["policy", "budget", "sample_id", "question_id"]


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def run(out: Path, **changes: Any) -> Run:
    base = {"length": 128, "samples": 2, "out": str(out), "device": "cpu"}
    return kvbench.run({**base, **changes}, progress=False)


def texts(made: Run) -> dict[Any, str]:
    frame = made.samples.set_index(KEY)
    return dict(zip(frame.index, frame["response"], strict=True))


@pytest.mark.parametrize("moment", slow_but(GRIDS, next(iter(GRIDS))))
def test_responses_depend_neither_on_the_batch_nor_on_the_other_cells(moment: str, tmp_path: Path) -> None:
    grid = GRIDS[moment]
    made = run(tmp_path / "all", **grid)
    assert list(made.cells["status"].unique()) == ["ok"]
    together = {k: v for k, v in texts(made).items() if k[0] != "full"}
    assert len(set(together.values())) > 1
    alone: dict[Any, str] = {}
    for policy in grid["policy"].split(","):
        out = tmp_path / policy.replace(":", "-")
        alone |= texts(run(out, **{**grid, "policy": policy, "batch_size": 1, "full": False}))
    assert alone == together


def test_everything_is_held_and_the_budget_is_read(tmp_path: Path) -> None:
    made = run(tmp_path, policy="quest,snapkv", budget="0.25", task="vt")
    with RunStore(tmp_path) as store:
        responses = store.responses()
    heads, dim, number = 4 * 2, 32, 4
    policies = dict(zip(made.cells["cell"], made.cells["policy"], strict=True))
    assert sorted(policies.values()) == ["full", "quest", "snapkv"]
    for r in responses:
        entry, tokens = 2 * dim * number, r.context_tokens
        few = kvbench.Budget.parse("0.25").per_head(tokens)
        if policies[r.cell] == "quest":
            pages = heads * (tokens // 16) * entry  # two numbers a channel: as large as an entry
            assert r.held_entries == heads * tokens
            assert r.budget_entries == heads * few
            assert r.kv_bytes_live == r.kv_bytes_full + pages
            assert r.kv_bytes_read == heads * few * entry + pages
            assert r.kv_bytes_allocated > r.kv_bytes_live
        else:
            assert r.kv_bytes_read == r.kv_bytes_live
    means = made.cells.set_index("policy")
    assert means["kv_bytes_read"]["quest"] < means["kv_bytes_read"]["full"]
    assert means["kv_bytes_live"]["quest"] > means["kv_bytes_live"]["full"]


def test_a_dialogue_reads_its_share_from_the_second_turn_on(tmp_path: Path) -> None:
    run(tmp_path, **GRIDS["turns"], full=False)
    with RunStore(tmp_path) as store:
        responses = store.responses()
    budget = kvbench.Budget.parse("0.4")
    assert len({r.sample_id for r in responses}) < len(responses)
    seen: set[str] = set()
    for r in sorted(responses, key=lambda r: r.context_tokens):
        dialogue = r.context_id
        tokens = r.held_entries // 8
        if dialogue in seen:
            assert r.budget_entries == 8 * budget.per_head(tokens)
            assert r.kv_bytes_read < r.kv_bytes_live
        else:
            assert r.kv_bytes_read == r.kv_bytes_live
        seen.add(dialogue)


def test_a_reader_that_raises_fails_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from kvbench.parts import TopK, Uniform\n"
        "from kvbench.plugin import Policy, Reader\n"
        "class Bad(Reader):\n"
        "    def block(self, model): return 4\n"
        "    def summary(self, model): return 1\n"
        "    def rate(self, v): raise RuntimeError('no idea')\n"
        "BAD = Policy('bad', None, Uniform(), TopK(), read=Bad())\n"
    )
    made = run(tmp_path / "out", policy=f"{file}:BAD,quest", budget="0.2", task="vt")
    status = dict(zip(made.cells["policy"], made.cells["status"], strict=True))
    assert [status["quest"], status["full"], status[f"{file}:BAD"]] == ["ok", "ok", "error"]
    assert "no idea" in " ".join(made.cells["error"])


def test_a_response_from_before_readers_has_read_what_it_held(tmp_path: Path) -> None:
    old = Response("c", "s", 0, 0, 0, "x", response="y", kv_bytes_live=7)
    entry = {name: value for name, value in vars(old).items() if name != "kv_bytes_read"}
    with RunStore(tmp_path) as store:
        assert store._journal is not None
        store._journal.append([entry])
    (tmp_path / "grid.yaml").write_text("{}")
    with RunStore(tmp_path) as store:
        assert store.responses() == [replace(old, kv_bytes_read=7)]
