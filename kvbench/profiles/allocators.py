"""Base of allocators that use a head profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from kvbench.plugin import Allocator, ModelInfo
from kvbench.profiles.files import KINDS, HeadProfile, fingerprint, load


@dataclass(frozen=True)
class Profiled(Allocator):
    """Base of allocators that use a model's head profile.

    The profile is the file named by `profile`, else the one that ships with kvbench, else the user's own, as written by
    `kvbench profile heads`.

    Attributes:
        profile: Path of a profile; None finds the model's own.
        kind: Kind of profile: `ablation`, `reason` or `copy`; None uses the first of these that the model has.
    """

    profile: str | None = None
    kind: Literal["ablation", "reason", "copy"] | None = None

    def load_profile(self, model: ModelInfo) -> HeadProfile:
        """Return the model's profile, `[L][H]`.

        Raises:
            UserError: No profile was found, or it does not fit the model.
        """
        return load(model.name, self.kind, self.profile, model.layers, model.kv_heads)

    def fingerprint(self, model: str) -> str:
        """Return the digest of the profile's file, part of a cell's hash.

        Raises:
            UserError: No profile was found.
        """
        return fingerprint(model, self.kind, self.profile)

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Return a copy that uses a synthetic profile (see `kvbench.plugin.Part`)."""
        layers, kv_heads = model.layers, model.kv_heads
        profile_path = folder / f"{layers}x{kv_heads}.json"
        if not profile_path.is_file():
            head_count = layers * kv_heads
            scores = [2 * (index + 1) / (head_count * (head_count + 1)) for index in range(head_count)]
            score_rows = tuple(tuple(scores[index * kv_heads : (index + 1) * kv_heads]) for index in range(layers))
            HeadProfile("stand-in", "", KINDS[0], layers, kv_heads, kv_heads, score_rows).save(profile_path)
        return self.replace(profile=str(profile_path))
