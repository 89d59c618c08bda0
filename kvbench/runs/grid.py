"""A grid: the product of all flags, and its variants."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvbench import registry
from kvbench.benchmark import Benchmark
from kvbench.budget import Budget
from kvbench.errors import UserError, quoted, unknown
from kvbench.files import digest_of
from kvbench.harness import catalogue
from kvbench.harness.protocol import HarnessFlags
from kvbench.moments import Moment, Timing
from kvbench.plugin import Policy
from kvbench.runs.cell import FULL_BUDGET, CellVariant
from kvbench.runs.folders import default_folder
from kvbench.runs.generation import GenerationFlags
from kvbench.runs.options import GridOptions, OptionError, field_of, options
from kvbench.runs.values import read_yaml
from kvbench.spelling import policy as kvbench_policy

ALL = "all"
"""Spelling of every installed policy that does not see the answer."""

_MOST_VARIANTS = 100_000
_ON_RAY = ("ray_address", "gpus_per_cell", "workers")


@dataclass(frozen=True)
class Grid(GridOptions):
    """The product of policies, budgets, models, tasks, moments and lengths, with its run options."""

    def __post_init__(self) -> None:
        """Parse every field and check those that depend on each other.

        Raises:
            UserError: A value is wrong, or two contradict each other.
        """
        super().__post_init__()
        list_options = [option_name for option_name, option in options() if option.kind is list]
        variant_count = math.prod(len(getattr(self, option_name)) for option_name in list_options)
        if variant_count > _MOST_VARIANTS:
            raise UserError(
                f"the product of {', '.join(list_options)} has {variant_count:,} combinations; "
                f"use at most {_MOST_VARIANTS:,} in a run"
            )
        if self.temperature == 0 and (self.top_p, self.top_k) != (None, None):
            raise UserError("temperature 0 is greedy; leave out top_p and top_k")
        if self.device_map is not None and self.device != "auto":
            raise UserError("device and device_map exclude each other; give only one")
        if self.executor == "ray" and ":" in self.device:
            raise UserError(f"device {self.device} names one GPU, but Ray gives each worker its own; use cuda")
        ray_options = [option_name for option_name in _ON_RAY if getattr(self, option_name) is not None]
        if self.executor != "ray" and ray_options:
            raise UserError(f"{ray_options[0]} needs the executor ray; add --executor ray")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Grid:
        """Parse a grid.

        Args:
            data: Attribute or flag names (`policy` for `policies`) with a value, a list, or a comma-separated string.

        Raises:
            UserError: A key is unknown, missing or given twice, or a value is wrong.
        """
        return cls._read(data, lambda key: "")

    @classmethod
    def from_yaml(cls, path: str | Path, override: Mapping[str, Any] | None = None) -> Grid:
        """Read a grid file.

        Args:
            path: A YAML mapping, as for `from_dict`.
            override: Values that take precedence over the file.

        Raises:
            UserError: As `from_dict`, naming file and line.
        """
        yaml_values, key_lines = read_yaml(path)
        overrides = override or {}
        replaced_names = {field_of(key) for key in overrides}

        def location_of(key: str) -> str:
            from_file = key in key_lines and field_of(key) not in replaced_names
            return f"{path}:{key_lines[key]}: " if from_file else ""

        return cls._read(overlaid(yaml_values, overrides), location_of, str(path))

    @classmethod
    def _read(cls, data: Mapping[str, Any], location_of: Callable[[str], str], source: str = "the grid") -> Grid:
        values: dict[str, Any] = {}
        source_keys: dict[str, str] = {}
        flag_names = {option_name: option.flag or option_name for option_name, option in options()}
        for key, value in data.items():
            option_name = field_of(key)
            if option_name not in flag_names:
                raise UserError(f"{location_of(key)}{unknown('key', key, {*flag_names, *flag_names.values()})}")
            if option_name in values:
                raise UserError(f"{location_of(key)}{quoted(key)} is given twice")
            values[option_name], source_keys[option_name] = value, key
        for option_name in ("policies", "tasks"):
            if option_name not in values:
                raise UserError(
                    f"{source} has no {option_name}; give --{flag_names[option_name]} or the key {option_name}"
                )
        try:
            return cls(**values)
        except OptionError as error:
            raise UserError(f"{location_of(source_keys[error.name])}{error}") from None

    @classmethod
    def extending(cls, path: Path, additions: Mapping[str, Any]) -> Grid:
        """Return the grid of a file with more policies, budgets, models, tasks, moments or lengths.

        Args:
            additions: Values to add, as for `from_dict`; other keys replace the file's.

        Raises:
            UserError: As `from_dict`.
        """
        base_grid = cls.from_yaml(path)
        changes = {field_of(key): value for key, value in additions.items()}
        for option_name, option in options():
            if option_name in changes and option.kind is list:
                new_values = option.read(changes[option_name])
                changes[option_name] = list(dict.fromkeys([*getattr(base_grid, option_name), *new_values]))
        return cls.from_dict(overlaid(base_grid.to_dict(), changes))

    def differs(self, compared: Grid) -> list[str]:
        """Return the fields that count for the digest and differ from the other grid's."""
        digest_options, other_options = self._counting, compared._counting
        return [
            option_name
            for option_name in digest_options | other_options
            if digest_options.get(option_name) != other_options.get(option_name)
        ]

    def lacks(self, compared: Grid) -> list[str]:
        """Return the fields of the other grid that this one does not cover and thus does not extend.

        A list is covered by one with more entries, another field by the same value.
        """
        return [
            option_name
            for option_name in self.differs(compared)
            if not isinstance(getattr(self, option_name), tuple)
            or not set(getattr(self, option_name)) >= set(getattr(compared, option_name))
        ]

    @functools.cached_property
    def digest(self) -> str:
        """Return 16 hex digits over everything that changes a response or adds a cell, in any order.

        `samples`, `repeats`, `batch_size`, `cache_memory`, `prefill_batch`, `device_map`, `judge`, `out` and the fields
        of the executor do not count: a run continues if they change.
        """
        return digest_of(self._counting)

    @property
    def _counting(self) -> dict[str, Any]:
        """Return the fields that count for the digest."""
        digest_values: dict[str, Any] = {}
        for option_name, option in options():
            value = getattr(self, option_name)
            if option.digest == "always" or (option.digest == "if set" and value is not None):
                digest_values[option_name] = sorted(value) if isinstance(value, tuple) else value
        return digest_values

    @property
    def generation(self) -> GenerationFlags:
        """Return the generation flags."""
        flag_names = [field.name for field in fields(GenerationFlags)]
        return GenerationFlags(**{flag_name: getattr(self, flag_name) for flag_name in flag_names})

    @property
    def harness_flags(self) -> HarnessFlags:
        """Return lm-eval's own flags."""
        flag_values = {field.name: getattr(self, field.name) for field in fields(HarnessFlags)}
        return HarnessFlags(**{name: value for name, value in flag_values.items() if value is not None})

    @functools.cached_property
    def path(self) -> Path:
        """Return the folder of the run."""
        if self.out:
            return Path(self.out)
        return default_folder(self.digest, self.models, self.tasks, self.policies)

    @functools.cached_property
    def built_policies(self) -> tuple[Policy, ...]:
        """Return the policies, once each; `all` stands for every installed method, a group for its members.

        Raises:
            UserError: A policy is unknown or has an unknown or ill-typed parameter.
        """
        all_policies = [self._built[policy_name] for spec in self.policies for policy_name in self._members(spec)]
        return tuple({str(policy): policy for policy in all_policies}.values())

    def _members(self, spec: str) -> list[str]:
        """Return the policies that a spelling stands for."""
        policy_names = registry.names(registry.POLICIES)
        if spec == ALL:  # a reference that sees the answer is no method
            return [policy_name for policy_name in policy_names if not self._built[policy_name].is_informed]
        if spec in policy_names or not spec.isidentifier():
            return [spec]
        return [policy_name for policy_name in policy_names if self._built[policy_name].group == spec] or [spec]

    @functools.cached_property
    def named_policies(self) -> frozenset[str]:
        """Return canonical spellings of the policies named explicitly, not through `all`."""
        policy_names = [policy_name for spec in self.policies if spec != ALL for policy_name in self._members(spec)]
        return frozenset(str(self._built[policy_name]) for policy_name in policy_names)

    @functools.cached_property
    def _built(self) -> _Builder:
        return _Builder()

    @functools.cached_property
    def parsed_budgets(self) -> tuple[Budget, ...]:
        """Return the parsed budgets."""
        return tuple(Budget.parse(budget) for budget in self.budgets)

    @functools.cached_property
    def timings(self) -> tuple[Timing, ...]:
        """Return the parsed moments."""
        return tuple(Timing.parse(moment) for moment in self.moments)

    def has_moment(self, moment: Moment) -> bool:
        """Return whether the caches of some cells are compressed at this moment."""
        return any(timing.moment == moment for timing in self.timings)

    def leaves(self) -> list[tuple[str, Benchmark]]:
        """Return each task of `tasks` with its benchmark, once each, in the order given.

        With `chat_template_everywhere`, no task of a benchmark goes without the chat template.

        Raises:
            UserError: A task is unknown, or two have the same name.
        """
        groups: dict[str, Benchmark] = {}
        for spec in self.tasks:
            for task_name, group in catalogue.resolve_task(spec, self.include_path or ()):
                first_group = groups.setdefault(task_name, group)
                if first_group.identity(task_name) != group.identity(task_name):
                    raise UserError(
                        f"two tasks are called {task_name!r}: {first_group.name} ({first_group.source}) "
                        f"and {group.name} ({group.source})"
                    )
        if self.chat_template_everywhere:
            return [(task_name, replace(group, plain=frozenset())) for task_name, group in groups.items()]
        return list(groups.items())

    def variants(self) -> list[CellVariant]:
        """Return the variants of each task, model and length; the full cache comes first.

        Raises:
            UserError: A policy is unknown or has an unknown or ill-typed parameter.
        """
        full = kvbench_policy("full")
        variants = []
        # At the budget `full` every policy is the full cache.
        if self.full or str(full) in self.named_policies or "full" in self.budgets:
            variants += [CellVariant(full, FULL_BUDGET, timing) for timing in self.timings]
        for policy in self.built_policies:
            if not policy.is_full:
                variants += [
                    CellVariant(policy, budget, timing)
                    for budget in (self.parsed_budgets if policy.has_budget else [FULL_BUDGET])
                    if not (policy.has_budget and budget.is_full)
                    for timing in self.timings
                ]
        return list(dict.fromkeys(variants))


def overlaid(base_values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a grid with overrides applied, whether keys are `policy` or `policies`."""
    changes = {field_of(key): value for key, value in overrides.items()}
    return {key: value for key, value in base_values.items() if field_of(key) not in changes} | changes


class _Builder(dict[str, Policy]):
    """Policies by spelling, each built once."""

    def __missing__(self, spec: str) -> Policy:
        self[spec] = kvbench_policy(spec)
        return self[spec]
