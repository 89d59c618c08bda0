"""Batches are planned from the memory for caches."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench import native
from kvbench.engine.decode import Batch
from kvbench.engine.models import model_info
from kvbench.engine.steady import Steady
from kvbench.runs import batching
from kvbench.runs.batching import MOST, Batching
from kvbench.runs.runner import execute
from tests.kvbench.runs.small import small_grid


def token_bytes(model: Any) -> int:
    info = model_info(model)
    return info.layers * info.kv_heads * (2 * info.head_dim * 4 + 4)


def test_rows_are_what_fits_beside_the_caches_that_wait(tiny_llama: Any) -> None:
    whole = 100 * token_bytes(tiny_llama)
    plan = Batching(tiny_llama, "auto", 12 * whole)
    plan.fit(100, [5])
    assert (plan.counts, plan.asking) == ((6,), (3,)), "6 in the batch, 3 that wait, 3 beside them"
    plan.fit(100, [5], media_bytes=3 * whole)
    assert plan.counts == (4,), "media take the place of three caches"
    plan.fit(100, [5], media_bytes=20 * whole)
    assert plan.counts == (1,)
    plan.fit(5, [5])
    assert plan.rows == MOST
    plan.fit(10_000, [5])
    assert plan.counts == plan.asking == (1,)


def test_rows_follow_what_is_decoded_where_bits_do_not_depend_on_them(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Steady, "at", lambda self, rows, least, with_head=False: True)
    plan = Batching(tiny_llama, 3, 10**9)
    plan.fit(100, [5])
    assert (plan.counts, plan.asking) == ((8, 16, 24, 32, 48, 64, 96, 128), (8, 12, 16, 24, 32, 48, 64))
    assert [plan.slots(n) for n in (1, 8, 9, 33, 64, 65)] == [8, 8, 16, 48, 64, 96]
    assert plan.fed_counts == (8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128), "if no question is fed"
    assert plan.allows_rows(36) and plan.allows_rows(124)
    assert plan.has_room(2, []) and not plan.has_room(3, [])
    plan.fit(100, [80])
    assert plan.asking == (8,), "groups of long questions are small"
    assert plan.rows_for(4) == 64, "which does not concern batches that feed fewer tokens"


@pytest.mark.parametrize(
    ("left_out", "counts", "asking"),
    [
        (24, (8, 16, 32, 48, 64, 96, 128), (8, 12, 16, 32, 48, 64)),
        (128, (8, 16, 24, 32, 48, 64), (8, 12, 16, 24, 32)),
    ],
    ids=["in between", "the largest"],
)
@pytest.mark.parametrize("width", [1, 7])
def test_rows_are_left_out_where_bits_depend_on_them(
    tiny_llama: Any,
    monkeypatch: pytest.MonkeyPatch,
    left_out: int,
    counts: tuple[int, ...],
    asking: tuple[int, ...],
    width: int,
) -> None:
    monkeypatch.setattr(Steady, "at", lambda self, rows, least, with_head=False: rows != left_out * width)
    plan = Batching(tiny_llama, "auto", 10**9)
    plan.fit(100, [7])
    assert (plan.counts, plan.asking) == (counts, asking)


@pytest.mark.parametrize(
    ("other_bits", "counts", "asking"),
    [
        (range(16), (16, 24, 32, 48, 64, 96, 128), (16, 24, 32, 48, 64)),
        (range(17), (32, 48, 64, 96, 128), (32, 48, 64)),
        ((*range(16), 128), (16, 24, 32, 48, 64), (16, 24, 32)),
        (range(33), (48, 72, 96, 112, 128), (48, 56, 64)),
        (range(225, 10**6), (8, 16, 24, 32), (8, 12, 16)),
        (range(14 * 7), (32,), (16,)),
    ],
    ids=["from 16 rows", "from 32", "from 16, but not 128", "from 48", "up to 32", "those of questions"],
)
def test_more_rows_are_the_least_where_bits_of_few_are_others(
    tiny_llama: Any,
    monkeypatch: pytest.MonkeyPatch,
    other_bits: Collection[int],
    counts: tuple[int, ...],
    asking: tuple[int, ...],
) -> None:
    def at(self: Steady, rows: int, least: int, with_head: bool = False) -> bool:
        return rows >= least and (rows in other_bits) == (least in other_bits)

    monkeypatch.setattr(Steady, "at", at)
    plan = Batching(tiny_llama, "auto", 10**9)
    plan.fit(100, [7])
    assert (plan.counts, plan.asking) == (counts, asking)
    assert plan.slots(2) == counts[0]
    assert [rows for rows in (8, 50, 300) if plan.gives_same_bits(rows)] == [
        rows for rows in (8, 50, 300) if len(counts) > 1 and at(Steady(tiny_llama), rows, counts[0])
    ]


def test_sizes_without_questions_do_not_depend_on_products_of_questions(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(self: Steady, rows: int, least: int, with_head: bool = False) -> bool:
        return rows >= least and (with_head or least >= 16)

    monkeypatch.setattr(Steady, "at", at)
    plan = Batching(tiny_llama, "auto", 10**9)
    plan.fit(100, [7])
    assert (plan.counts[0], plan.fed_counts[0]) == (16, 8)
    assert plan.allows_rows(12) and not plan.allows_rows(4)
    assert plan.halve() and not plan.allows_rows(12), "every batch has a constant size"


def test_logits_after_questions_are_compared_as_well(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Steady,
        "at",
        lambda self, rows, least, with_head=False: rows >= 48 and least == 48 and not (with_head and rows == 64),
    )
    plan = Batching(tiny_llama, "auto", 10**9)
    plan.fit(100, [7])
    assert 64 not in plan.asking


def test_the_first_step_does_not_depend_on_memory(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Steady, "at", lambda self, rows, least, with_head=False: rows >= least and (rows > 32) == (least > 32)
    )
    plan = Batching(tiny_llama, "auto", 150 * 100 * token_bytes(tiny_llama))
    for queues, first in ((1, 48), (3, 48), (5, 8)):
        plan.fit(100, [], queues=queues)
        assert (plan.counts[0], plan.rows >= 48) == (first, first == 48)


def test_batches_that_feed_no_question_have_rows_of_their_own(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Steady, "at", lambda self, rows, least, with_head=False: with_head and (rows > 32) == (least > 32)
    )
    plan = Batching(tiny_llama, "auto", 10**9)
    plan.fit(100, [7])
    assert (plan.counts, plan.slots(5)) == ((32,), 32)
    assert [plan.slots(row_count, question_fed=True) for row_count in (5, 49, 128)] == [48, 60, 128]
    assert plan.has_room(127, [], question_fed=True) and not plan.has_room(127, [])
    plan.fit(100, [], given_widths=[7])
    assert plan.slots(5, question_fed=True) == 32, "given answers are fed to such batches"


def test_contexts_are_prefilled_together_where_it_is_asked_for_and_fits(tiny_llama: Any) -> None:
    whole = 100 * token_bytes(tiny_llama)
    plan = Batching(tiny_llama, "auto", 23 * whole)
    plan.fit(100, [5])
    assert (plan.prefills, plan.rows) == (1, 13), "one by one on a CPU"
    plan = Batching(tiny_llama, "auto", 23 * whole, 8)
    plan.fit(100, [5])
    assert (plan.prefills, plan.rows) == (8, 8), "8 prefilled, 8 + 4 to decode, 3 beside them"
    plan.fit(300, [5])
    assert (plan.prefills, plan.rows) == (2, 1), "half of what fits beside the spare caches"
    assert plan.halve()
    plan.fit(100, [5])
    assert (plan.prefills, plan.rows) == (1, 1)
    assert not plan.halve()


def test_rows_that_read_a_prefill_are_planned_by_their_own_tokens(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, whole = model_info(tiny_llama), 100 * token_bytes(tiny_llama)
    monkeypatch.setattr(native, "library", lambda: object())
    plan = Batching(tiny_llama, "auto", 12 * whole)
    plan.fit(100, [5], own_tokens=10)
    row = 10 * token_bytes(tiny_llama) + 100 * info.layers * info.kv_heads * 4
    assert plan.rows == min(MOST if len(plan.counts) > 1 else 32, int(9 * whole / row / 1.5)) > 6

    def reading(prefills: int, cells: int, own: int = 0) -> list[Any]:
        """Caches whose entries are in prefills of 100 tokens."""
        keys = [torch.zeros(1, 2, 100, 4) for _ in range(prefills)]
        made = []
        for key in keys * cells:
            shared = [SimpleNamespace(key=key, count=20, lengths=[10, 10])]
            layer = SimpleNamespace(heads=2, shared=shared, reserved_room=lambda: [own, own])
            made.append(SimpleNamespace(ragged=[layer], batch=1))
        return made

    assert plan.has_room(1, reading(8, 1)) and not plan.has_room(1, reading(10, 1))
    assert plan.has_room(1, reading(2, 20)), "a prefill counts once"
    assert plan.has_room(1, reading(1, 5, own=100)) and not plan.has_room(1, reading(1, 6, own=100))
    monkeypatch.setattr(native, "library", lambda: None)
    plan = Batching(tiny_llama, "auto", 12 * whole)
    plan.fit(100, [5], own_tokens=10)
    assert plan.rows == 6, "every row has copies"
    assert plan.has_room(1, reading(10, 1))


@pytest.mark.parametrize("library", [object(), None], ids=["native", "torch"])
def test_rows_that_hold_all_their_entries_have_a_plan_of_their_own(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch, library: object
) -> None:
    whole = 100 * token_bytes(tiny_llama)
    monkeypatch.setattr(native, "library", lambda: library)
    plan = Batching(tiny_llama, "auto", 12 * whole)
    plan.fit(100, [5], own_tokens=10)
    assert plan.own.rows == 4, "of 9 caches 4 wait, and the batch copies them"
    assert [plan.own.slots(rows, fed) for rows in (1, 4) for fed in (False, True)] == [4] * 4
    assert plan.own.slots_for(1, 5) <= 4 and plan.own.own is plan.own

    layer = SimpleNamespace(heads=2, shared=[None], reserved_room=lambda: [100, 100])
    whole_cache: Any = SimpleNamespace(ragged=[layer], batch=1)
    assert plan.own.has_room(1, [whole_cache] * 4) and not plan.own.has_room(1, [whole_cache] * 5), "of all queues"
    assert plan.halve() and plan.own is plan


@pytest.mark.parametrize(("policy", "moment"), [("h2o", "decode"), ("h2o:bits=8", "context"), ("quest", "context")])
def test_batches_of_copies_keep_to_the_memory_for_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, moment: str
) -> None:
    found = []
    feed = Batch._feed

    def recording(batch: Batch, *args: Any) -> Any:
        found.append(batch.slots)
        return feed(batch, *args)

    monkeypatch.setattr(Batch, "_feed", recording)
    changes = {"moment": moment, "full": False, "cache_memory": "4MB", "task": "niah_single_1"}
    execute(small_grid(tmp_path / "run", policy=policy, budget="0.9", **changes))
    assert found and set(found) <= {1, 2}, "4 MB are 7 caches, 3 of them beside the batch; 2 wait and are copied"


def test_a_gpu_prefills_what_keeps_it_busy(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Batching(tiny_llama, "auto", 10**12)
    monkeypatch.setattr(plan, "cpu", False)
    found = []
    for weights in (135e6, 1e9, 8e9):
        monkeypatch.setattr(plan, "_weights", weights)
        plan.fit(1024, [5])
        found.append(plan.prefills)
    assert found == [32, 4, 1]


def test_on_a_gpu_a_prefill_that_cells_share_counts_once(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Batching(tiny_llama, "auto", 1000)
    monkeypatch.setattr(plan, "cpu", False)
    monkeypatch.setattr(plan, "_gpus", [torch.device("cuda")])
    free = [10_000]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[0], 20_000))

    def cells(count: int, own: int, prefill: int) -> list[Any]:
        layers = [SimpleNamespace(prefill_bytes=lambda at=at: {at: prefill // 2}) for at in (1, 2)]
        return [SimpleNamespace(ragged=layers, batch=1, allocated_bytes=lambda: own + prefill) for _ in range(count)]

    assert plan.has_room(1, cells(3, 100, 100)) and not plan.has_room(1, cells(4, 100, 100)), "300 own, 100 shared"
    assert plan.has_room(1, cells(6, 10, 800)) and not plan.has_room(1, cells(7, 10, 800))
    plan._limit, plan._row_bytes = 8 * plan.token_bytes, plan.token_bytes
    monkeypatch.setattr(plan, "_held", lambda caches: len(caches) * plan.token_bytes)
    assert not plan.has_room(1, iter(cells(9, 1, 1))) and plan.has_room(1, iter(cells(8, 1, 1))), "rows to come"
    plan._limit, free[0] = None, 150
    assert plan.has_room(1, cells(5, 10, 800)) and not plan.has_room(1, cells(6, 10, 800)), "the prefill is not free"


def test_rows_are_halved_for_good(tiny_llama: Any) -> None:
    plan = Batching(tiny_llama, "auto", 10**9)
    plan.fit(10, [5])
    sizes = [plan.rows]
    while plan.halve():
        plan.fit(10, [5])
        sizes.append(plan.rows)
    assert sizes == [MOST >> i for i in range(8)]


def test_a_containers_limit_and_the_cores_in_use_count(
    tiny_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(batching, "_CGROUP_LIMITS", (tmp_path / "none", limit))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    whole = 100 * token_bytes(tiny_llama)
    for text, cores, rows in (
        ("max\n", 2, MOST),
        (f"{24 * whole}\n", 2, 6),
        (f"{24 * whole}\n", 1, 6),
        (f"{24 * whole}\n", 4, 2),
    ):
        limit.write_text(text)
        monkeypatch.setattr(batching, "available_cores", lambda cores=cores: cores)
        plan = Batching(tiny_llama, "auto", None)
        plan.fit(100, [5])
        assert plan.rows == rows
