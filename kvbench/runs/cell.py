"""A cell of the results: what it is, and its two hashes."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from kvbench import registry
from kvbench.files import digest_of


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
        dtype: Of weights and cache, e.g. "float32", and in brackets how weights are quantised:
            "bfloat16 (bnb-4bit)".
        device: Device type; an index ("cuda:1") is dropped.
        attention: Attention implementation of the prefill.
        chat_template: "" for none, else whatever identifies the template that is applied.
        data_hash: Of the task's data.
        task_version: Of the task.
        prompts: Digest of how the task asks.
        versions: JSON object of the versions that responses depend on, see `versions`.
        generation: JSON object of how answers are made, where not greedily and as the task says;
            "" where so. See `kvbench.decoding.Settings.record`.
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
    generation: str = ""

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
        own = asdict(self)
        del own["group"]
        if not self.generation:
            del own["generation"]
        return digest_of(own)

    @functools.cached_property
    def match(self) -> str:
        """16 hex digits over what is asked, not over how it is computed: the key of comparing."""
        asked = ("model", "task", "length", "policy", "budget", "moment", "seed", "data_hash")
        own = {name: getattr(self, name) for name in asked}
        return digest_of(own | ({"generation": self.generation} if self.generation else {}))

    def row(self, **more: int) -> dict[str, str | int]:
        """The columns of `cells.parquet` that say what the cell is, hashes included.

        Args:
            more: What else is recorded of how its answers were made.
        """
        own = asdict(self)
        recorded = json.loads(self.versions)
        if made := json.loads(own.pop("generation") or "{}") | more:
            recorded["generation"] = made
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


def versions(policy: str, files: str = "", packages: tuple[str, ...] = ()) -> str:
    """What the responses of a policy depend on beside the flags.

    Args:
        policy: Spelling of the policy. The digest of its file, or the package and version that
            registers its name, is part of the answer, and so are those of exchanged parts.
        files: Digest of the files that the policy reads for the model (`Policy.fingerprint`).
        packages: Further ones that it depends on.

    Returns:
        A JSON object with sorted keys.
    """
    always = ("kvbench", "torch", "transformers", "lm_eval")
    found = {name: _installed(name) for name in (*always, *packages)}
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
