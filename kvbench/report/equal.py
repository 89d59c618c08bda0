"""Rows of a report that are one result: equal to another row, or with no room for a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from kvbench.budget import Budget
from kvbench.errors import UserError
from kvbench.report.frames import Results
from kvbench.report.samples import Samples
from kvbench.report.text import tokens

_LEAST = 5
"""Fewest responses, unlike those of the full cache, that show that two policies are equal: any two
that lose nothing answer alike."""


class Place(NamedTuple):
    """A setting in which policies are compared."""

    model: str
    length: int
    seed: int
    moment: str
    budget: str


_SETTING = list(Place._fields)

Places = dict[tuple[str, ...], list[Place]]
"""Policies, and where something holds of them."""


def equal_rows(results: Results) -> Places:
    """Policies that gave the same responses and held as many entries, on all tasks of a setting.

    Kept sets are not recorded. Equal responses show equal sets where enough of them differ from
    those of the full cache; without a full cache nothing is claimed.
    """
    cells, samples = results.cells[results.cells["status"] == "ok"], results.samples
    found: Places = {}
    if samples is None:
        return found
    is_full = cells["policy"] == "full"
    full = cells[is_full].set_index(["model", "task", "length", "seed"])["cell"].to_dict()
    for setting, part in cells[~is_full].groupby(_SETTING, sort=False):
        alike: dict[tuple[tuple[str, bytes], ...], list[str]] = {}
        for name, own in part.sort_values("task").groupby("policy", sort=False):
            told = (samples.told(cell) for cell in own["cell"])
            key = tuple((t, x.tobytes()) for t, x in zip(own["task"], told, strict=True))
            alike.setdefault(key, []).append(str(name))
        for names in (names for names in alike.values() if len(names) > 1):
            place, mine = _place(setting), part[part["policy"] == names[0]]
            unlike = sum(
                _unlike(samples, cell, full.get((place.model, task, place.length, place.seed)))
                for task, cell in zip(mine["task"], mine["cell"], strict=True)
            )
            if unlike >= _LEAST:
                found.setdefault(tuple(sorted(names)), []).append(place)
    return found


def _unlike(samples: Samples, cell: str, full: str | None) -> int:
    """Responses of a cell that the full cache gave otherwise; 0 if there is none to compare."""
    mine, whole = samples.told(cell), samples.told(full or "")
    same = len(mine) == len(whole) and np.array_equal(mine[:, 0], whole[:, 0])
    return int((mine[:, 1] != whole[:, 1]).sum()) if same else 0


def without_room(results: Results) -> Places:
    """Policies whose sinks and windows of a fixed size fill the budget of most contexts."""
    cells, found = results.cells[results.cells["status"] == "ok"], Places()
    cells = cells[cells["moment"].isin(["context", "question"]) & (cells["policy"] != "full")]
    if results.samples is None:
        return found
    for (name, *where), part in cells.groupby(["policy", *_SETTING], sort=False):
        reserved = _reserved(str(name))
        samples = results.samples.of(part["cell"])
        lengths = samples["context_tokens"].to_numpy(np.int64)
        place = _place(where)
        if place.moment == "question":
            lengths = lengths + samples["question_tokens"].to_numpy(np.int64)
        budget = Budget.parse(place.budget)
        if any(budget.is_filled(one, lengths.tolist()) for one in reserved):
            found.setdefault((str(name),), []).append(place)
    return found


def _place(values: Iterable[Any]) -> Place:
    """The place of a group of rows."""
    return Place(*values)


def _reserved(name: str) -> list[Callable[[int], int]]:
    """What each part of a policy reserves; nothing if it is not installed here."""
    from kvbench.spelling import policy

    try:
        return [part.reserved for part in policy(name).parts]
    except UserError:
        return []


def labels(results: Results, places: Iterable[Place]) -> list[str]:
    """Budgets, with what else tells the settings of the report apart."""
    compressed = results.cells[results.cells["policy"] != "full"]
    several = [name for name in _SETTING[:-1] if compressed[name].nunique() > 1]
    found = []
    for place in places:
        said = place._asdict() | {"length": tokens(place.length), "seed": f"seed {place.seed}"}
        more = ", ".join(said[name] for name in several)
        found.append(f"{place.budget} ({more})" if more else place.budget)
    return found
