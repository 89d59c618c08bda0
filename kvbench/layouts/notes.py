"""What stands below a filled table: how to read it, what it rests on, what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.layouts.measures import Config, Measures, Source
from kvbench.layouts.slots import Computed, Layout, Measured, Slot
from kvbench.layouts.value import Value
from kvbench.regression import significance
from kvbench.report.frames import judged, silent_tasks
from kvbench.report.numbers import BETTER, DASH, WORSE
from kvbench.report.table import Name, Phrase
from kvbench.report.text import REFERENCE_MODEL, REFERENCE_NOTE, counted, listed, tokens

_MOST = 12
"""A note names at most so many things of one kind."""

Asked = tuple[Config, Source]


@dataclass(frozen=True)
class Tests:
    """The tests of a table.

    Attributes:
        against: What scores were tested against, or an empty string.
        count: How many tests were made.
        alpha: Their level.
        contexts: The most contexts that a test had.
    """

    against: str
    count: int
    alpha: float
    contexts: int


def notes(layout: Layout, measures: Measures, *, ranked: bool, tested: Tests) -> Iterator[Phrase]:
    """The notes of a table.

    Args:
        layout: The layout.
        measures: The runs that fill it.
        ranked: Whether numbers are bold or underlined.
        tested: The tests.
    """
    if ranked:
        yield (
            "Bold: best; underlined: second best of the policies at one budget, without the full "
            "cache."
        )
    if tested.count:
        yield from _marks(tested)
    asked = list(dict.fromkeys(one for slot in layout.slots for one in _asked(slot)))
    there = {one: measures.row(*one) for one in asked}
    done = {one: row for one, row in there.items() if row is not None and row["status"] == "ok"}
    yield from _basis(done, measures)
    yield from layout.notes
    yield from _missing([one for one, row in there.items() if row is None], asked, "not in the run")
    failed = [one for one, row in there.items() if row is not None and row["status"] != "ok"]
    yield from _missing(failed, asked, "failed")
    used = measures.cells[measures.cells["cell"].isin([row["cell"] for row in done.values()])]
    if silent := silent_tasks(used):
        yield (
            f"The full cache is not above chance on {listed(silent, _MOST)}: differences there "
            "mean nothing."
        )
    for judge, tasks in judged(used).items():
        yield (f"{listed(tasks, _MOST)}: scored by the judge ", Name(judge), ".")
    if REFERENCE_MODEL in {config.model for config, _ in done}:
        yield REFERENCE_NOTE


def _marks(tested: Tests) -> Iterator[Phrase]:
    full = tested.against == "full"
    other: Phrase = "the full cache" if full else (Name(tested.against), " at the same budget")
    yield (
        f"{BETTER} or {WORSE}: significantly better or worse than ", other,
        f" (paired permutation test over contexts, p < {tested.alpha:g} after Holm's correction "
        f"for the {counted(tested.count, 'test')} of this table).",
    )  # fmt: skip
    least = significance.least_contexts(tested.alpha / tested.count)
    if tested.contexts < least:
        yield (
            f"No mark is possible with {counted(tested.contexts, 'context')}: at least {least} "
            "would have to differ."
        )


def _asked(slot: Slot) -> Iterator[Asked]:
    """What a slot needs of the runs."""
    if isinstance(slot, Computed):
        for one in slot.of:
            yield from _asked(one)
        return
    assert isinstance(slot, Measured)
    for source, _ in slot.weights:
        yield slot.config, source
        if slot.value not in (Value.SCORE, Value.KV):
            yield slot.config.full, source


def _basis(done: dict[Asked, dict[str, Any]], measures: Measures) -> Iterator[Phrase]:
    """Number of samples, length, moment and seed of what fills a table."""
    if not done:
        return
    counts = [
        len(measures.responses(*one).scores) if one[1].field else int(row["samples"])
        for one, row in done.items()
    ]
    many = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    rows = done.values()
    parts = [f"{many} sample{'s' * (max(counts) != 1)} per task"]
    parts.append(_or(tokens(n) for n in sorted({int(row["length"]) for row in rows})))
    moments = [str(row["moment"]) for row in rows if row["policy"] != "full"]
    if any(moments):
        parts.append(f"compressed at the moment {_or(dict.fromkeys(moments))}")
    seeds = sorted({int(row["seed"]) for row in rows})
    parts.append("seed " + _or(map(str, seeds)))
    yield ", ".join(parts) + "."


def _missing(lost: Sequence[Asked], asked: Sequence[Asked], what: str) -> Iterator[Phrase]:
    """What is missing: whole tasks, whole configurations, and the rest one by one."""
    if not lost:
        return
    models = list(dict.fromkeys(config.model for config, _ in asked))
    for model in models:
        here = {one for one in asked if one[0].model == model}
        gone = [one for one in lost if one[0].model == model]
        if not gone:
            continue
        missing = set(gone)
        tasks = dict.fromkeys(source for _, source in gone)
        whole = [s for s in tasks if {one for one in here if one[1] == s} <= missing]
        rest = [one for one in gone if one[1] not in whole]
        configs = dict.fromkeys(config for config, _ in rest)
        lines = [
            c
            for c in configs
            if {one for one in here if one[0] == c and one[1] not in whole} <= missing
        ]
        lengths = {config.length for config in configs}
        single = [f"{c.label} on {s.label}" for c, s in rest if c not in lines]
        some = [
            listed([s.label for s in whole], _MOST),
            *_by_policy(lines, several=len(lengths) > 1),
            listed(list(dict.fromkeys(single)), _MOST),
        ]
        of: Phrase = (" of ", Name(model)) if len(models) > 1 else ""
        yield (f"{DASH}: {what}", of, f": {'; '.join(filter(None, some))}.")


def _by_policy(configs: Iterable[Config], *, several: bool) -> list[str]:
    """Configurations in a few words, those of the same budgets together.

    Args:
        configs: The configurations.
        several: Whether they differ in length, so that it has to be named.
    """
    budgets: dict[tuple[str, str], list[str]] = {}
    for c in configs:
        where = f" ({tokens(c.length)})" * several
        budgets.setdefault((c.policy, where), []).append(c.budget)
    policies: dict[tuple[str, ...], list[str]] = {}
    for (policy, where), known in budgets.items():
        at = "" if policy == "full" else f" at {' and '.join(known)}"
        policies.setdefault((at, where), []).append(policy)
    return [f"{', '.join(names)}{at}{where}" for (at, where), names in policies.items()]


def _or(names: Iterable[str]) -> str:
    return " or ".join(names)
