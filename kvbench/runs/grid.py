"""What to run: a grid, the product of all flags, and its cells."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench import registry
from kvbench.budget import Budget
from kvbench.decoding import Settings
from kvbench.errors import UserError, nearest
from kvbench.files import digest_of
from kvbench.harness import catalogue
from kvbench.runs.cell import Cell, versions
from kvbench.runs.values import READERS, read_yaml

if TYPE_CHECKING:
    from kvbench.benchmark import Benchmark

ALL = "all"
"""Names every installed policy."""

_LISTS = ("policies", "budgets", "models", "tasks", "moments", "lengths")
_SINGULAR = {
    "policy": "policies",
    "budget": "budgets",
    "model": "models",
    "task": "tasks",
    "moment": "moments",
    "length": "lengths",
}
_NOT_IN_DIGEST = ("samples", "repeats", "out", "batch_size", "device_map", "judge")
"""What extends, moves, speeds up or scores a run, and changes no response of it."""


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
        samples: Per task.
        seed: Of data and policy noise.
        out: Folder of the run; None for `results/<digest>`.
        device: A torch device or "auto".
        dtype: "auto", "float32", "bfloat16" or "float16".
        attn: Attention implementation of the prefill, or "auto".
        batch_size: Rows decoded together, or "auto".
        revision: Of a hub model.
        chat_template: Whether to apply it; None applies it where the tokenizer has one.
        full: Whether the full cache is run too.
        judge: Who judges responses where a task needs that: "auto" (the environment says),
            "endpoint" or "local".
        temperature: Of drawn answers; 0 is greedy. This and what follows go before what a task
            says; None leaves it to the task.
        top_p: See `kvbench.decoding.Sampling`.
        top_k: See there.
        repeats: Answers to each question, where they are drawn.
        max_new_tokens: Limit of an answer.
        thinking: What a chat template is told as `enable_thinking`.
        truncate: "middle" or "middle:4096": see `kvbench.decoding.Truncation`.
        device_map: As transformers takes it, "auto" or names of modules to devices; `device` is
            then left at "auto".
        quantization: How weights are quantised as they are loaded: a name of
            `kvbench.quantization.PACKAGES`.
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
    attn: str = "auto"
    batch_size: int | str = "auto"
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

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            object.__setattr__(self, name, READERS[name](value))
        shares = [b for b in self.budgets if Budget.parse(b).tokens is None and b != "full"]
        if "decode" in self.moments and shares:
            raise UserError(
                f"moment decode needs budgets in tokens, as 128, not {', '.join(shares)}: "
                "nobody knows beforehand how long a response will be"
            )
        if self.temperature == 0 and (self.top_p, self.top_k) != (None, None):
            raise UserError("temperature 0 is greedy: top_p and top_k would do nothing")
        if self.device_map is not None and self.device != "auto":
            raise UserError("device and device_map both say where the model goes: give one")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Grid:
        """Read a grid.

        Args:
            data: Names of the attributes, or of the flags (`policy` for `policies`), to a value, a
                list, or a comma-separated string.

        Raises:
            UserError: A key is unknown, missing or given twice, or a value is wrong.
        """
        return cls._read(data, lambda key: "")

    @classmethod
    def from_yaml(cls, path: str | Path, override: Mapping[str, Any] | None = None) -> Grid:
        """Read a grid file.

        Args:
            path: A YAML mapping, as `from_dict` takes it.
            override: Values that go before the file's.

        Raises:
            UserError: As `from_dict`, naming file and line.
        """
        data, lines = read_yaml(path)
        given = {_SINGULAR.get(k, k): v for k, v in (override or {}).items()}
        file = {k: v for k, v in data.items() if _SINGULAR.get(k, k) not in given}

        def where(key: str) -> str:
            return f"{path}:{lines[key]}: " if key in file else ""

        return cls._read(file | given, where, str(path))

    @classmethod
    def _read(
        cls, data: Mapping[str, Any], where: Callable[[str], str], name: str = "the grid"
    ) -> Grid:
        values: dict[str, Any] = {}
        known = [field.name for field in fields(cls)]
        for key, value in data.items():
            target = _SINGULAR.get(key, key)
            try:
                if target not in known:
                    hint = nearest(str(key), [*known, *_SINGULAR])
                    raise UserError(f"unknown key {key!r}{hint or f'; there are {known}'}")
                if target in values:
                    raise UserError(f"{key!r} is given twice")
                values[target] = READERS[target](value)
            except UserError as error:
                raise UserError(f"{where(key)}{error}") from None
        for target, flag in (("policies", "--policy"), ("tasks", "--task")):
            if target not in values:
                raise UserError(f"{name} names no {target}; give {flag} or the key {target}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The grid as plain lists and values; `from_dict` reads it back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @functools.cached_property
    def digest(self) -> str:
        """16 hex digits over all that changes a response or adds a cell, in whatever order.

        Not over `samples`, `repeats`, `batch_size`, `device_map`, `judge` and `out`: with others
        of these the same run goes on.
        """
        own = {k: v for k, v in self.to_dict().items() if k not in _NOT_IN_DIGEST}
        for name in ("quantization", *(setting.name for setting in fields(Settings))):
            if own.get(name) is None:
                own.pop(name, None)
        for name in _LISTS:
            own[name] = sorted(own[name])
        return digest_of(own)

    @property
    def generation(self) -> Settings:
        """What it says about how answers are made."""
        return Settings(**{field.name: getattr(self, field.name) for field in fields(Settings)})

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return Path(self.out) if self.out else Path("results") / self.digest

    @functools.cached_property
    def canonical_policies(self) -> tuple[str, ...]:
        """The policies as `str(kvbench.policy(spec))`, once each; `all` is every installed one.

        Raises:
            UserError: A policy is unknown or has a parameter that is unknown or ill-typed.
        """
        named = [
            name
            for spec in self.policies
            for name in (registry.names(registry.POLICIES) if spec == ALL else [spec])
        ]
        return tuple(dict.fromkeys(_canonical(spec) for spec in named))

    def names(self, policy: str) -> bool:
        """Whether a policy (canonical) is asked for by its own name, and not by `all` alone."""
        return any(_canonical(spec) == policy for spec in self.policies if spec != ALL)

    def leaves(self) -> list[tuple[str, Benchmark]]:
        """The leaf tasks of all `tasks`, once each, in the order given.

        Raises:
            UserError: A task is unknown, or two have the same name.
        """
        found: dict[str, Benchmark] = {}
        for spec in self.tasks:
            for leaf, group in catalogue.resolve_task(spec):
                same = found.setdefault(leaf, group)
                if (same.name, same.source) != (group.name, group.source):
                    raise UserError(
                        f"two tasks are called {leaf!r}: {same.name} ({same.source}) "
                        f"and {group.name} ({group.source})"
                    )
        return list(found.items())

    def variants(self, without: Container[str] = ()) -> list[tuple[str, str, str]]:
        """Policy, budget and moment of every cell of one model, task and length; `full` first.

        Args:
            without: Policies (canonical) that are left out.

        Raises:
            UserError: A policy is unknown or has a parameter that is unknown or ill-typed.
        """
        # At the budget `full` every policy is the full cache.
        wanted = self.full or self.names("full") or "full" in self.budgets
        whole = dict.fromkeys("turns" if m == "turns" else "" for m in self.moments)
        found = [("full", "full", moment) for moment in whole] if wanted else []
        for policy in self.canonical_policies:
            if policy != "full" and policy not in without:
                kept = [b for b in self.budgets if b != "full"]
                found += [(policy, b, moment) for b in kept for moment in self.moments]
        return found

    def cells_for(
        self,
        *,
        model: str,
        model_revision: str,
        task: str,
        group: str,
        length: int,
        dtype: str,
        device: str,
        attention: str,
        chat_template: str,
        data_hash: str,
        task_version: str,
        prompts: str,
        generation: str = "",
        packages: tuple[str, ...] = (),
        fingerprint: Callable[[str], str] = lambda policy: "",
        without: Container[str] = (),
    ) -> list[Cell]:
        """The cells of one model, leaf task and length, each once, `full` first.

        Args are the attributes of `Cell`; dtype, device and attention are those really used, never
        "auto". `packages` are further ones whose versions count; `fingerprint` gives the digest of
        the files that a policy reads for the model; policies in `without` are left out.

        Raises:
            UserError: A policy is unknown or has a parameter that is unknown or ill-typed.
        """
        return [
            Cell(
                model=model,
                model_revision=model_revision,
                task=task,
                group=group,
                length=length,
                policy=policy,
                budget=budget,
                moment=moment,
                seed=self.seed,
                dtype=dtype,
                device=device,
                attention=attention,
                chat_template=chat_template,
                data_hash=data_hash,
                task_version=task_version,
                prompts=prompts,
                versions=versions(policy, fingerprint(policy), packages),
                generation=generation,
            )
            for policy, budget, moment in self.variants(without)
        ]


def _canonical(spec: str) -> str:
    import kvbench

    return str(kvbench.policy(spec))
