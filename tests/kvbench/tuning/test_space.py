"""The search space of `kvbench tune`."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench import registry
from kvbench.errors import UserError
from kvbench.plugin import Part, Range
from kvbench.spelling import part, policy
from kvbench.tuning.space import KINDS, search_space


class Corner:
    """A trial that suggests one end of every range, and the first or last choice."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.names: list[str] = []

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        self.names.append(name)
        return choices[self.end]

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        self.names.append(name)
        return (low, high)[self.end]

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        self.names.append(name)
        return (low, high)[self.end]


class Chosen(Corner):
    """A trial that suggests the given parts."""

    def __init__(self, parts: dict[str, str], end: int) -> None:
        super().__init__(end)
        self.parts = parts

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return self.parts[name] if name in self.parts else super().suggest_categorical(name, choices)


def registered_parts() -> list[Part]:
    names = [name.split(".", 1) for name in registry.names(registry.PARTS)]
    return [part(kind, name) for kind, name in names]


@pytest.mark.parametrize("end", [0, -1])
def test_both_ends_of_every_range_are_valid(end: int) -> None:
    for component in registered_parts():
        types = component.parameter_types()
        for name, searched in component.searched.items():
            assert isinstance(searched, Range) and name in types, (component, name)
            is_integer = isinstance(searched.low, int) and isinstance(searched.high, int)
            assert is_integer == (types[name] in (int, int | None)), (component, name)
            assert searched.low < searched.high
            component.replace(**{name: (searched.low, searched.high)[end]})


def test_a_setting_is_spelled_as_the_policy_that_runs_and_starts_from_one_with_its_score() -> None:
    space = search_space("reference", {})
    for end in (0, -1):
        for score in space.parts["score"]:
            trial = Chosen({"score": score, "allocate": "head_adaptive", "select": "two_stage", "merge": "ema"}, end)
            spelling = space.suggest(trial)
            built = policy(spelling)
            assert str(built) == spelling
            assert type(built.score) is type(space.parts["score"][score])
            assert [built.allocate.name, built.select.name] == ["head_adaptive", "two_stage"]
            assert built.merge is not None and built.merge.name == "ema"
    window = Chosen({"score": "window", "allocate": "uniform", "select": "topk", "merge": "none"}, 0)
    assert space.suggest(window).startswith("snapkv:")
    assert not any(name.endswith(".variant") for name in window.names)


def test_parts_that_read_a_file_need_a_flag_and_the_file() -> None:
    plain, with_files = (search_space("reference", {}, with_files=flag) for flag in (False, True))
    assert "retention" not in plain.parts["score"] and "retention" in with_files.parts["score"]
    assert "trimkv" not in map(str, plain.named) and "trimkv" in map(str, with_files.named)
    assert "retention" not in search_space("no/such-model", {}, with_files=True).parts["score"]
    assert not {"fastv", "divprune", "visionzip"} & {*with_files.parts["score"]}  # they prune the prompt
    assert set(plain.parts) == set(KINDS) and None in plain.parts["merge"].values()


@pytest.mark.parametrize(
    ("restricted", "says"),
    [
        ({"score": ("windwo",)}, "--score windwo: unknown; did you mean window"),
        ({"allocate": ("head_profile",)}, "reads a file made for the model; add --with-files"),
    ],
)
def test_a_wrong_restriction_is_one_line(restricted: dict[str, tuple[str, ...]], says: str) -> None:
    with pytest.raises(UserError, match=says):
        search_space("reference", restricted)


def test_a_restriction_leaves_the_policies_to_beat() -> None:
    space = search_space("reference", {"score": ("window", "keydiff")})
    assert list(space.parts["score"]) == ["keydiff", "window"]
    assert {"h2o", "kvzip"} <= set(map(str, space.named))
