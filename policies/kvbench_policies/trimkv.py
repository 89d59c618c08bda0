"""TRIM-KV: a learned gate gives every token a decay rate; the most decayed entries are evicted.

Bui, Sharma, Lamba, Mishra, Ying: Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs, arXiv
2512.03324, section 4.3 and Algorithm 1. All computations are in the log domain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy, View
from kvbench_policies.gates.config import Kind
from kvbench_policies.gates.learned import Learned


@dataclass(frozen=True)
class Retention(Learned):
    """`s_i = (t - i) log beta_i`, the log retention of entry `i` at the newest token, `t`.

    The layer's gate computes `log beta_i <= 0` once, when the token enters the cache, and it is stored with the entry.
    `t` and `i` are positions in the text, regardless of evictions. Nothing is protected, but the newest entry has the
    largest possible score, 0.

    Attributes:
        variant: `paper`, or `release` (the authors' code): the age is `t + 2 - i`, because its query index starts one
            beyond the number of tokens seen, while positions start at 0.
    """

    name: ClassVar[str] = "retention"
    kind: ClassVar[Kind] = "trimkv"
    variant: Literal["paper", "release"] = "paper"

    @property
    def version(self) -> int:
        """2 for `variant=release`: version 1 had an age of one less."""
        return 2 if self.variant == "release" else 1

    def score(self, v: View) -> Tensor:
        """Score the entries of one layer, float32 `[B, H, n]`, 0 or less."""
        entry_age = v.age + (2 if self.variant == "release" else 0)
        return (entry_age.double() * self.learned(v).double()).float()

    def log_retention(self, v: View) -> Tensor:
        """Return the gates' `log beta`, float32 `[B, H, n]`."""
        return self.learned(v)


TRIMKV = Policy(
    name="trimkv",
    score=Retention(),
    allocate=Uniform(),
    select=TopK(),
    summary="a learned gate gives every token a decay rate; the most decayed entries are evicted",
    paper="arXiv 2512.03324, section 4.3 and Algorithm 1",
    moments=("decode", "chunked", "turns"),
    cost="time O(T d_model 512) once for the gate and O(H T) per eviction step, memory O(H T)",
)
