"""How policies are spelled: `NAME[:key=value...]`.

A name is a registered policy (`snapkv`) or an object in a file (`./my_policy.py:MyPolicy`). The
keys `score`, `allocate`, `select`, `merge` and `read` exchange a part. Every other key is a
parameter: of all parts that have it, or of one part if it names the part, as in
`select.variant=release`.
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
"""No window, kernel or count may be larger, because observers can hold that many entries."""
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
    """Make the policy that a spelling names.

    Args:
        spec: `NAME[:key=value...]`, for example `snapkv:window=64:select=two_stage`, or
            `./file.py:Name[:key=value...]`.
        **params: More parameters, as in the spelling; they take precedence over it.

    Returns:
        An immutable policy; `str(p)` is its canonical spelling.

    Raises:
        UserError: The name or a parameter is unknown (the message names the nearest) or ill-typed.
    """
    if isinstance(spec, Policy):
        made = spec if spec.base is not None else dataclasses.replace(spec, base=spec)
        return _finished(_apply(made, params), spec.origin)
    if not isinstance(spec, str):
        raise UserError(f"{quoted(spec)} is not a policy; give a name such as 'snapkv:window=64'")
    name, pairs = _split(spec)
    if ".py:" in name:
        made, origin = as_policy(registry.load_file(name), name), registry.file_digest(name)
    else:
        made = as_policy(registry.get(registry.POLICIES, name), name)
        origin = registry.origin(registry.POLICIES, name)
    return _finished(_apply(made, {**pairs, **params}), origin)


def _finished(p: Policy, origin: str) -> Policy:
    """A copy of a policy that knows its canonical spelling and its origin."""
    p = dataclasses.replace(p)
    object.__setattr__(p, "spelling", canonical(p))
    object.__setattr__(p, "origin", origin)
    return p


def as_policy(obj: object, name: str) -> Policy:
    """Make a policy from what a plugin defines: a `Policy`, a `Score` or a function of a `View`.

    Args:
        obj: What the entry point or the name in the file refers to. A `Score` can be a class.
        name: How the user named it; a policy from a file keeps the spelling of the file.

    Raises:
        UserError: It is none of these.
    """
    if isinstance(obj, type) and issubclass(obj, Score):
        obj = obj()
    elif inspect.isfunction(obj):
        obj = FunctionScore.of(obj)
    if isinstance(obj, Score):
        doc = inspect.getdoc(obj.function if isinstance(obj, FunctionScore) else obj) or ""
        summary = doc.strip().split("\n")[0]
        obj = Policy(name=name, score=obj, allocate=Uniform(), select=TopK(), summary=summary)
    if not isinstance(obj, Policy):
        raise UserError(
            f"{name} is {type(obj).__name__}, not a policy; define a Policy, a Score or a function "
            "of a View"
        )
    if ".py:" in name or obj.name not in registry.names(registry.POLICIES):
        obj = dataclasses.replace(obj, name=name)
    return dataclasses.replace(obj, base=obj)


def part(kind: str, name: str) -> Part:
    """Make a part by its kind (`score`, `allocate`, ...) and name, with its defaults.

    Raises:
        UserError: There is no such part; the message names the nearest.
    """
    generic = _GENERIC.get(f"{kind}.{name}")
    if generic is not None:
        return generic()
    prefix = f"{kind}."
    known = [n.removeprefix(prefix) for n in registry.names(registry.PARTS) if n.startswith(prefix)]
    if name not in known:
        known += [n.removeprefix(prefix) for n in _GENERIC if n.startswith(prefix)]
        listed = f"known: {', '.join(sorted(known))}" if known else "none is installed"
        raise UserError(f"unknown part {kind}={name}{nearest(name, known)} ({listed})")
    made = registry.get(registry.PARTS, prefix + name)
    instance = made() if isinstance(made, type) else made
    if not isinstance(instance, KINDS[kind]):
        raise UserError(f"{kind}={name} is not a {KINDS[kind].__name__}")
    return instance


def exchanged_parts(p: Policy) -> dict[str, Part | None]:
    """The parts of a policy, by kind, that are of another type than those of its base."""
    base = p.base if p.base is not None else p
    return {
        kind: getattr(p, kind)
        for kind in KINDS
        if type(getattr(p, kind)) is not type(getattr(base, kind))
    }


def canonical(p: Policy) -> str:
    """Spell a policy in its only canonical way: what differs from its base, sorted."""
    base = p.base if p.base is not None else p
    exchanged = exchanged_parts(p)
    text = [p.name]
    text += [f"{kind}={_label(piece)}" for kind, piece in exchanged.items()]
    # By key and kind: the value, and whether it differs from the default.
    values: dict[str, dict[str, tuple[Any, bool]]] = {}
    for kind in KINDS:
        piece, default = getattr(p, kind), getattr(base, kind)
        if kind in exchanged and piece is not None:
            # A part without a registered name has no defaults to compare with.
            default = part(kind, piece.name) if piece.name else piece
        if piece is None or default is None:
            continue
        defaults = default.parameters()
        for key, value in piece.parameters().items():
            values.setdefault(key, {})[kind] = (value, value != defaults[key])
    changed: dict[str, Any] = {}
    for key, by_kind in values.items():
        held = [value for value, _ in by_kind.values()]
        if not any(differs for _, differs in by_kind.values()):
            continue
        if all(type(v) is type(held[0]) and v == held[0] for v in held):
            changed[key] = held[0]
        else:  # parts share the key with different values: spell each part's own
            changed |= {f"{kind}.{key}": v for kind, (v, differs) in by_kind.items() if differs}
    for key in _OF_POLICY:
        if getattr(p, key) != getattr(base, key):
            changed[key] = getattr(p, key)
    return ":".join(text + [f"{k}={spell(changed[k])}" for k in sorted(changed)])


def _label(piece: Part | None) -> str:
    return "none" if piece is None else piece.name or type(piece).__name__


def _split(spec: str) -> tuple[str, dict[str, str]]:
    fields = spec.strip().split(":")
    start = 1
    if fields[0].endswith(".py"):
        if len(fields) < 2 or "=" in fields[1]:
            raise UserError(f"{spec}: name an object in the file, such as {fields[0]}:MyPolicy")
        start = 2
    pairs: dict[str, str] = {}
    for item in fields[start:]:
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise UserError(f"{spec}: {quoted(item)} is not key=value; write snapkv:window=64")
        if key in pairs:
            raise UserError(f"{spec}: {key} is given twice")
        pairs[key] = value
    return ":".join(fields[:start]), pairs


def _apply(p: Policy, params: dict[str, Any]) -> Policy:
    given = dict(params)
    changes: dict[str, Any] = {}
    for kind in KINDS:
        if kind in given:
            name = given.pop(kind)
            if kind == "read" and p.read is None:
                raise UserError(
                    f"{p.name} reads all that it holds; only a policy with a reader takes read="
                )
            if kind != "read" and not p.evicts:
                raise UserError(f"{p.name} keeps everything and has no {kind}")
            none = kind == "merge" and name in (None, "none")
            current = getattr(p, kind)
            if none:
                changes[kind] = None
            elif isinstance(name, Part):
                changes[kind] = name
            elif current is None or current.name != name:
                changes[kind] = part(kind, str(name))
    if "buffer" in given and not p.evicts:
        raise UserError(f"{p.name} keeps everything and has no buffer")
    for key, kind in _OF_POLICY.items():
        if key in given:
            changes[key] = _cast(key, given.pop(key), kind)
    p = dataclasses.replace(p, **changes)
    _check_own(p, changes)
    known: set[str] = {*_OF_POLICY, *KINDS}
    for kind in KINDS:
        piece = getattr(p, kind)
        if piece is None:
            continue
        names = piece.parameter_types()
        known |= set(names) | {f"{kind}.{name}" for name in names}
        plain = {k: v for k, v in given.items() if k in names}
        own = {k.removeprefix(f"{kind}."): v for k, v in given.items() if k.startswith(f"{kind}.")}
        mine = {k: v for k, v in {**plain, **own}.items() if k in names}
        if mine:
            exchanged: dict[str, Any] = {kind: _replaced(p, kind, piece, mine)}
            p = dataclasses.replace(p, **exchanged)
    for key in given:
        if key not in known:
            listed = ", ".join(sorted(k for k in known if "." not in k))
            if key == "seed":
                raise UserError("noise uses the seed of the run; use --seed")
            raise UserError(
                f"{p.name} has no parameter {quoted(key)}{nearest(key, known)} (it has: {listed})"
            )
    return p


def _check_own(p: Policy, changes: dict[str, Any]) -> None:
    """Check the ranges of what a policy has besides its parts."""
    if p.buffer < 0:
        raise UserError("buffer must be a number of entries, 0 or more")
    if p.group_size < 1 or p.residual < 0:
        raise UserError("group_size must be 1 or more entries, residual 0 or more")
    if not 0 < p.key_channels <= 1:
        raise UserError("key_channels must be a share of the channels, such as 0.6, and at most 1")
    if p.read is not None and p.key_channels < 1:
        raise UserError(f"{p.name} rates blocks by whole keys; leave key_channels out")
    if "group_size" in changes and p.bits is None:
        raise UserError("group_size belongs to a quantised cache; give bits=4 as well")
    if "quantizer" in changes and p.bits is None:
        raise UserError("quantizer belongs to a quantised cache; give bits=4 as well")
    if p.quantizer == "quanto" and p.bits == 8:
        raise UserError("quanto has no groups of 8-bit codes; use bits=4, or quantizer=hqq")
    if "residual" in changes and not p.recodes:
        raise UserError(
            "residual belongs to quantised caches and pruned keys; give bits=4 as well, or "
            "key_channels=0.6"
        )


def _replaced(p: Policy, kind: str, piece: Part, given: dict[str, Any]) -> Part:
    """Give a part other parameters.

    Raises:
        UserError: A value does not fit. If other parts have the same key, the message names them.
    """
    names = piece.parameter_types()
    try:
        return piece.replace(**{k: _cast(k, v, names[k]) for k, v in given.items()})
    except UserError as error:
        for key in given:
            others = [
                k
                for k in KINDS
                if (o := getattr(p, k)) is not None and k != kind and key in o.parameter_types()
            ]
            if others and f"{key}=" in str(error):
                ways = " or ".join(f"{k}.{key}=" for k in (kind, *others))
                raise UserError(
                    f"{error} ({kind} and {', '.join(others)} have this parameter; use {ways})"
                ) from None
        raise


def _cast(key: str, value: Any, kind: Any) -> Any:
    options = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        value = {str(option): option for option in options}.get(str(value), value)
        if value not in options:
            raise UserError(f"{key}={value}: choose from {', '.join(map(str, options))}")
        return value
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if value in (None, "none"):
            return None
        return _cast(key, value, next(o for o in options if o is not type(None)))
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        found = kind(value)
    except (KeyError, TypeError, ValueError):
        word = {bool: "true or false", int: "a whole number", float: "a number"}.get(
            kind, str(kind)
        )
        raise UserError(f"{key}={value} is not {word}") from None
    if kind is int and abs(found) > _LARGEST:
        raise UserError(f"{key}={value} is too large; the limit is {_LARGEST}")
    return found


def spell(value: Any) -> str:
    """Spell the value of a parameter."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
