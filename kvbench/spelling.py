"""Spelling of policies: `NAME[:key=value...]`.

A name is a registered policy (`snapkv`) or an object in a file (`./my_policy.py:MyPolicy`). The keys `score`,
`allocate`, `select`, `merge` and `read` replace a part. Every other key is a parameter: of all parts that have it, or
of one part if prefixed with its kind, as in `select.variant=release`.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Any, Literal

from kvbench import registry
from kvbench.errors import UserError, nearest, quoted
from kvbench.parts import FunctionScore, TopK, Uniform
from kvbench.plugin import Allocator, Merger, Part, Policy, Reader, Score, Selector

KINDS: dict[str, type[Part]] = {
    "score": Score,
    "allocate": Allocator,
    "select": Selector,
    "merge": Merger,
    "read": Reader,
}
_LARGEST = 1 << 24
"""Upper limit of integer parameters, because observers may allocate that many entries."""
_OF_POLICY: dict[str, Any] = {
    "buffer": int,
    "bits": Literal[2, 4, 8] | None,
    "group_size": int,
    "residual": int,
    "key_channels": float,
    "quantizer": Literal["kivi", "hqq", "quanto"],
}
"""Parameters of the policy itself, by name."""
_GENERIC: dict[str, type[Part]] = {"allocate.uniform": Uniform, "select.topk": TopK}


def policy(spec: str | Policy, **params: Any) -> Policy:
    """Return the policy for a spelling.

    Args:
        spec: `NAME[:key=value...]`, for example `snapkv:window=64:select=two_stage`, or
            `./file.py:Name[:key=value...]`.
        **params: Further parameters, which override the spelling.

    Returns:
        An immutable policy; `str(p)` is its canonical spelling.

    Raises:
        UserError: The name or a parameter is unknown (the message suggests the closest) or has the wrong type.
    """
    if isinstance(spec, Policy):
        resolved_policy = spec if spec.base is not None else dataclasses.replace(spec, base=spec)
        return _finished(_apply(resolved_policy, params), spec.origin)
    if not isinstance(spec, str):
        raise UserError(f"{quoted(spec)} is not a policy; give a name such as 'snapkv:window=64'")
    policy_name, parameters = _split(spec)
    if ".py:" in policy_name:
        resolved_policy, origin = (
            as_policy(registry.load_file(policy_name), policy_name),
            registry.file_digest(policy_name),
        )
    else:
        resolved_policy = as_policy(registry.get(registry.POLICIES, policy_name), policy_name)
        origin = registry.origin(registry.POLICIES, policy_name)
    return _finished(_apply(resolved_policy, {**parameters, **params}), origin)


def _finished(policy: Policy, origin: str) -> Policy:
    """Return a copy of a policy with its canonical spelling and origin."""
    policy = dataclasses.replace(policy)
    object.__setattr__(policy, "spelling", canonical(policy))
    object.__setattr__(policy, "origin", origin)
    return policy


def as_policy(plugin: object, policy_name: str) -> Policy:
    """Return the policy for a plugin object: a `Policy`, a `Score` (class or instance) or a function of a `View`.

    Args:
        plugin: The object of the entry point or file.
        policy_name: The user's spelling; the name of a policy from a file.

    Raises:
        UserError: The object is none of these.
    """
    if isinstance(plugin, type) and issubclass(plugin, Score):
        missing = [field.name for field in dataclasses.fields(plugin) if field.init and not _has_default(field)]
        if missing:
            raise UserError(f"parameter {missing[0]} of {plugin.__name__} needs a default")
        plugin = plugin()
    elif inspect.isfunction(plugin):
        plugin = FunctionScore.of(plugin)
    if isinstance(plugin, Score):
        docstring = inspect.getdoc(plugin.function if isinstance(plugin, FunctionScore) else plugin) or ""
        summary = docstring.strip().split("\n")[0]
        plugin = Policy(name=policy_name, score=plugin, allocate=Uniform(), select=TopK(), summary=summary)
    if not isinstance(plugin, Policy):
        raise UserError(
            f"{policy_name} is {type(plugin).__name__}, not a policy; define a Policy, a Score or a function of a View"
        )
    if ".py:" in policy_name or plugin.name not in registry.names(registry.POLICIES):
        plugin = dataclasses.replace(plugin, name=policy_name)
    return dataclasses.replace(plugin, base=plugin)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def part(part_kind: str, part_name: str) -> Part:
    """Return a part by its kind (`score`, `allocate`, ...) and name, with default parameters.

    Raises:
        UserError: There is no such part; the message suggests the closest name.
    """
    generic_class = _GENERIC.get(f"{part_kind}.{part_name}")
    if generic_class is not None:
        return generic_class()
    prefix = f"{part_kind}."
    known_names = [
        entry_name.removeprefix(prefix)
        for entry_name in registry.names(registry.PARTS)
        if entry_name.startswith(prefix)
    ]
    if part_name not in known_names:
        known_names += [entry_name.removeprefix(prefix) for entry_name in _GENERIC if entry_name.startswith(prefix)]
        choices_text = f"known: {', '.join(sorted(known_names))}" if known_names else "none is installed"
        raise UserError(f"unknown part {part_kind}={part_name}{nearest(part_name, known_names)} ({choices_text})")
    registered = registry.get(registry.PARTS, prefix + part_name)
    part_instance = registered() if isinstance(registered, type) else registered
    if not isinstance(part_instance, KINDS[part_kind]):
        raise UserError(f"{part_kind}={part_name} is not a {KINDS[part_kind].__name__}")
    return part_instance


def exchanged_parts(policy: Policy) -> dict[str, Part | None]:
    """Return the parts of a policy, by kind, whose type differs from that of its base."""
    base_policy = policy.base if policy.base is not None else policy
    return {
        part_kind: getattr(policy, part_kind)
        for part_kind in KINDS
        if type(getattr(policy, part_kind)) is not type(getattr(base_policy, part_kind))
    }


def canonical(policy: Policy) -> str:
    """Return the canonical spelling of a policy: its differences from the base, sorted."""
    base_policy = policy.base if policy.base is not None else policy
    replaced_parts = exchanged_parts(policy)
    spelled_fields = [policy.name]
    spelled_fields += [f"{part_kind}={_label(component)}" for part_kind, component in replaced_parts.items()]
    # Value, and whether it differs from the default, by key and kind.
    values_by_key: dict[str, dict[str, tuple[Any, bool]]] = {}
    for part_kind in KINDS:
        component, default_part = getattr(policy, part_kind), getattr(base_policy, part_kind)
        if part_kind in replaced_parts and component is not None:
            # A part without a registered name has no defaults to compare with.
            default_part = part(part_kind, component.name) if component.name else component
        if component is None or default_part is None:
            continue
        default_values = default_part.parameters()
        for parameter_key, parameter_value in component.parameters().items():
            values_by_key.setdefault(parameter_key, {})[part_kind] = (
                parameter_value,
                parameter_value != default_values[parameter_key],
            )
    changed_values: dict[str, Any] = {}
    for parameter_key, values_by_kind in values_by_key.items():
        part_values = [parameter_value for parameter_value, _ in values_by_kind.values()]
        if not any(is_changed for _, is_changed in values_by_kind.values()):
            continue
        if all(type(part_value) is type(part_values[0]) and part_value == part_values[0] for part_value in part_values):
            changed_values[parameter_key] = part_values[0]
        else:  # the parts have different values for the key, so spell the value of each part
            changed_values |= {
                f"{part_kind}.{parameter_key}": part_value
                for part_kind, (part_value, is_changed) in values_by_kind.items()
                if is_changed
            }
    for parameter_key in _OF_POLICY:
        if getattr(policy, parameter_key) != getattr(base_policy, parameter_key):
            changed_values[parameter_key] = getattr(policy, parameter_key)
    return ":".join(
        spelled_fields
        + [f"{changed_key}={spell(changed_values[changed_key])}" for changed_key in sorted(changed_values)]
    )


def _label(component: Part | None) -> str:
    return "none" if component is None else component.name or type(component).__name__


def _split(spec: str) -> tuple[str, dict[str, str]]:
    spec_fields = spec.strip().split(":")
    first_pair = 1
    if spec_fields[0].endswith(".py"):
        if len(spec_fields) < 2 or "=" in spec_fields[1]:
            raise UserError(f"{spec}: name an object in the file, such as {spec_fields[0]}:MyPolicy")
        first_pair = 2
    parameters: dict[str, str] = {}
    for pair_text in spec_fields[first_pair:]:
        parameter_key, separator, value_text = pair_text.partition("=")
        if not separator or not parameter_key or not value_text:
            if {"/", "."} & {*spec_fields[0]}:
                raise UserError(f"{spec}: {spec_fields[0]} is not a .py file; write ./my_policy.py:MyPolicy")
            raise UserError(f"{spec}: {quoted(pair_text)} is not key=value; write snapkv:window=64")
        if parameter_key in parameters:
            raise UserError(f"{spec}: {parameter_key} is given twice")
        parameters[parameter_key] = value_text
    return ":".join(spec_fields[:first_pair]), parameters


def _apply(policy: Policy, parameters: dict[str, Any]) -> Policy:
    pending_values = dict(parameters)
    changes: dict[str, Any] = {}
    for kind in KINDS:
        if kind in pending_values:
            name = pending_values.pop(kind)
            if kind == "read" and policy.read is None:
                raise UserError(f"{policy.name} has no reader, so read= does not apply")
            if kind != "read" and not policy.evicts:
                raise UserError(f"{policy.name} evicts nothing, so {kind}= does not apply")
            removes_part = kind == "merge" and name in (None, "none")
            current_part = getattr(policy, kind)
            if removes_part:
                changes[kind] = None
            elif isinstance(name, Part):
                changes[kind] = name
            elif current_part is None or current_part.name != name:
                changes[kind] = part(kind, str(name))
    if "buffer" in pending_values and not policy.evicts:
        raise UserError(f"{policy.name} evicts nothing, so buffer= does not apply")
    for parameter_key, kind in _OF_POLICY.items():
        if parameter_key in pending_values:
            changes[parameter_key] = _cast(parameter_key, pending_values.pop(parameter_key), kind)
    policy = dataclasses.replace(policy, **changes)
    _check_own(policy, changes)
    known_keys: set[str] = {*_OF_POLICY, *KINDS}
    for kind in KINDS:
        component = getattr(policy, kind)
        if component is None:
            continue
        value_types = component.parameter_types()
        known_keys |= set(value_types) | {f"{kind}.{name}" for name in value_types}
        shared_values = {value_key: value for value_key, value in pending_values.items() if value_key in value_types}
        qualified_values = {
            value_key.removeprefix(f"{kind}."): value
            for value_key, value in pending_values.items()
            if value_key.startswith(f"{kind}.")
        }
        part_values = {
            value_key: value
            for value_key, value in {**shared_values, **qualified_values}.items()
            if value_key in value_types
        }
        if part_values:
            replacement: dict[str, Any] = {kind: _replaced(policy, kind, component, part_values)}
            policy = dataclasses.replace(policy, **replacement)
    for parameter_key in pending_values:
        if parameter_key not in known_keys:
            known_text = ", ".join(sorted(value_key for value_key in known_keys if "." not in value_key))
            if parameter_key == "seed":
                raise UserError("noise uses the seed of the run; use --seed")
            raise UserError(
                f"{policy.name} has no parameter {quoted(parameter_key)}{nearest(parameter_key, known_keys)} "
                f"(it has: {known_text})"
            )
    return policy


def _check_own(policy: Policy, changes: dict[str, Any]) -> None:
    """Validate the ranges of the policy's own parameters."""
    if policy.buffer < 0:
        raise UserError("buffer must be a number of entries, 0 or more")
    if policy.group_size < 1 or policy.residual < 0:
        raise UserError("group_size must be 1 or more entries, residual 0 or more")
    if not 0 < policy.key_channels <= 1:
        raise UserError("key_channels must be a fraction of the channels above 0 and at most 1, such as 0.6")
    if policy.read is not None and policy.key_channels < 1:
        raise UserError(f"{policy.name} rates blocks with complete keys; remove key_channels")
    if "group_size" in changes and policy.bits is None:
        raise UserError("group_size applies only to a quantised cache; add bits=4")
    if "quantizer" in changes and policy.bits is None:
        raise UserError("quantizer applies only to a quantised cache; add bits=4")
    if policy.quantizer == "quanto" and policy.bits == 8:
        raise UserError("quanto does not support groups of 8-bit codes; use bits=4 or quantizer=hqq")
    if "residual" in changes and not policy.recodes:
        raise UserError("residual applies only to quantised caches and pruned keys; add bits=4 or key_channels=0.6")


def _replaced(policy: Policy, part_kind: str, component: Part, new_values: dict[str, Any]) -> Part:
    """Return a part with changed parameters.

    Raises:
        UserError: A value is invalid. If other parts have the same key, the message names them.
    """
    value_types = component.parameter_types()
    try:
        return component.replace(**{name: _cast(name, value, value_types[name]) for name, value in new_values.items()})
    except UserError as error:
        for parameter_key in new_values:
            other_kinds = [
                name
                for name in KINDS
                if (other_part := getattr(policy, name)) is not None
                and name != part_kind
                and parameter_key in other_part.parameter_types()
            ]
            if other_kinds and f"{parameter_key}=" in str(error):
                spellings = " or ".join(f"{name}.{parameter_key}=" for name in (part_kind, *other_kinds))
                raise UserError(
                    f"{error} ({part_kind} and {', '.join(other_kinds)} share this parameter; use {spellings})"
                ) from None
        raise


def _cast(parameter_key: str, value: Any, value_type: Any) -> Any:
    choices = typing.get_args(value_type)
    if typing.get_origin(value_type) is typing.Literal:
        value = {str(choice): choice for choice in choices}.get(str(value), value)
        if value not in choices:
            raise UserError(f"{parameter_key}={value}: choose from {', '.join(map(str, choices))}")
        return value
    if typing.get_origin(value_type) in (typing.Union, types.UnionType):
        if value in (None, "none"):
            return None
        return _cast(parameter_key, value, next(choice for choice in choices if choice is not type(None)))
    try:
        if value_type is bool:
            return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
        if value_type is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        converted = value_type(value)
    except (KeyError, TypeError, ValueError):
        type_text = {bool: "true or false", int: "a whole number", float: "a number"}.get(value_type, str(value_type))
        raise UserError(f"{parameter_key}={value} is not {type_text}") from None
    if value_type is int and abs(converted) > _LARGEST:
        raise UserError(f"{parameter_key}={value} is too large; the limit is {_LARGEST}")
    return converted


def spell(value: Any) -> str:
    """Return a parameter value as text."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
