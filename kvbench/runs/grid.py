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
from kvbench.runs.values import READERS, read_yaml
from kvbench.spelling import policy as kvbench_policy

ALL = "all"
"""Stands for every installed policy."""

_LISTS = ("policies", "budgets", "models", "tasks", "moments", "lengths")
_SINGULAR = {
    "policy": "policies",
    "budget": "budgets",
    "model": "models",
    "task": "tasks",
    "moment": "moments",
    "length": "lengths",
}
_MOST_VARIANTS = 100_000
_ON_RAY = ("ray_address", "gpus_per_cell", "workers")
_NOT_IN_DIGEST = (
    *("samples", "repeats", "out", "batch_size", "cache_memory", "device_map", "judge"),
    *("prefill_batch", "executor", *_ON_RAY),
)
"""Fields that extend, move, speed up or score a run without changing a response."""
_RETIRED = {"attn": "auto"}
"""Fields of earlier versions. They stay in the digest, and a file may still contain them."""


@dataclass(frozen=True)
class Grid:
    """The product of policies, budgets, models, tasks, moments and lengths, and how to run it.

    Attributes:
        policies: Spellings, `NAME[:key=value...]`.
        budgets: Canonical spellings of `Budget`: the fraction KEPT, tokens, or "full".
        models: `reference`, local paths or hub ids.
        tasks: Groups, leaves or `.jsonl` files.
        moments: When the cache is compressed.
        lengths: Tokens of prompt and answer.
        samples: Samples per task.
        seed: Seed of data and policy noise.
        out: Folder of the run; None for `kvbench.runs.folders.default_folder`.
        device: A torch device or "auto".
        dtype: "auto", "float32", "bfloat16" or "float16".
        batch_size: Most responses decoded together, or "auto".
        cache_memory: Bytes that the caches of a batch may take, such as "40GB"; None for a share
            of the device's memory.
        prefill_batch: Most contexts prefilled together, or "auto".
        revision: Revision of a hub model.
        chat_template: Whether to apply it; None applies it if the tokenizer has one.
        full: Whether to run the full cache as well.
        judge: Who judges responses, for tasks that need it: "auto" (the environment decides),
            "endpoint" or "local".
        temperature: Temperature of drawn answers; 0 is greedy. This and the following fields take
            precedence over the task; None leaves them to the task.
        top_p: See `kvbench.decoding.Sampling`.
        top_k: See `kvbench.decoding.Sampling`.
        repeats: Answers to each question, if they are drawn.
        max_new_tokens: Limit of an answer.
        thinking: Passed to the chat template as `enable_thinking`.
        truncate: "middle" or "middle:4096"; see `kvbench.runs.generation.Truncation`.
        device_map: As transformers takes it, "auto" or module names to devices; `device` must then
            be "auto".
        quantization: How weights are quantised while they are loaded; a name from
            `kvbench.engine.quantization.PACKAGES`.
        executor: Where responses are generated: "local" (this process) or "ray".
        ray_address: Address of a Ray cluster; None for `RAY_ADDRESS`, or a Ray of this machine
            alone. This and the following fields are for the executor "ray".
        gpus_per_cell: GPUs of a worker, which runs all cells of its contexts; a fraction shares a
            GPU. None is 1 on CUDA devices, otherwise 0.
        workers: Number of workers; None is as many as the machines have room for.
    """

    policies: tuple[str, ...]
    tasks: tuple[str, ...]
    budgets: tuple[str, ...] = ("0.2",)
    models: tuple[str, ...] = ("reference",)
    moments: tuple[str, ...] = ("context",)
    lengths: tuple[int, ...] = (1024,)
    samples: int = 50
    seed: int = 0
    out: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    batch_size: int | str = "auto"
    cache_memory: int | None = None
    prefill_batch: int | str = "auto"
    revision: str | None = None
    chat_template: bool | None = None
    full: bool = True
    judge: str = "auto"
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repeats: int | None = None
    max_new_tokens: int | None = None
    thinking: bool | None = None
    truncate: str | None = None
    device_map: str | dict[str, str | int] | None = None
    quantization: str | None = None
    executor: str = "local"
    ray_address: str | None = None
    gpus_per_cell: float | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            object.__setattr__(self, name, READERS[name](value))
        variants = math.prod(len(getattr(self, name)) for name in _LISTS)
        if variants > _MOST_VARIANTS:
            raise UserError(
                f"the product of {', '.join(_LISTS)} has {variants:,} combinations; use at most "
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
        replaced = {_SINGULAR.get(k, k) for k in given}

        def where(key: str) -> str:
            own = key in lines and _SINGULAR.get(key, key) not in replaced
            return f"{path}:{lines[key]}: " if own else ""

        return cls._read(overlaid(data, given), where, str(path))

    @classmethod
    def _read(
        cls, data: Mapping[str, Any], where: Callable[[str], str], name: str = "the grid"
    ) -> Grid:
        values: dict[str, Any] = {}
        known = [field.name for field in fields(cls)]
        for key, value in data.items():
            target = _SINGULAR.get(key, key)
            if target in _RETIRED:
                continue
            try:
                if target not in known:
                    raise unknown("key", key, [*known, *_SINGULAR])
                if target in values:
                    raise UserError(f"{quoted(key)} is given twice")
                values[target] = READERS[target](value)
            except UserError as error:
                raise UserError(f"{where(key)}{error}") from None
        for target, flag in (("policies", "--policy"), ("tasks", "--task")):
            if target not in values:
                raise UserError(f"{name} has no {target}; give {flag} or the key {target}")
        return cls(**values)

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
        given = {_SINGULAR.get(key, key): value for key, value in more.items()}
        for name in given.keys() & set(_LISTS):
            own = getattr(base, name)
            given[name] = list(dict.fromkeys([*own, *READERS[name](given[name])]))
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
            if name not in _LISTS or not set(getattr(self, name)) >= set(getattr(other, name))
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
        own = {k: v for k, v in self.to_dict().items() if k not in _NOT_IN_DIGEST}
        for name in ("quantization", *(flag.name for flag in fields(GenerationFlags))):
            if own.get(name) is None:
                own.pop(name, None)
        for name in _LISTS:
            own[name] = sorted(own[name])
        return own

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
    given = {_SINGULAR.get(k, k): v for k, v in over.items()}
    return {k: v for k, v in base.items() if _SINGULAR.get(k, k) not in given} | given


def singular(key: str) -> str:
    """The flag of a key of a grid, without dashes: `policy` for `policies`."""
    return next((flag for flag, name in _SINGULAR.items() if name == key), key)


class _Builder(dict[str, Policy]):
    """Policies by spelling, each built once."""

    def __missing__(self, spec: str) -> Policy:
        self[spec] = kvbench_policy(spec)
        return self[spec]
