"""What a reader must know before comparing the scores of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbench.judge.base import LocalJudge
from kvbench.report.equal import equal_rows, labels, without_room
from kvbench.report.frames import Results, judged, readers, silent_tasks, uncompared
from kvbench.report.panel import MARK
from kvbench.report.table import Name, Phrase
from kvbench.report.text import REFERENCE_MODEL, REFERENCE_NOTE, listed

_MOST_TASKS = 40


def remarks(results: Results) -> Iterator[Phrase]:
    """Remarks on the model, the judges, missing references and tasks that tell nothing apart."""
    cells = results.cells
    if (cells["model_id"] == REFERENCE_MODEL).any():
        yield REFERENCE_NOTE
    for origin, tasks in judged(cells).items():
        judge: Phrase = ("the judge ", Name(origin))
        if origin == LocalJudge.origin:
            judge = (
                "the local judge, which only counts shared words: do not compare these scores "
                "with those of a model"
            )
        yield (_names(tasks), ": scored by ", judge, ".")
    for names, places in equal_rows(results).items():
        yield (
            _names(names), f" are equal at {listed(labels(results, places), 40)}: they gave the "
            "same response to every question and held as many entries. These rows are one result, "
            "not several.",
        )  # fmt: skip
    small = without_room(results)
    if small:
        said = ((name, listed(labels(results, at), 40)) for (name,), at in small.items())
        each = [(Name(name), f" at {budgets}") for name, budgets in said]
        yield (
            "Sinks and windows of a fixed size fill the budget of ",
            *((", " if i else "", one) for i, one in enumerate(each)),
            ", so that nothing else decides what is kept. Choose smaller ones there.",
        )  # fmt: skip
    few = readers(cells)
    if few:
        yield (
            _names(few), " free no memory: the whole cache is held, and the budget is what a "
            "decode step reads of it (KV read).",
        )  # fmt: skip
    lost = uncompared(cells)
    if lost:
        everywhere = len(lost) == cells["task"].nunique()
        where: Phrase = "" if everywhere else (" on ", _names(lost))
        yield (
            "There is no full cache to compare with", where, ": it was not run, or it failed. "
            "Differences to it are unknown, and so is whether a task tells policies apart. "
            "Run again without ", Name("--no-full"), " to add it.",
        )  # fmt: skip
    silent = silent_tasks(cells)
    if silent:
        yield (
            "The full cache is not above chance on ", _names(silent), f" (marked {MARK}), so "
            "differences between policies there mean nothing. Means and statements leave these "
            "tasks out.",
        )  # fmt: skip


def _names(names: Sequence[str]) -> Phrase:
    """Names with commas; a long list is cut and says how many are left out."""
    parts: list[Phrase] = []
    for name in names[:_MOST_TASKS]:
        parts += [", "] * bool(parts) + [Name(name)]
    more = len(names) - _MOST_TASKS
    return (*parts, f" and {more} more" if more > 0 else "")
