"""StreamingLLM: attention sinks and a sliding window of recent tokens.

Xiao, Tian, Chen, Han, Lewis: Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453, section 3.2
(rolling KV cache with attention sinks). Keys keep the rotation they were cached with: eviction never moves a key, so
positions are those in the text, not those within the cache.
"""

from __future__ import annotations

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy
from kvbench_policies.local import Recency

STREAMING_LLM = Policy(
    name="streaming_llm",
    score=Recency(sinks=4),
    allocate=Uniform(),
    select=TopK(),
    summary="keeps the first 4 tokens and the most recent ones",
    paper="arXiv 2309.17453, section 3.2",
    moments=("context", "question", "decode", "turns"),
    cost="time and memory O(H T)",
)
