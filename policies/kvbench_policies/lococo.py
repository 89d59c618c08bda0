"""LoCoCo: heavy hitters stay, and a trained convolution merges all other entries into slots.

Cai, Tian, Wang, Chen: LoCoCo: Dropping In Convolutions for Long Context Compression, ICML 2024, arXiv 2406.05317.

As in the authors' code (VITA-Group/LoCoCo), a head keeps the `M` entries with the most accumulated attention. The first
half of them, the heavy hitters, do not change. The other half are slots: a slot becomes `(1 - a)` times its own entry
plus `a` times a weighted mean over all entries of the head except the heavy hitters. The weights are
`softmax(relu(conv([K, V])))`: a convolution along these entries, over concatenated keys and values, with one channel
per slot. Keys are merged as cached, after RoPE, without re-rotation. The heads of a layer share the convolution and the
learned number `a`.

Differences from the authors' code:

- The authors rank by the attention of the last chunk's queries. Here attention accumulates over all
  chunks, as in H2O; for a context that is compressed in one piece, both are the same.
- The authors put merged entries after the heavy hitters, and the next convolution sees that order.
  Here an entry stays at the position of its own token.
- The authors' convolution merges into as many slots as it has channels. Here slot `j` of `m`, in
  position order, uses channel `floor(j S / m)` of `S`, so that every budget works; with `m = S`
  these are the authors' channels. A head that evicts nothing does not change.
- Attention is averaged over the query heads of a KV head; the authors' models have one each.
- The authors also train the model's embeddings and norms; here the model does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from kvbench.parts import TopK, Uniform, best, entry_key, portion
from kvbench.plugin import AttentionMass, Merger, ModelInfo, Need, Policy, View
from kvbench_policies.gates.convolutions import MergeConvolutions
from kvbench_policies.gates.files import fingerprint
from kvbench_policies.gates.loaded import loaded, random_gates
from kvbench_policies.h2o import Accumulated
from kvbench_policies.merging import pack, put, take


@dataclass(frozen=True)
class Convolution(Merger):
    """A trained convolution merges evicted entries into the least attended kept entries.

    Of the `n` entries that a head keeps, the `m = floor((1 - r) n)` with the least accumulated attention are slots. `r`
    is stored with the convolutions, usually 0.5. Let `R` be all entries of the head except the other `n - m` kept ones.
    With the layer's convolution `c` of `S` channels and its weight `a`, slot `j` of `m` (in position order), whose own
    entry is `i`, becomes

        w = softmax over R of relu(c([K, V]_R)) in channel floor(j S / m)
        k_i <- (1 - a) k_i + a sum_R w k,    v_i <- (1 - a) v_i + a sum_R w v

    The convolutions are those named by `gates`, else those that ship with kvbench for the model, else the user's own,
    as written by `kvbench train gates`.

    Attributes:
        gates: Folder, shipped name or hub id of the convolutions; None finds the model's own.
    """

    name: ClassVar[str] = "convolution"
    gates: str | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """Accumulated attention per entry."""
        return frozenset({AttentionMass()})

    def merge(self, v: View, keep: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values to store, `[B, H, n, d]` each.

        Raises:
            UserError: No convolutions were found, or they do not fit the model.
        """
        device = v.key.device
        convolutions = loaded("lococo", self.gates, v.model, device, anew=v.layer == 0)
        assert isinstance(convolutions, MergeConvolutions)
        accumulated = v.grouped(v.obs[AttentionMass()])
        return blend(convolutions, v.layer, v.key, v.value, accumulated, v.position, v.valid, keep)

    def fingerprint(self, model: str) -> str:
        """Return the digest of the convolutions' files, part of a cell's hash.

        Raises:
            UserError: No convolutions were found.
        """
        return fingerprint(model, "lococo", self.gates)

    def stand_in(self, model: ModelInfo, folder: Path) -> Self:
        """Return a copy that uses random convolutions for the model."""
        return self.replace(gates=str(random_gates("lococo", model, folder)))


def blend(
    convolutions: MergeConvolutions,
    layer: int,
    keys: Tensor,
    values: Tensor,
    accumulated: Tensor,
    positions: Tensor,
    valid_mask: Tensor,
    keep_mask: Tensor,
) -> tuple[Tensor, Tensor]:
    """Merge the entries of a layer that are not heavy hitters into slots.

    Args:
        convolutions: Those of the model; differentiable.
        layer: Index among the full-attention layers.
        keys: `[B, H, n, d]`.
        values: `[B, H, n, d]`.
        accumulated: Accumulated attention per entry, float32 `[B, H, n]`.
        positions: int64 `[B, H, n]`; ties go to the more recent entry.
        valid_mask: Entries that exist, bool `[B, H, n]`.
        keep_mask: Entries that are kept, bool `[B, H, n]`.

    Returns:
        Keys and values, changed only in slots.
    """
    evicting = (valid_mask & ~keep_mask).any(-1)
    kept_counts = keep_mask.sum(-1)
    slot_counts = portion(kept_counts, 1 - convolutions.config.keep_rate) * evicting
    heavy_hitters = best(_attention_keys(accumulated, positions, keep_mask), kept_counts - slot_counts, unique=True)
    slot_indices, in_use = pack(keep_mask & ~heavy_hitters)
    if slot_indices.shape[-1] == 0:
        return keys, values
    merged_indices, real_mask = pack(valid_mask & ~heavy_hitters & evicting[..., None])
    features = torch.cat([take(keys, merged_indices), take(values, merged_indices)], -1).masked_fill(
        ~real_mask[..., None], 0.0
    )
    channel_means = convolutions(layer, features.flatten(0, 1), real_mask.flatten(0, 1)).unflatten(0, slot_counts.shape)
    slot_order = torch.arange(slot_indices.shape[-1], device=keys.device)
    channels = slot_order * convolutions.config.slots // slot_counts.clamp(min=1)[..., None]
    mixed_means = take(channel_means, channels.clamp(max=convolutions.config.slots - 1))
    mix_share = convolutions.mix[layer]
    merged_tensors = []
    for originals, replacements in zip((keys, values), mixed_means.split(keys.shape[-1], -1), strict=True):
        merged_tensors.append(
            put(
                originals,
                slot_indices,
                in_use,
                (1 - mix_share) * take(originals, slot_indices) + mix_share * replacements,
            )
        )
    return merged_tensors[0], merged_tensors[1]


def compress(
    convolutions: MergeConvolutions,
    layer: int,
    key: Tensor,
    value: Tensor,
    mass: Tensor,
    valid: Tensor,
    budget: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compress a layer to `budget` entries per head as the policy does; for training.

    Args:
        convolutions: Those of the model; differentiable.
        layer: Index among the full-attention layers.
        key: `[B, H, n, d]`, the newest entry last.
        value: `[B, H, n, d]`.
        mass: Accumulated attention per entry, float32 `[B, H, n]`.
        valid: Entries that exist, bool `[B, H, n]`.
        budget: Maximum entries kept per head.

    Returns:
        Keys, values, `mass` and `valid` of the kept entries, in the same order.
    """
    positions = torch.arange(key.shape[2], device=key.device).expand_as(mass)
    kept_counts = valid.sum(-1).clamp(max=budget)
    keep_mask = best(_attention_keys(mass, positions, valid), kept_counts, unique=True)
    key, value = blend(convolutions, layer, key, value, mass, positions, valid, keep_mask)
    kept_indices, in_use = pack(keep_mask)
    columns = kept_indices[..., None].expand(-1, -1, -1, key.shape[-1])
    return key.gather(2, columns), value.gather(2, columns), mass.gather(2, kept_indices), in_use


def merged_into(budget: int, keep_rate: float) -> int:
    """Return how many of `budget` entries are slots."""
    return int(portion(torch.tensor(budget), 1 - keep_rate))


def _attention_keys(accumulated: Tensor, positions: Tensor, valid_mask: Tensor) -> Tensor:
    """Return rank keys by attention, in the order of `topk` on `score=accumulated`."""
    return entry_key(accumulated, torch.zeros_like(accumulated, dtype=torch.int8), positions, valid_mask)


LOCOCO = Policy(
    name="lococo",
    score=Accumulated(),
    allocate=Uniform(),
    select=TopK(),
    merge=Convolution(),
    summary="half of the entries are heavy hitters; a learned convolution merges the rest into the others",
    paper="arXiv 2406.05317",
    moments=("decode", "chunked"),
    cost="time O(H T S k d) for S channels of k taps, memory O(H T (S + d))",
)
