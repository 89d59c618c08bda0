"""Negative log-likelihood per token, as measured by the engine."""

from __future__ import annotations

import json
from typing import Any


def nll(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Return nats per token of the given text; called by lm-eval. Perplexity is its exponential."""
    measured = json.loads(results[0])
    return {"nll_per_token": float(measured["nll"]) / int(measured["tokens"])}
