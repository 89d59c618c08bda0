"""`kvbench check` passes for every policy that ships, and for its release variant."""

from __future__ import annotations

import typing

import pytest

from kvbench import registry
from kvbench.checks import run_checks
from kvbench.spelling import policy
from tests.sweeps import slow_but

pytestmark = pytest.mark.filterwarnings("ignore:(duo_attention|simlayerkv)")


def shipped() -> list[str]:
    """Names of kvbench's own policies, and those of them that have a release variant, with it."""
    names = [
        n for n in registry.names(registry.POLICIES) if registry.origin(registry.POLICIES, n).startswith("kvbench==")
    ]
    released = []
    for name in names:
        kinds = [part.parameter_types().get("variant") for part in policy(name).parts]
        if any("release" in typing.get_args(kind) for kind in kinds):
            released.append(f"{name}:variant=release")
    return names + released


QUICK = (
    "h2o",
    "criticalkv:variant=release",
    "d2o",
    "trimkv",
    "headkv",
    "quest",
    "kvzip",
    "prumerge",
)
"""One of each: sums, two stages, merging, gates, a profile, a reader, a second pass, images."""


@pytest.mark.parametrize("spec", slow_but(shipped(), *QUICK))
def test_every_invariant_holds(spec: str) -> None:
    assert [r for r in run_checks(spec) if not r.ok] == []


def test_the_release_variants_are_there() -> None:
    named = {"trimkv", "defensivekv", "rkv", "d2o", "criticalkv"}
    assert {f"{name}:variant=release" for name in named} <= set(shipped())
