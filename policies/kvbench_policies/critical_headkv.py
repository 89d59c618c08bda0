"""CriticalKV's two-stage selection with HeadKV's per-head budgets.

arXiv 2502.03805, Algorithm 1, with the per-head budgets of arXiv 2410.19258; see `criticalkv` and `headkv`.
"""

from __future__ import annotations

from kvbench.plugin import Policy
from kvbench_policies.criticalkv import TwoStage
from kvbench_policies.headkv import HeadProfileShares
from kvbench_policies.snapkv import WindowAttention

CRITICAL_HEADKV = Policy(
    name="critical_headkv",
    score=WindowAttention(),
    allocate=HeadProfileShares(),
    select=TwoStage(),
    summary="HeadKV; the second half of every head's budget is selected by attention times ||V W_O||",
    paper="arXiv 2502.03805, Algorithm 1, on HeadKV",
    moments=("context", "question"),
    cost="time O(w T d + G T d d_model), memory O(w T)",
)
