"""What a policy says about itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import kvbench
from kvbench.parts import TopK, Uniform
from kvbench.registry import POLICIES, names

FILE = """
def norm(v):
    return v.value.float().norm(dim=-1)
"""


@dataclass(frozen=True)
class Derived(TopK):
    """A user's subclass of a part that ships."""


def test_every_registered_policy_ships_and_nothing_of_a_user_does(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert all(kvbench.policy(name).is_shipped for name in names(POLICIES))
    assert kvbench.policy("snapkv:allocate=global:select=two_stage").is_shipped
    scored = kvbench.policy(f"{file}:norm")
    assert not scored.is_shipped and not replace(scored, allocate=Uniform(), select=TopK()).is_shipped
    assert not replace(kvbench.policy("snapkv"), select=Derived()).is_shipped
