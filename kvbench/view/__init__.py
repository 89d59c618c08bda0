"""What a part of a policy is shown, and what it may ask the engine to observe.

Re-exported by `kvbench.plugin`, the page that a plugin author reads. Shapes: `B` sequences, `H` KV
heads, `H_q` query heads, `n` entries shown, `d` head dim.
"""

from kvbench.view.blocks import Blocks
from kvbench.view.model import ModelInfo
from kvbench.view.needs import (
    AttentionMass,
    Need,
    Observer,
    PerToken,
    Queries,
    Replay,
    Separable,
    Surprisal,
)
from kvbench.view.scores import Scores, protect_nothing, protect_sinks, protect_window
from kvbench.view.shown import View, hashed
from kvbench.view.visual import Pruned, VisualTokens

__all__ = [
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
