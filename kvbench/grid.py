"""What to run: a grid (the product of all flags), its cells, and the two hashes of a cell."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench import registry
from kvbench.budget import Budget
from kvbench.errors import UserError, nearest
from kvbench.gridfile import READERS, read_yaml

if TYPE_CHECKING:
    from kvbench.harness.protocol import Benchmark

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
_NOT_IN_DIGEST = ("samples", "out", "batch_size")
"""What extends, moves or speeds up a run, and changes no response of it."""


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Cell:
    """One row of the results: a policy at a budget on a leaf task, and all that can change it.

    The policy `full` has neither budget nor moment: they are set to "full" and "". Only at moment
    `turns` it keeps it: there the answers of the full cache are part of its history.

    Attributes:
        model: As the user names it: `reference`, a path or a hub id.
        model_revision: Commit of the hub, or digest of the local weights.
        task: Leaf name.
        group: Benchmark; a label, in neither hash.
        length: Tokens of prompt and answer (0 where the task is not sized).
        policy: Canonical spelling.
        budget: Canonical spelling of what is kept.
        moment: When the cache is compressed.
        seed: Of data and policy noise.
        dtype: Of weights and cache, e.g. "float32".
        device: Device type; an index ("cuda:1") is dropped.
        attention: Attention implementation of the prefill.
        chat_template: "" for none, else whatever identifies the template that is applied.
        data_hash: Of the task's data.
        task_version: Of the task.
        prompts: Digest of how the task asks.
        versions: JSON object of the versions that responses depend on, see `versions`.
    """

    model: str
    model_revision: str
    task: str
    group: str
    length: int
    policy: str
    budget: str
    moment: str
    seed: int
    dtype: str
    device: str
    attention: str
    chat_template: str
    data_hash: str
    task_version: str
    prompts: str
    versions: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", self.device.partition(":")[0])
        if self.is_full:
            object.__setattr__(self, "budget", "full")
            object.__setattr__(self, "moment", "turns" if self.moment == "turns" else "")

    @property
    def is_full(self) -> bool:
        """Whether this is the uncompressed cache."""
        return self.policy == "full"

    @functools.cached_property
    def cell(self) -> str:
        """16 hex digits over everything that can change a response: the key of resuming."""
        return _digest({k: v for k, v in asdict(self).items() if k != "group"})

    @functools.cached_property
    def match(self) -> str:
        """16 hex digits over what is asked, not over how it is computed: the key of comparing."""
        asked = ("model", "task", "length", "policy", "budget", "moment", "seed", "data_hash")
        return _digest({name: getattr(self, name) for name in asked})

    def row(self) -> dict[str, str | int]:
        """The columns of `cells.parquet` that say what the cell is, hashes included."""
        own = asdict(self)
        recorded = json.loads(self.versions)
        for name in ("chat_template", "prompts"):
            if value := own.pop(name):
                recorded[name] = value
        own["versions"] = json.dumps(recorded, sort_keys=True)
        return {"cell": self.cell, "match": self.match, **own}


@functools.cache
def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def versions(policy: str, files: str = "") -> str:
    """What the responses of a policy depend on beside the flags.

    Args:
        policy: Spelling of the policy. The digest of its file, or the package and version that
            registers its name, is part of the answer, and so are those of exchanged parts.
        files: Digest of the files that the policy reads for the model (`Policy.fingerprint`).

    Returns:
        A JSON object with sorted keys.
    """
    found = {name: _installed(name) for name in ("kvbench", "torch", "transformers", "lm_eval")}
    if registry.split_file(policy):
        found["policy"] = registry.file_digest(policy)
    else:
        found["policy"] = registry.origin(registry.POLICIES, policy.partition(":")[0])
    for item in policy.split(":"):
        kind, _, name = item.partition("=")
        if (part := f"{kind}.{name}") in registry.names(registry.PARTS):
            found[kind] = registry.origin(registry.PARTS, part)
    if files:
        found["files"] = files
    return json.dumps(found, sort_keys=True)


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

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            object.__setattr__(self, name, READERS[name](value))
        shares = [b for b in self.budgets if Budget.parse(b).tokens is None and b != "full"]
        if "decode" in self.moments and shares:
            raise UserError(
                f"moment decode needs budgets in tokens, as 128, not {', '.join(shares)}: "
                "nobody knows beforehand how long a response will be"
            )

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

        Not over `samples`, `batch_size` and `out`: with others of these the same run goes on.
        """
        own = {k: v for k, v in self.to_dict().items() if k not in _NOT_IN_DIGEST}
        for name in _LISTS:
            own[name] = sorted(own[name])
        return _digest(own)

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
            for leaf, group in registry.resolve_task(spec):
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
        fingerprint: Callable[[str], str] = lambda policy: "",
        without: Container[str] = (),
    ) -> list[Cell]:
        """The cells of one model, leaf task and length, each once, `full` first.

        Args are the attributes of `Cell`; dtype, device and attention are those really used, never
        "auto". `fingerprint` gives the digest of the files that a policy reads for the model;
        policies in `without` are left out.

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
                versions=versions(policy, fingerprint(policy)),
            )
            for policy, budget, moment in self.variants(without)
        ]


def _canonical(spec: str) -> str:
    import kvbench

    return str(kvbench.policy(spec))
