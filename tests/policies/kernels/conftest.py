"""Every test of this folder writes into memory that was poisoned first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty` and its like return with NaN (integers with their largest)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty_like(torch.zeros(3)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
