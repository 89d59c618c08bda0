"""What an allocator that reads a head profile builds on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvbench.plugin import Allocator, ModelInfo, Policy
from kvbench.profiles.files import HeadProfile, fingerprint, load
from kvbench.spelling import policy


@dataclass(frozen=True)
class Profiled(Allocator):
    """An allocator that reads a model's head profile.

    The profile is the file that `profile` names, else the one that ships with kvbench (the
    reference model's), else the user's own, where `kvbench profile heads` writes it.

    Attributes:
        profile: Path of a profile, which is taken as it is, or none.
        kind: Which profile is looked for: `reason` or `copy`.
    """

    profile: str | None = None
    kind: Literal["reason", "copy"] = "reason"

    def load_profile(self, model: ModelInfo) -> HeadProfile:
        """The model's profile, `[L][H]`.

        Raises:
            UserError: There is none, or it does not fit the model.
        """
        return load(model.name, self.kind, self.profile, model.layers, model.kv_heads)

    def fingerprint(self, model: str) -> str:
        """Digest of the profile's file; it joins the hash of a cell.

        Raises:
            UserError: There is no profile.
        """
        return fingerprint(model, self.kind, self.profile)


def stand_in(p: Policy, layers: int, kv_heads: int, folder: Path) -> Policy:
    """Give a policy that reads a head profile a made-up one, for models that have none.

    Args:
        p: Any policy; one that reads no profile is returned as it is.
        layers: Full-attention layers of the model.
        kv_heads: KV heads of a layer.
        folder: Where the profile is written.
    """
    if not isinstance(p.allocate, Profiled):
        return p
    count = layers * kv_heads
    scores = [2 * (i + 1) / (count * (count + 1)) for i in range(count)]
    table = tuple(tuple(scores[i * kv_heads : (i + 1) * kv_heads]) for i in range(layers))
    path = folder / f"{layers}x{kv_heads}.json"
    HeadProfile("stand-in", "", "reason", layers, kv_heads, kv_heads, table).save(path)
    return policy(p, profile=str(path))
