"""The base of allocators that read a head profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from kvbench.plugin import Allocator, ModelInfo
from kvbench.profiles.files import KINDS, HeadProfile, fingerprint, load


@dataclass(frozen=True)
class Profiled(Allocator):
    """An allocator that reads a model's head profile.

    The profile is the file that `profile` names, otherwise the one that ships with kvbench (for the
    reference model), otherwise the user's own, where `kvbench profile heads` writes it.

    Attributes:
        profile: Path of a profile, which is used as it is, or none.
        kind: Kind of profile to look for: `ablation`, `reason` or `copy`; none takes the first of
            these that the model has.
    """

    profile: str | None = None
    kind: Literal["ablation", "reason", "copy"] | None = None

    def load_profile(self, model: ModelInfo) -> HeadProfile:
        """The model's profile, `[L][H]`.

        Raises:
            UserError: There is none, or it does not fit the model.
        """
        return load(model.name, self.kind, self.profile, model.layers, model.kv_heads)

    def fingerprint(self, model: str) -> str:
        """Digest of the profile's file; part of a cell's hash.

        Raises:
            UserError: There is no profile.
        """
        return fingerprint(model, self.kind, self.profile)

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Give a copy that reads a made-up profile (see `kvbench.plugin.Part`)."""
        layers, kv_heads = model.layers, model.kv_heads
        profile_path = folder / f"{layers}x{kv_heads}.json"
        if not profile_path.is_file():
            head_count = layers * kv_heads
            scores = [2 * (index + 1) / (head_count * (head_count + 1)) for index in range(head_count)]
            score_rows = tuple(tuple(scores[index * kv_heads : (index + 1) * kv_heads]) for index in range(layers))
            HeadProfile("stand-in", "", KINDS[0], layers, kv_heads, kv_heads, score_rows).save(profile_path)
        return self.replace(profile=str(profile_path))
