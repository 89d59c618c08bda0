"""Writes docs/policies.md from the policies themselves: `python docs/make_policies.py [--check]`.

Names, parts and defaults come from the registered policies, meanings from the docstrings of their
parts. With `--check` nothing is written, and the exit status is 1 if the page is out of date. The
page lists only what kvbench itself registers.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvbench import registry
from kvbench.parts import TopK, Uniform
from kvbench.plugin import Allocator, Moment, Need, Part, Policy, Score
from kvbench.spelling import KINDS, part, policy, spell

PAGE = Path(__file__).parent / "policies.md"
TITLES = {
    "score": "Scores",
    "allocate": "Allocators",
    "select": "Selectors",
    "merge": "Mergers",
    "read": "Readers",
}
ROLES = {
    "score": "How much an entry is worth.",
    "allocate": "How the budget spreads over layers and KV heads.",
    "select": "Which entries fill a head's share.",
    "merge": "What happens to the evicted entries; without a merger they are dropped.",
    "read": "Which entries a query reads of a cache from which nothing is evicted.",
}
HEAD = """\
<!-- Made by `python docs/make_policies.py`. Do not edit. -->

# Policies

Every policy that ships with kvbench, from its own metadata. A policy is a choice of parts, and any
score can be combined with any allocator, selector and merger:

    kvbench run --policy keydiff:allocate=head_adaptive,h2o:select=two_stage:first_stage=0.7

Parameters are written `NAME:key=value`. A parameter that two parts share (`window`) is set for
both. Every policy keeps exactly `N = L * H * b` entries of a sequence, including its sinks, windows
and floors. If these do not fit a head's share, they give way in this order: what a first stage
chose, the oldest tokens of the window, the last sinks, position 0, and the newest token last.

If you know a method by its name in kvpress, see [from-kvpress.md](from-kvpress.md).

Symbols: `L` layers, `H` KV heads, `H_q` query heads, `G = H_q / H`, `T` context tokens, `d` head
dim, `d_model` hidden size, `b` mean entries kept per (layer, KV head), `w` window, `A` softmax
attention, `W_O` output projection. Keys are as cached, after RoPE. Costs are per cut, for one layer
of one sequence; ranking the entries adds `O(H T log T)`.

**Moments** are those for which the policy's paper defines it; every policy runs at all of them, except
`oracle` and those that prune images (`context` and `question`):
`context` (the context is compressed before the question is seen), `question` (context and question
are compressed together), `decode` (the budget holds during generation), `chunked` (the
prompt comes in chunks, and after each the cache is cut back to its share of the whole prompt;
`kvbench.attach` does not know the whole prompt and takes an absolute budget), `turns` (before every
new turn of a dialogue).

**Policies that read few entries.** `quest` and `seerattn_r` evict nothing: their part is a reader
(`read=`), and the budget is what every query reads, from the question on at moment `context` and
from the first token of the answer at `question`. With a budget of `b`, a query reads exactly `b`
entries of every (layer, KV head), or all if there are fewer: first the block of the newest entry,
then the blocks that the reader rates best. Of the block in which the budget ends it reads the
newest entries, so that a budget need not be a multiple of the block size. `kv_bytes_live` counts
all entries and the summaries that a reader keeps of complete blocks; `kv_bytes_read` counts the
entries that a decode step reads, and all summaries. A share of the context stays what it is while
the answer grows, as the papers' token budgets do. At `turns` every turn after the first reads its
share of the tokens seen before it. Both papers read everything during the prefill: their moment is
`question`. With `dense_layers=2` queries read everything in the first two layers, as Quest's
authors have it. Theirs come on top of the budget; here the other layers pay for them, so that a
query reads no more in all than without. A budget that leaves the others less than an entry per head
is refused: the cell fails, and says which budget is enough.

**Quantised caches.** `bits=2`, `bits=4` and `bits=8` quantise what a policy keeps, as soon as it is
kept: `full:bits=4` is the whole cache in 4 bits, `snapkv:bits=4` eviction and quantisation
together. The layout is that of KIVI (arXiv 2402.02750): keys per channel, in groups of
`group_size=32` neighbouring entries of a head; values per entry, in groups of `group_size`
channels; codes are `round((x - min) / scale)` with `scale = (max - min) / (2^bits - 1)` of a group.
At least the newest `residual=32` entries of a head stay as they are, and so does what does not fill
a group. The prefill itself sees exact keys and values, later tokens see decoded ones. A later cut
decodes what it keeps and quantises it anew. Packed codes are what is stored: `kv_bytes_live` counts
codes, scales, zeros and exact entries. Scales and zeros have the cache's dtype, so compare bytes of
runs with one `--dtype`: at float32 the full cache is twice as large as at bfloat16, and codes are
not. KIVI itself leaves up to one residual of keys exact, and exactly one of values.

`quantizer=hqq` and `quantizer=quanto` let these libraries make the codes of the same blocks, with
the same residual and the same count of bytes (`pip install 'kvbench[quantizers]'`). hqq moves each
zero to lower the error of a block: `(code - zero) * scale`, computed and stored in the cache's
dtype. Its solver stops by the mean error of all that it is given, so kvbench gives it `group_size`
entries of one head at a time: what a head holds does not depend on its batch, but quantising 512
tokens of smollm2 takes about 2 s on a CPU. optimum-quanto has the steps of the default,
`quantizer=kivi`, and computes them in the cache's dtype; it has no `bits=8`. A cell records the
version of the library.

**Pruned keys.** `key_channels=0.6` keeps 60% of the channels of every head's keys, rounded up, as
ThinK does (arXiv 2407.21018): `full:key_channels=0.6` is ThinK alone, `snapkv:key_channels=0.6`
evicts and then prunes what stays. Entries and budgets are those without it; the bytes of an entry
fall, here to about 80%. Channel `c` is worth `||Q[:, c] K[:, c]^T||_F`, with `K` the held keys
and `Q` the last 32 queries of all query heads of a KV head; each KV head keeps its own channels,
and an index of one byte per channel is counted in `kv_bytes_live`. They are chosen once, at the
first cut. As in the authors' code, the newest `residual=32` keys of a head stay whole, and so do
all that come later, until the next cut. Together with `bits=`, keys lose channels and are
quantised when they leave the residual, as in the authors' version for KIVI. Their code repeats
the keys of grouped queries and prunes each query head on its own; here, as in kvpress, a KV head
is pruned once.

**`variant=release`** follows the authors' released code where it differs from the paper. A part
whose results have changed since its first release has a version above 1, which is part of a cell's
hash: stored responses of the earlier version are not reused.
"""


def own(group: str) -> list[str]:
    """Names that kvbench itself registers."""
    return [n for n in registry.names(group) if registry.origin(group, n).startswith("kvbench==")]


def parts(kind: str) -> dict[str, Part]:
    """Every part of a kind with its defaults, by name; the generic one first."""
    generic = {"allocate": Uniform, "select": TopK}
    found = [n.partition(".")[2] for n in own(registry.PARTS) if n.startswith(f"{kind}.")]
    first = [generic[kind].name] if kind in generic else []
    return {name: part(kind, name) for name in [*first, *sorted(found)]}


# --- docstrings -----------------------------------------------------------------------------------


def sections(cls: type) -> tuple[str, dict[str, str]]:
    """A class' docstring without its `Attributes:`, and the attributes by name, one line each."""
    text = inspect.cleandoc(cls.__doc__ or "")
    body, _, rest = text.partition("\nAttributes:\n")
    attributes: dict[str, list[str]] = {}
    name = ""
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        match = re.match(r"    (\w+(?:, \w+)*): (.*)", line)
        if match:
            name = match[1]
            attributes[name] = [match[2]]
        elif name and line.strip():
            attributes[name].append(line.strip())
    named = {n: " ".join(lines) for names, lines in attributes.items() for n in names.split(", ")}
    return body.strip(), named


def meanings(of: Part) -> dict[str, str]:
    """Meanings of a part's parameters, including those of its base classes."""
    found: dict[str, str] = {}
    for cls in reversed(type(of).__mro__):
        found |= sections(cls)[1]
    for name, text in found.items():
        if see := re.fullmatch(r"See `(?:\w+\.)?(\w+)`\.", text):
            known = {type(p).__name__: p for kind in KINDS for p in parts(kind).values()}
            found[name] = meanings(known[see[1]])[name]
    return {name: found.get(name, "") for name in of.parameters()}


def kind_of(annotation: Any) -> str:
    """Values that a parameter accepts."""
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return ", ".join(f"`{o}`" for o in options)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join("`none`" if o is type(None) else kind_of(o) for o in options)
    words = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text"}
    return words.get(annotation, str(annotation))


def needs(of: Part | Policy) -> str:
    """What the engine observes for a part or policy."""
    return ", ".join(f"`{text}`" for text in sorted(map(need, of.needs)))


def need(of: Need) -> str:
    """A need such as `Queries(window=32)`, with the fields that differ from their defaults."""
    given = [
        f"{f.name}={getattr(of, f.name)}"
        for f in dataclasses.fields(of)
        if getattr(of, f.name) != f.default or f.name == "window"
    ]
    return f"{type(of).__name__}({', '.join(given)})"


# --- the page -------------------------------------------------------------------------------------


def cell(text: str) -> str:
    """Text escaped for a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A Markdown table."""
    titles = list(head)
    yield "| " + " | ".join(titles) + " |"
    yield "| " + " | ".join("---" for _ in titles) + " |"
    for row in rows:
        yield "| " + " | ".join(cell(text) for text in row) + " |"
    yield ""


def aliases() -> dict[str, list[str]]:
    """Registered names by the name of their policy, the policy's own name first."""
    found: dict[str, list[str]] = {}
    for name in own(registry.POLICIES):
        found.setdefault(policy(name).name, []).append(name)
    return {name: sorted(names, key=lambda n: n != name) for name, names in found.items()}


def chosen(of: Policy) -> dict[str, Part]:
    """The parts of a policy by kind."""
    if not of.has_budget:
        return {}
    kinds = KINDS if of.evicts else ("read",)
    found = {kind: getattr(of, kind) for kind in kinds}
    return {kind: piece for kind, piece in found.items() if piece is not None}


def links(of: Policy) -> str:
    """The parts of a policy, each with a link to its section."""
    return ", ".join(f"[`{p.name}`](#{anchor(kind, p)})" for kind, p in chosen(of).items()) or "-"


def anchor(kind: str, of: Part) -> str:
    """The anchor that GitHub gives a part's heading."""
    return f"{kind}{of.name}"


def parameters(by_kind: dict[str, Part]) -> Iterator[str]:
    """The parameters of parts as a table; several parts add a column with the part."""
    head = ["parameter", "default", "values", "meaning"]
    rows = [
        [f"`{name}`", f"`{spell(value)}`", kind_of(piece.parameter_types()[name]), meaning, of]
        for of, piece in by_kind.items()
        for (name, value), meaning in zip(piece.parameters().items(), meanings(piece).values(), strict=True)
    ]
    if rows and len(by_kind) > 1:
        yield from table([*head[:3], "part", head[3]], ([*r[:3], r[4], r[3]] for r in rows))
    elif rows:
        yield from table(head, (r[:4] for r in rows))


def overview(names: dict[str, list[str]]) -> Iterator[str]:
    """A row per policy."""
    yield "## Overview\n"
    rows = []
    for name in names:
        of = policy(name)
        rows.append((f"[`{name}`](#{name})", of.summary, links(of), ", ".join(of.moments), of.paper or "-"))
    yield from table(("policy", "what it keeps", "parts", "moments", "paper"), rows)


def one_policy(names: list[str]) -> Iterator[str]:
    """The section of a policy."""
    of = policy(names[0])
    yield f"### {names[0]}\n"
    yield f"{of.summary[:1].upper()}{of.summary[1:]}.\n"
    if len(names) > 1:
        yield f"- also called: {', '.join(f'`{n}`' for n in names[1:])}"
    if of.paper:
        yield f"- paper: {of.paper}"
    yield f"- parts: {links(of)}"
    yield f"- moments: {', '.join(of.moments)}"
    yield f"- observes: {needs(of) or 'only keys and values'}"
    yield f"- cost: {of.cost or 'nothing'}"
    if "decode" in of.moments:
        yield f"- `buffer={of.buffer}`: entries per head beyond the budget before a cut at decode"
    yield ""
    yield from parameters(chosen(of))


def one_part(kind: str, name: str, of: Part) -> Iterator[str]:
    """The section of a part."""
    yield f"### {kind}={name}\n"
    yield f"{sections(type(of))[0]}\n"
    facts = []
    if of.version > 1:
        facts.append(f"version: {of.version}")
    if isinstance(of, Allocator):
        facts.append(f"works on: {'the whole model' if of.scope == 'model' else 'one ' + of.scope}")
    if of.needs:
        facts.append(f"observes: {needs(of)}")
    if isinstance(of, Score) and of.extras:
        facts.append(f"stores with every entry: {', '.join(f'`{n}`' for n in of.extras)}")
    yield from (f"- {fact}" for fact in facts)
    if facts:
        yield ""
    yield from parameters({kind: of})


def page() -> str:
    """The whole page."""
    names = aliases()
    lines = [HEAD, *overview(names), "## The policies\n"]
    for of in names.values():
        lines += one_policy(of)
    observed: dict[str, type[Need]] = {}
    for kind in KINDS:
        lines += [f"## {TITLES[kind]}\n", f"{ROLES[kind]}\n"]
        for name, of in parts(kind).items():
            observed |= {type(n).__name__: type(n) for n in of.needs}
            lines += one_part(kind, name, of)
    lines.append("## What is observed\n")
    for name in sorted(observed):
        lines += [f"- `{name}`: {first_paragraph(observed[name])}"]
    return "\n".join(lines).rstrip() + "\n"


def first_paragraph(cls: type) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join(sections(cls)[0].split("\n\n")[0].split())


def gaps() -> list[str]:
    """Gaps in the metadata, one line each."""
    missing: list[str] = []
    for name in aliases():
        of = policy(name)
        missing += [f"{name}: no {f}" for f in ("summary", "cost") if not getattr(of, f)]
        unknown = set(of.moments) - set(typing.get_args(Moment))
        missing += [f"{name}: no moment {m}" for m in sorted(unknown)]
    for kind in KINDS:
        for name, of in parts(kind).items():
            missing += [f"{kind}={name}: {k} has no meaning" for k, v in meanings(of).items() if not v]
    return missing


def main(arguments: list[str]) -> int:
    """Write the page, or check that it is up to date."""
    missing = gaps()
    for line in missing:
        print(line)
    if missing:
        return 1
    text = page()
    if "--check" in arguments:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print("docs/policies.md is out of date; run python docs/make_policies.py")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
