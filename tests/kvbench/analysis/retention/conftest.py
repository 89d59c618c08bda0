"""The random Llama of two query heads per KV head, with gates that are as random."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.engine.models import model_info
from kvbench.spelling import policy


@pytest.fixture(scope="session")
def model(grouped: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(grouped).eval()


@pytest.fixture(scope="session")
def gates(model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Spellings of learned policies that read random gates."""
    folder = tmp_path_factory.mktemp("gates")
    info = model_info(model)
    names = ("trimkv", "dbtrimkv", "locret")
    return {name: str(policy(policy(name).stand_in(info, folder))) for name in names}


@pytest.fixture(scope="session")
def ids() -> list[int]:
    """A text of 61 tokens, none of them special."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(5, 2000, (61,), generator=generator).tolist()
