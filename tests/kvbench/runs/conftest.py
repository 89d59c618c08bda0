from __future__ import annotations

from typing import Any

import pytest

from kvbench.runs.runner import execute
from tests.kvbench.runs.small import small_grid


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The small run in one process, from its beginning to its end."""
    return execute(small_grid(tmp_path_factory.mktemp("undisturbed") / "run"))
