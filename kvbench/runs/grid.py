"""A grid: the product of all flags, and the variants that it runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvbench import registry
from kvbench.benchmark import Benchmark
from kvbench.budget import Budget
from kvbench.errors import UserError, quoted, unknown
from kvbench.files import digest_of
from kvbench.harness import catalogue
from kvbench.moments import Moment, Timing
from kvbench.plugin import Policy
from kvbench.runs.cell import FULL_BUDGET, Variant
from kvbench.runs.folders import default_folder
from kvbench.runs.generation import GenerationFlags
from kvbench.runs.options import GridOptions, OptionError, field_of, options
from kvbench.runs.values import read_yaml
from kvbench.spelling import policy as kvbench_policy

ALL = "all"
"""Stands for every installed policy."""

_MOST_VARIANTS = 100_000
_ON_RAY = ("ray_address", "gpus_per_cell", "workers")
_RETIRED = {"attn": "auto"}
"""Fields of earlier versions. They stay in the digest, and a file may still contain them."""


@dataclass(frozen=True)
class Grid(GridOptions):
    """The product of policies, budgets, models, tasks, moments and lengths, and how to run it."""

    def __post_init__(self) -> None:
        """Read every field, and check those that depend on each other.

        Raises:
            UserError: A value is wrong, or two contradict each other.
        """
        super().__post_init__()
        lists = [name for name, option in options() if option.kind is list]
        variants = math.prod(len(getattr(self, name)) for name in lists)
        if variants > _MOST_VARIANTS:
            raise UserError(
                f"the product of {', '.join(lists)} has {variants:,} combinations; use at most "
                f"{_MOST_VARIANTS:,} in a run"
            )
        shares = [str(b) for b in self.parsed_budgets if b.absolute is None and not b.is_full]
        if self.has_moment("decode") and shares:
            raise UserError(
                f"moment decode needs budgets in tokens such as 128, not {', '.join(shares)}: the "
                "length of a response is not known in advance"
            )
        if self.temperature == 0 and (self.top_p, self.top_k) != (None, None):
            raise UserError("temperature 0 is greedy; leave out top_p and top_k")
        if self.device_map is not None and self.device != "auto":
            raise UserError("device and device_map exclude each other; give only one")
        if self.executor == "ray" and ":" in self.device:
            raise UserError(
                f"device {self.device} names one GPU, but Ray gives each worker its own; use cuda"
            )
        given = [name for name in _ON_RAY if getattr(self, name) is not None]
        if self.executor != "ray" and given:
            raise UserError(f"{given[0]} needs the executor ray; add --executor ray")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Grid:
        """Read a grid.

        Args:
            data: Attribute or flag names (`policy` for `policies`) with a value, a list, or a
                comma-separated string.

        Raises:
            UserError: A key is unknown, missing or given twice, or a value is wrong.
        """
        return cls._read(data, lambda key: "")

    @classmethod
    def from_yaml(cls, path: str | Path, override: Mapping[str, Any] | None = None) -> Grid:
        """Read a grid file.

        Args:
            path: A YAML mapping, as `from_dict` takes it.
            override: Values that take precedence over the file.

        Raises:
            UserError: As `from_dict`, naming file and line.
        """
        data, lines = read_yaml(path)
        given = override or {}
        replaced = {field_of(k) for k in given}

        def where(key: str) -> str:
            own = key in lines and field_of(key) not in replaced
            return f"{path}:{lines[key]}: " if own else ""

        return cls._read(overlaid(data, given), where, str(path))

    @classmethod
    def _read(
        cls, data: Mapping[str, Any], where: Callable[[str], str], source: str = "the grid"
    ) -> Grid:
        values: dict[str, Any] = {}
        keys: dict[str, str] = {}
        known = {name: option.flag or name for name, option in options()}
        for key, value in data.items():
            name = field_of(key)
            if name in _RETIRED:
                continue
            if name not in known:
                raise UserError(f"{where(key)}{unknown('key', key, {*known, *known.values()})}")
            if name in values:
                raise UserError(f"{where(key)}{quoted(key)} is given twice")
            values[name], keys[name] = value, key
        for name in ("policies", "tasks"):
            if name not in values:
                raise UserError(f"{source} has no {name}; give --{known[name]} or the key {name}")
        try:
            return cls(**values)
        except OptionError as error:
            raise UserError(f"{where(keys[error.name])}{error}") from None

    @classmethod
    def extending(cls, path: Path, more: Mapping[str, Any]) -> Grid:
        """The grid of a file with more policies, budgets, models, tasks, moments or lengths.

        Args:
            path: The file.
            more: What is added, as `from_dict` takes it; other keys take the place of the file's.

        Raises:
            UserError: As `from_dict`.
        """
        base = cls.from_yaml(path)
        given = {field_of(key): value for key, value in more.items()}
        for name, option in options():
            if name in given and option.kind is list:
                added = option.read(given[name])
                given[name] = list(dict.fromkeys([*getattr(base, name), *added]))
        return cls.from_dict(overlaid(base.to_dict(), given))

    def differs(self, other: Grid) -> list[str]:
        """The fields that count for the digest and are not the other grid's."""
        ours, theirs = self._counting, other._counting
        return [name for name in ours | theirs if ours.get(name) != theirs.get(name)]

    def lacks(self, other: Grid) -> list[str]:
        """The fields of the other grid that this one does not cover, so that it does not extend it.

        A list is covered by one with more entries, another field by the same value.
        """
        return [
            name
            for name in self.differs(other)
            if not isinstance(getattr(self, name), tuple)
            or not set(getattr(self, name)) >= set(getattr(other, name))
        ]

    def to_dict(self) -> dict[str, Any]:
        """The grid as plain lists and values; `from_dict` reads it back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @functools.cached_property
    def digest(self) -> str:
        """16 hex digits over everything that changes a response or adds a cell, in any order.

        `samples`, `repeats`, `batch_size`, `cache_memory`, `prefill_batch`, `device_map`, `judge`,
        `out` and the fields of the executor do not count: a run continues if they change.
        """
        return digest_of(self._counting | _RETIRED)

    @property
    def _counting(self) -> dict[str, Any]:
        """What counts for the digest."""
        counting: dict[str, Any] = {}
        for name, option in options():
            value = getattr(self, name)
            if option.digest == "always" or (option.digest == "if set" and value is not None):
                counting[name] = sorted(value) if isinstance(value, tuple) else value
        return counting

    @property
    def generation(self) -> GenerationFlags:
        """The flags about how answers are generated."""
        names = [field.name for field in fields(GenerationFlags)]
        return GenerationFlags(**{name: getattr(self, name) for name in names})

    @functools.cached_property
    def path(self) -> Path:
        """The folder of the run."""
        if self.out:
            return Path(self.out)
        return default_folder(self.digest, self.models, self.tasks, self.policies)

    @functools.cached_property
    def built_policies(self) -> tuple[Policy, ...]:
        """The policies, once each; `all` stands for every installed one, a group for its own.

        Raises:
            UserError: A policy is unknown or has a parameter that is unknown or ill-typed.
        """
        built = [self._built[name] for spec in self.policies for name in self._members(spec)]
        return tuple({str(policy): policy for policy in built}.values())

    def _members(self, spec: str) -> list[str]:
        """The policies that a spelling stands for."""
        names = registry.names(registry.POLICIES)
        if spec == ALL:
            return names
        if spec in names or not spec.isidentifier():
            return [spec]
        return [name for name in names if self._built[name].group == spec] or [spec]

    @functools.cached_property
    def named_policies(self) -> frozenset[str]:
        """Canonical spellings of the policies that are named, and not only included in `all`."""
        named = [name for spec in self.policies if spec != ALL for name in self._members(spec)]
        return frozenset(str(self._built[name]) for name in named)

    @functools.cached_property
    def _built(self) -> _Builder:
        return _Builder()

    @functools.cached_property
    def parsed_budgets(self) -> tuple[Budget, ...]:
        """The budgets as values."""
        return tuple(Budget.parse(budget) for budget in self.budgets)

    @functools.cached_property
    def timings(self) -> tuple[Timing, ...]:
        """The moments as values."""
        return tuple(Timing.parse(moment) for moment in self.moments)

    def has_moment(self, moment: Moment) -> bool:
        """Whether the caches of some cells are compressed at this moment."""
        return any(timing.moment == moment for timing in self.timings)

    def leaves(self) -> list[tuple[str, Benchmark]]:
        """The leaf tasks of all `tasks`, once each, in the order given.

        Raises:
            UserError: A task is unknown, or two have the same name.
        """
        chosen: dict[str, Benchmark] = {}
        for spec in self.tasks:
            for leaf, group in catalogue.resolve_task(spec):
                same = chosen.setdefault(leaf, group)
                if (same.name, same.source) != (group.name, group.source):
                    raise UserError(
                        f"two tasks are called {leaf!r}: {same.name} ({same.source}) "
                        f"and {group.name} ({group.source})"
                    )
        return list(chosen.items())

    def variants(self) -> list[Variant]:
        """The variants of each task, model and length; the full cache comes first.

        Raises:
            UserError: A policy is unknown or has a parameter that is unknown or ill-typed.
        """
        full = kvbench_policy("full")
        variants = []
        # At the budget `full` every policy is the full cache.
        if self.full or str(full) in self.named_policies or "full" in self.budgets:
            variants += [Variant(full, FULL_BUDGET, timing) for timing in self.timings]
        for policy in self.built_policies:
            if not policy.is_full:
                variants += [
                    Variant(policy, budget, timing)
                    for budget in (self.parsed_budgets if policy.has_budget else [FULL_BUDGET])
                    if not (policy.has_budget and budget.is_full)
                    for timing in self.timings
                ]
        return list(dict.fromkeys(variants))


def overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a grid with others in their place, whether keys are `policy` or `policies`."""
    given = {field_of(k): v for k, v in over.items()}
    return {k: v for k, v in base.items() if field_of(k) not in given} | given


class _Builder(dict[str, Policy]):
    """Policies by spelling, each built once."""

    def __missing__(self, spec: str) -> Policy:
        self[spec] = kvbench_policy(spec)
        return self[spec]
