"""Negative log-likelihood per token, from what the engine measured."""

from __future__ import annotations

import json
from typing import Any


def nll(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Nats per token of the given text; called by lm-eval. Perplexity is its exponential."""
    measured = json.loads(results[0])
    return {"nll_per_token": float(measured["nll"]) / int(measured["tokens"])}
