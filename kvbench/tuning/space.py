"""The search space: every score with every allocator, selector and merger, and their declared parameters."""

from __future__ import annotations

import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvbench import registry
from kvbench.errors import UserError, nearest
from kvbench.plugin import Part, Policy, Score
from kvbench.spelling import part, policy

KINDS = ("score", "allocate", "select", "merge")
NONE = "none"
"""The merger that drops evicted entries."""

_GENERIC = {"allocate": "uniform", "select": "topk"}
"""The parts that no package registers, by kind."""

_OTHER_ALGORITHM = "variant"
"""A parameter that chooses between a paper and its authors' code is left as it is."""


class Suggester(Protocol):
    """What suggests values: an optuna trial."""

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        """Suggest one of several values."""
        ...

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Suggest an integer."""
        ...

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """Suggest a number."""
        ...


@dataclass(frozen=True)
class Space:
    """The parts to combine.

    Attributes:
        parts: Parts with default parameters, by kind and name; None is no merger.
        named: The registered policies that the search has to beat.
    """

    parts: Mapping[str, Mapping[str, Part | None]]
    named: tuple[Policy, ...]

    def suggest(self, trial: Suggester) -> str:
        """Return the canonical spelling of a combination that a trial suggests."""
        chosen: dict[str, Part | None] = {}
        for kind in KINDS:
            name = trial.suggest_categorical(kind, list(self.parts[kind]))
            component = self.parts[kind][name]
            chosen[kind] = None if component is None else _suggested(component, f"{kind}.{name}", trial)
        return self.spell(chosen)

    def spell(self, chosen: Mapping[str, Part | None]) -> str:
        """Return the shortest canonical spelling of a combination, based on a policy with its score if there is one."""
        bases = [base for base in self.named if type(base.score) is type(chosen["score"])] or self.named
        spellings = [str(policy(base, **{**chosen, "merge": chosen["merge"] or NONE})) for base in bases]
        return min(spellings, key=lambda spelling: (len(spelling), spelling))


def search_space(model: str, restricted: Mapping[str, Collection[str]], *, with_files: bool = False) -> Space:
    """Return the search space for a model.

    Parts that prune images are left out: they act on the prompt.

    Args:
        model: The model's id or folder, as in `ModelInfo.name`.
        restricted: Names of the parts to try, by kind; a kind that is missing is not restricted.
        with_files: Whether to try parts that read a file made for the model.

    Raises:
        UserError: A name is unknown, or no part is left.
    """
    parts: dict[str, dict[str, Part | None]] = {}
    for kind in KINDS:
        known_parts = _parts_of(kind)
        wanted = restricted.get(kind)
        for name in wanted or ():
            if name not in known_parts:
                raise UserError(f"--{kind} {name}: unknown{nearest(name, known_parts)}; {_known(known_parts)}")
        parts[kind] = {
            name: component
            for name, component in known_parts.items()
            if (wanted is None or name in wanted) and _has_its_files(component, model, with_files=with_files)
        }
        if not parts[kind]:
            files = "" if with_files else "; add --with-files"
            raise UserError(f"--{kind} {','.join(wanted or ())}: reads a file made for the model{files}")
    named = [
        candidate
        for candidate in map(policy, registry.names(registry.POLICIES))
        if candidate.score is not None
        and not candidate.is_informed
        and not _prunes(candidate.score)
        and not candidate.recodes
        and all(_has_its_files(component, model, with_files=with_files) for component in candidate.parts)
    ]
    return Space(parts, tuple(named))


def _suggested(component: Part, prefix: str, trial: Suggester) -> Part:
    """Return a part with suggested parameters."""
    changes: dict[str, Any] = {}
    types = component.parameter_types()
    for name, value_type in types.items():
        label = f"{prefix}.{name}"
        if (searched := component.searched.get(name)) is not None:
            if isinstance(searched.low, int) and isinstance(searched.high, int):
                changes[name] = trial.suggest_int(
                    label, searched.low, searched.high, step=searched.step, log=searched.log
                )
            else:
                suggested = trial.suggest_float(label, searched.low, searched.high, log=searched.log)
                changes[name] = float(f"{suggested:.3g}")  # the spelling stays short, and is what is run
        elif value_type is bool:
            changes[name] = trial.suggest_categorical(label, [False, True])
        elif typing.get_origin(value_type) is Literal and name != _OTHER_ALGORITHM:
            changes[name] = trial.suggest_categorical(label, list(typing.get_args(value_type)))
    return component.replace(**changes) if changes else component


def _parts_of(kind: str) -> dict[str, Part | None]:
    """Return every part of a kind that can be combined freely, by name."""
    found: dict[str, Part | None] = {NONE: None} if kind == "merge" else {}
    prefix = f"{kind}."
    registered = [name.removeprefix(prefix) for name in registry.names(registry.PARTS) if name.startswith(prefix)]
    for name in dict.fromkeys([*filter(None, [_GENERIC.get(kind)]), *registered]):
        component = part(kind, name)
        is_informed = any(need.informed for need in component.needs)
        if not is_informed and not (isinstance(component, Score) and _prunes(component)):
            found[name] = component
    return found


def _prunes(score: Score) -> bool:
    return score.prunes is not None or score.reads_tower


def _has_its_files(component: Part | None, model: str, *, with_files: bool) -> bool:
    """Return whether a part reads no file, or one that exists and is allowed."""
    if component is None:
        return True
    try:
        reads_file = bool(component.fingerprint(model))
    except UserError:  # it has none for this model
        return False
    return with_files or not reads_file


def _known(names: Collection[str]) -> str:
    return f"known: {', '.join(sorted(names))}"
