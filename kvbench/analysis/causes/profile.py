"""Head profiles from causes: the KV heads that must hold what a policy lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvbench import __version__, reference
from kvbench.analysis.causes.study import CausesResult
from kvbench.artifacts import shipped_name
from kvbench.profiles.files import CAUSES, PROFILES, HeadProfile


def write_profiles(result: CausesResult, seed: int, folder: Path) -> list[Path]:
    """Write a head profile per model: how often each KV head is in the smallest set that brings an answer back.

    Every sample counts once, divided among the heads of its set: a set of all heads says little about any. A model
    without such heads gets none (`--units layers`, or no sample whose evidence suffices).

    Args:
        result: Result of the analysis.
        seed: Seed of the data.
        folder: Existing output folder.

    Returns:
        The files written.

    Raises:
        UserError: A file cannot be written.
    """
    paths = []
    for model, (layers, kv_heads, query_heads) in result.shapes.items():
        samples = [sample for sample in result.samples if sample.cell.model == model]
        counts = np.zeros((layers, kv_heads))
        for heads in [sample.diagnosis.heads for sample in samples if sample.diagnosis is not None]:
            for unit in heads:
                counts[unit] += 1 / len(heads)
        if not counts.any():
            continue
        cells = [sample.cell for sample in samples]
        profile = HeadProfile(
            model=reference.versioned(model),
            revision=cells[0].model_revision,
            kind=CAUSES,
            layers=layers,
            kv_heads=kv_heads,
            query_heads=query_heads,
            scores=tuple(map(tuple, (counts / counts.sum()).tolist())),
            task=",".join(dict.fromkeys(cell.task for cell in cells)),
            lengths=tuple(dict.fromkeys(cell.length for cell in cells)),
            samples=len({(sample.cell.task, sample.prompt.request.digest) for sample in samples}),
            seed=seed,
            kvbench=__version__,
        )
        path = folder / PROFILES.pattern.format(model=shipped_name(model), kind=CAUSES)
        profile.save(path)
        paths.append(path)
    return paths
