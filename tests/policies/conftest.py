"""What tests of several policies' files share."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from kvbench_policies.gates import files


@pytest.fixture
def seeded() -> None:
    """The same weights in every test."""
    torch.manual_seed(4)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no gates that are shipped."""
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    elsewhere = dataclasses.replace(files.GATES, shipped=tmp_path / "shipped")
    monkeypatch.setattr(files, "GATES", elsewhere)
    return tmp_path / "cache"
