"""A cell of the results: its identity and its two hashes."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

from kvbench import registry
from kvbench.budget import Budget
from kvbench.engine.block_quantizers import quantizer_packages
from kvbench.engine.model_check import Checked, recorded_check
from kvbench.files import digest_of
from kvbench.moments import Moment, Timing
from kvbench.plugin import Policy
from kvbench.spelling import exchanged_parts

FULL_BUDGET = Budget.parse("full")


@dataclass(frozen=True)
class CellVariant:
    """The part that varies between the cells of one task: a policy at a budget and a moment.

    The full cache has neither budget nor moment, except at moment `turns`, where the full cache's own answers are part
    of its history.

    Attributes:
        policy: Chooses the entries.
        budget: Number of entries to keep, or that each query reads.
        timing: When the cache is compressed; None for the full cache.
    """

    policy: Policy
    budget: Budget
    timing: Timing | None

    def __post_init__(self) -> None:
        if not self.policy.has_budget:
            object.__setattr__(self, "budget", FULL_BUDGET)
        if self.is_full and self.timing is not None and self.timing.moment != "turns":
            object.__setattr__(self, "timing", None)

    @property
    def is_full(self) -> bool:
        """Return whether this is the uncompressed cache."""
        return self.policy.is_full

    @property
    def moment(self) -> Moment:
        """Return when the cache is compressed; the full cache counts as `context`."""
        return "context" if self.timing is None else self.timing.moment


@dataclass(frozen=True)
class Cell:
    """One row of the results: a variant on a task, and everything that can change it.

    Attributes:
        variant: Policy, budget and moment.
        model: As the user names it: `reference`, a path or a hub id.
        model_revision: Commit of a hub model, or digest of a local one.
        task: Task name.
        group: Benchmark name (not part of either hash).
        length: Tokens of prompt and answer (0 if the task is not sized).
        seed: Seed of data and policy noise.
        dtype: Dtype of weights and cache such as "float32", with the weight quantisation in brackets: "bfloat16
            (bnb-4bit)".
        device: Device type; an index ("cuda:1") is dropped.
        attention: Attention implementation of the prefill.
        chat_template: Identifies the chat template that is applied; "" for none.
        data_hash: Hash of the task's data.
        task_version: Version of the task.
        prompts: Digest of the task's prompt format.
        generation: Generation settings as a JSON object; "" for greedy answers as the task defines them. See
            `kvbench.runs.generation.GenerationFlags.record`.
        files: Digest of the files that the policy reads for the model (`Policy.fingerprint`).
        packages: Additional packages whose versions can change a response.
    """

    variant: CellVariant
    model: str
    model_revision: str
    task: str
    group: str
    length: int
    seed: int
    dtype: str
    device: str
    attention: str
    chat_template: str
    data_hash: str
    task_version: str
    prompts: str
    generation: str = ""
    files: str = ""
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", self.device.partition(":")[0])

    def of(self, variant: CellVariant, files: str) -> Cell:
        """Return the cell of another variant of the same task."""
        return replace(self, variant=variant, files=files)

    @property
    def policy(self) -> Policy:
        """Return the policy of the variant."""
        return self.variant.policy

    @property
    def budget(self) -> Budget:
        """Return the budget of the variant."""
        return self.variant.budget

    @property
    def is_full(self) -> bool:
        """Return whether this is the uncompressed cache."""
        return self.variant.is_full

    @property
    def moment(self) -> Moment:
        """Return when the cache is compressed; the full cache counts as `context`."""
        return self.variant.moment

    @property
    def chunk(self) -> int:
        """Return the tokens per chunk at moment `chunked`; 0 at all others."""
        return 0 if self.variant.timing is None else self.variant.timing.chunk

    def __str__(self) -> str:
        return f"{self.task}, {self.policy} at {self.budget}"

    @functools.cached_property
    def labels(self) -> dict[str, str | int]:
        """Return the cell's identity, in the spelling of `cells.parquet`."""
        timing = self.variant.timing
        return {
            "model": self.model,
            "model_revision": self.model_revision,
            "task": self.task,
            "group": self.group,
            "length": self.length,
            "policy": str(self.policy),
            "budget": str(self.budget),
            "moment": "" if timing is None else str(timing),
            "seed": self.seed,
            "dtype": self.dtype,
            "device": self.device,
            "attention": self.attention,
            "data_hash": self.data_hash,
            "task_version": self.task_version,
        }

    @functools.cached_property
    def versions(self) -> dict[str, object]:
        """Return the versions that responses depend on, by package, policy, replaced part and files."""
        return versions(self.policy, self.files, self.packages)

    @functools.cached_property
    def cell(self) -> str:
        """Return 16 hex digits over everything that can change a response: the key for resuming."""
        hashed_labels = {label: value for label, value in self.labels.items() if label != "group"}
        hashed_labels |= {"chat_template": self.chat_template, "prompts": self.prompts}
        # JSON inside JSON, for compatibility with the hashes of the first runs.
        hashed_labels["versions"] = json.dumps(self.versions, sort_keys=True)
        if self.generation:
            hashed_labels["generation"] = self.generation
        return digest_of(hashed_labels)

    @functools.cached_property
    def match(self) -> str:
        """Return 16 hex digits over what is measured, not how: the key for comparing cells."""
        label_names = ("model", "task", "length", "policy", "budget", "moment", "seed", "data_hash")
        hashed_labels = {label: self.labels[label] for label in label_names}
        return digest_of(hashed_labels | ({"generation": self.generation} if self.generation else {}))

    def row(self, **extra_options: int) -> dict[str, str | int]:
        """Return the columns of `cells.parquet` that identify the cell, including its hashes.

        Args:
            extra_options: Further generation settings.
        """
        recorded_versions: dict[str, object] = dict(self.versions)
        if generation := json.loads(self.generation or "{}") | extra_options:
            recorded_versions["generation"] = generation
        if self.chat_template:
            recorded_versions["chat_template"] = self.chat_template
        if self.prompts:
            recorded_versions["prompts"] = self.prompts
        if check := recorded_check(Checked(self.model_revision, self.dtype, self.device, self.attention)):
            recorded_versions["model_check"] = check
        versions_json = json.dumps(recorded_versions, sort_keys=True)
        return {"cell": self.cell, "match": self.match, **self.labels, "versions": versions_json}


def versions(policy: Policy, files: str = "", packages: Sequence[str] = ()) -> dict[str, object]:
    """Return what the responses of a policy depend on besides the flags.

    Args:
        policy: Recorded by the digest of its file, or by the package that registers it with its version; the same for
            replaced parts. Versions of parts are recorded only above 1, so that the hashes of other cells stay the
            same.
        files: Digest of the files that the policy reads for the model.
        packages: Additional packages that responses depend on.

    Returns:
        Versions by name, sorted by name.
    """
    core_packages = ("kvbench", "torch", "transformers", "lm_eval")
    package_names = (*core_packages, *packages, *quantizer_packages(policy))
    recorded: dict[str, object] = {name: _installed(name) for name in package_names}
    recorded["policy"] = policy.origin
    for part_kind, part in exchanged_parts(policy).items():
        if part is not None and (name := f"{part_kind}.{part.name}") in registry.names(registry.PARTS):
            recorded[part_kind] = registry.origin(registry.PARTS, name)
    if files:
        recorded["files"] = files
    if policy.part_versions:
        recorded["part_versions"] = policy.part_versions
    return dict(sorted(recorded.items()))


@functools.cache
def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
