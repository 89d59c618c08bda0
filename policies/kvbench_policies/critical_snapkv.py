"""CriticalKV's two-stage selection with SnapKV's even budgets.

arXiv 2502.03805, Algorithm 1, with the window attention of arXiv 2404.14469; see `criticalkv`.
"""

from __future__ import annotations

from kvbench.parts import Uniform
from kvbench.plugin import Policy
from kvbench_policies.criticalkv import TwoStage
from kvbench_policies.snapkv import WindowAttention

CRITICAL_SNAPKV = Policy(
    name="critical_snapkv",
    score=WindowAttention(),
    allocate=Uniform(),
    select=TwoStage(),
    summary="SnapKV; the second half of every head's budget is selected by attention times ||V W_O||",
    paper="arXiv 2502.03805, Algorithm 1, on SnapKV",
    cost="time O(H_q T d (w + d_model)), memory O(H_q w T + H T d)",
)
