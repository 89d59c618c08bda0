"""Two policies in a file of one's own, for `kvbench run --policy ./examples/my_policy.py:MyPolicy`.

`kvbench check ./examples/my_policy.py:MyPolicy` says whether a policy holds what every one must.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.errors import UserError
from kvbench.plugin import Score, Scores, View, protect_window


def value_norm(v: View, power: float = 1.0) -> torch.Tensor:
    """Keep the entries whose values are long: `s_i = ||v_i||^power`.

    A function of a view is a policy; `value_norm:power=2` sets its keyword.
    """
    norm: torch.Tensor = torch.linalg.vector_norm(v.value.float(), dim=-1)
    return norm**power


@dataclass(frozen=True)
class MyPolicy(Score):
    """Keep long values and the last `window` tokens.

    A class is for more than a number per entry: here it checks its parameter and protects a window.
    """

    window: int = 8

    def __post_init__(self) -> None:
        if self.window < 0:
            raise UserError(f"window={self.window}: use 0 or more tokens")

    def score(self, v: View) -> Scores:
        return Scores(value_norm(v), protect_window(v, self.window))
