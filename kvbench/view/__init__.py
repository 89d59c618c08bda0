"""Inputs of a policy's parts, and the observations that they can require from the engine.

Re-exported by `kvbench.plugin`, the plugin API. Shapes: `B` sequences, `H` KV heads, `H_q` query heads, `n` entries in
the view, `d` head dimension.
"""

from kvbench.view.needs import (
    AnswerAttention,
    AttentionMass,
    ModelInfo,
    Need,
    Observer,
    PerToken,
    Queries,
    Replay,
    Separable,
    Surprisal,
)
from kvbench.view.shown import (
    Blocks,
    Pruned,
    Scores,
    View,
    VisualTokens,
    hashed,
    protect_nothing,
    protect_sinks,
    protect_window,
)

__all__ = [
    "AnswerAttention",
    "AttentionMass",
    "Blocks",
    "ModelInfo",
    "Need",
    "Observer",
    "PerToken",
    "Pruned",
    "Queries",
    "Replay",
    "Scores",
    "Separable",
    "Surprisal",
    "View",
    "VisualTokens",
    "hashed",
    "protect_nothing",
    "protect_sinks",
    "protect_window",
]
