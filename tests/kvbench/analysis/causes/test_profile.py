"""Head profiles that an analysis of causes writes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvbench.analysis.causes.profile import write_profiles
from kvbench.profiles.files import CAUSES, read


def examined(sets: list[list[tuple[int, int]] | None], model: str = "some/model") -> Any:
    """Samples with the smallest sets of heads; None has no diagnosis."""
    cell = SimpleNamespace(model=model, model_revision="abc", task="t", length=64)
    return [
        SimpleNamespace(
            cell=cell,
            prompt=SimpleNamespace(request=SimpleNamespace(digest=str(index))),
            diagnosis=None if heads is None else SimpleNamespace(heads=heads),
        )
        for index, heads in enumerate(sets)
    ]


def test_every_sample_counts_once_divided_among_the_heads_of_its_set(tmp_path: Path) -> None:
    samples = examined([[(1, 0)], [(1, 0), (0, 1)], None, []])
    result: Any = SimpleNamespace(samples=samples, shapes={"some/model": (2, 2, 4)})
    (path,) = write_profiles(result, 3, tmp_path)
    profile = read(path)
    assert path.name == "model.causes.json"
    assert profile.scores == ((0.0, 0.25), (0.75, 0.0))
    assert (profile.kind, profile.revision, profile.samples, profile.seed) == (CAUSES, "abc", 4, 3)
    assert (profile.layers, profile.kv_heads, profile.query_heads) == (2, 2, 4)


def test_a_model_without_such_heads_gets_none(tmp_path: Path) -> None:
    result: Any = SimpleNamespace(samples=examined([None, []]), shapes={"some/model": (2, 2, 4)})
    assert write_profiles(result, 0, tmp_path) == [] and not list(tmp_path.iterdir())
