"""Quantised caches beside eviction in a run: their own cells, their own bytes, the same rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.runs.runner import Run

from .cells import make_cell

SMALL = ":group_size=8:residual=8"
GRID = {
    "policy": f"full:bits=2{SMALL},snapkv:bits=4{SMALL},snapkv",
    "budget": "0.5",
    "task": "vt",
    "length": 192,
    "samples": 3,
    "device": "cpu",
}
DECODE = {
    "policy": f"h2o:bits=4:buffer=3{SMALL},full:bits=8{SMALL}",
    "budget": "16",
    "moment": "decode",
    "task": "longgen_copy",
    "length": 64,
    "samples": 2,
    "max_new_tokens": 32,
    "device": "cpu",
}
HQQ = {**GRID, "policy": f"full:bits=2{SMALL}:quantizer=hqq,snapkv:bits=4{SMALL}:quantizer=hqq"}
KEY = ["policy", "sample_id", "question_id"]


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def texts(made: Run) -> dict[Any, str]:
    frame = made.samples.set_index(KEY)
    return dict(zip(frame.index, frame["response"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("grid", [GRID, DECODE, HQQ], ids=["context", "decode", "hqq"])
def test_responses_do_not_depend_on_the_batch(grid: dict[str, Any], tmp_path: Path) -> None:
    if grid is HQQ:
        pytest.importorskip("hqq", reason="hqq is not installed: pip install 'kvbench[quantizers]'")
    made = kvbench.run({**grid, "out": str(tmp_path / "all")})
    assert list(made.cells["status"].unique()) == ["ok"]
    alone = kvbench.run({**grid, "out": str(tmp_path / "alone"), "batch_size": 1, "full": False})
    together = texts(made)
    assert {k: v for k, v in together.items() if k[0] != "full"} == texts(alone)
    assert len(set(together.values())) > 2


def test_a_quantised_full_cache_is_a_cell_beside_full(tmp_path: Path) -> None:
    made = kvbench.run({**GRID, "out": str(tmp_path)})
    cells = made.cells.set_index("policy")
    full, bits = cells.loc["full"], cells.loc[f"full:bits=2:{SMALL[1:]}"]
    assert (full["moment"], bits["moment"]) == ("", "context")
    assert bits["budget"] == "full"
    assert bits["held_entries"] == full["held_entries"]
    assert bits["kv_bytes_live"] < 0.5 * full["kv_bytes_live"]
    assert bits["full_score"] == full["score"]
    evicted, both = cells.loc["snapkv"], cells.loc[f"snapkv:bits=4:{SMALL[1:]}"]
    assert both["held_entries"] == evicted["held_entries"]
    assert both["kv_bytes_live"] < 0.5 * evicted["kv_bytes_live"]
    assert both["kv_bytes_allocated"] < evicted["kv_bytes_allocated"]


def test_only_the_plain_full_cache_is_without_a_moment() -> None:
    plain, bits = make_cell("full"), make_cell("full:bits=4")
    assert plain.is_full
    assert not bits.is_full
    assert (plain.moment, bits.labels["moment"], bits.labels["budget"]) == (
        "context",
        "context",
        "full",
    )
    assert make_cell("full:bits=4").cell == make_cell("full:bits=4", budget="0.7").cell
    assert len({make_cell(f"full:bits={n}").cell for n in (2, 4, 8)}) == 3


def test_pruned_keys_are_cells_of_their_own(tmp_path: Path) -> None:
    spec = "full:key_channels=0.5:residual=8,snapkv:bits=4:group_size=8:key_channels=0.5:residual=8"
    grid = {**GRID, "policy": f"{spec},snapkv:key_channels=0.5,snapkv"}
    made = kvbench.run({**grid, "out": str(tmp_path / "all")})
    assert list(made.cells["status"].unique()) == ["ok"]
    alone = kvbench.run({**grid, "out": str(tmp_path / "one"), "batch_size": 1, "full": False})
    assert {k: v for k, v in texts(made).items() if k[0] != "full"} == texts(alone)
    cells = made.cells.set_index("policy")
    full, thin = cells.loc["full"], cells.loc["full:key_channels=0.5:residual=8"]
    assert (thin["budget"], thin["held_entries"]) == ("full", full["held_entries"])
    assert 0.75 < thin["kv_bytes_live"] / full["kv_bytes_live"] < 0.8
    evicted, both = cells.loc["snapkv"], cells.loc["snapkv:key_channels=0.5"]
    assert both["held_entries"] == evicted["held_entries"]
    assert 0.75 < both["kv_bytes_live"] / evicted["kv_bytes_live"] < 0.9
    least = cells.loc["snapkv:bits=4:group_size=8:key_channels=0.5:residual=8"]
    assert least["kv_bytes_live"] < 0.5 * both["kv_bytes_live"]
