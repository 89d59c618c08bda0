from __future__ import annotations

import pytest
from transformers import Qwen3Config

from scripts.reference_model import train


@pytest.fixture
def tiny_config() -> Qwen3Config:
    """The shape of the reference model with two small layers."""
    config = train.model_config()
    config.update({"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16})
    config.layer_types = ["full_attention"] * 2
    return config
