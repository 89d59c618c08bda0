"""Sequences on the disk are the same as lists, and need no memory."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path

import pytest

from kvbench.data.spool import Spool
from kvbench.errors import UserError


def opened() -> int:
    """Files without a name that the sequences of this process have open."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # the listing's own
            continue
    return sum("kvbench-" in target and "deleted" in target for target in targets) or sum(
        "(deleted)" in target and "/#" in target for target in targets
    )


@pytest.mark.parametrize("size", [1, 100_000])
def test_a_spool_is_a_sequence(size: int) -> None:
    items = [{"number": i, "text": f"{i} " * size} for i in range(9)]
    one, two = Spool(items[:5]), Spool(items)
    for item in items[5:]:  # both write to one file, in turns
        one.append(item)
        two.append(item)
    assert len(one) == 9 and one == items and [*one] == items
    assert two == [*items, *items[5:]] and one != two
    assert one[3] == items[3] and one[-1] == items[-1] and one[2:4] == items[2:4]
    with pytest.raises(IndexError):
        one[9]


def test_what_it_holds_is_not_in_memory_and_goes_with_it() -> None:
    before = opened()
    tracemalloc.start()
    try:
        spool = Spool(os.urandom(100_000) for _ in range(300))
        again = Spool(spool)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(again) == 300 and held < 2e6 and peak < 4e6
    assert opened() == before + 1, "one file for all"
    del spool, again
    gc.collect()
    assert opened() == before


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match="No space left on device; set TMPDIR"):
        Spool(["x" * 400_000])
