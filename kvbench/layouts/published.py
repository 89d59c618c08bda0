"""Published tables whose layout runs can fill, and what kvbench has of what they show."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvbench.errors import unknown
from kvbench.harness import catalogue
from kvbench.layouts.measures import Source, Weights
from kvbench.published.figures import SCORES, Figure, PublishedTable, papers

_TABLES = {
    "criticalkv": "1 2",
    "dbtrimkv": "2 3 6 7 8",
    "trimkv": "1 3 5 7 8 9",
    "d2o": "1 3 18 21",
}

_TIMES = ("tokens/s", "s", "TTFT s", "speed-up")
"""Metrics of speed at a fixed batch, which a run of tasks does not measure."""
_ANSWERS = (*SCORES, "judge")
"""Metrics that a task can have."""
_PARTS = {
    "LongMemEval-S Multi": Source("longmemeval_s", "question_type", "multi-session"),
    "LongMemEval-S Knowledge": Source("longmemeval_s", "question_type", "knowledge-update"),
    "LongMemEval-S SS-User": Source("longmemeval_s", "question_type", "single-session-user"),
    "LongMemEval-S SS-Pref": Source("longmemeval_s", "question_type", "single-session-preference"),
    "LongMemEval-S SS-Assist": Source("longmemeval_s", "question_type", "single-session-assistant"),
    "LongMemEval-S Temporal": Source("longmemeval_s", "question_type", "temporal-reasoning"),
    "Acc. Short": Source("longbench_v2", "length", "short"),
    "Acc. Medium": Source("longbench_v2", "length", "medium"),
    "Acc. Easy": Source("longbench_v2", "difficulty", "easy"),
    "Acc. Hard": Source("longbench_v2", "difficulty", "hard"),
}
"""Published datasets that are parts of a task."""

LENGTHS = {"L=50k": (50_000, 51_200), "L=100k": (100_000, 102_400)}
"""Settings that are lengths, and the lengths of a run that are meant."""


@dataclass(frozen=True)
class PublishedLayout:
    """A published table that runs can be laid out like.

    Attributes:
        paper: Name of its paper.
        table: The table.
    """

    paper: str
    table: PublishedTable

    @property
    def name(self) -> str:
        """What the command line calls it."""
        return f"{self.paper}-{self.table.number}"

    @property
    def figures(self) -> list[Figure]:
        """The figures of the model with most of them, without rows that the paper copied.

        Tables repeat the same rows for every model, so one model's stand for all.
        """
        own = [f for f in self.table.figures if not f.method.endswith("*")]
        models = list(dict.fromkeys(f.model for f in own))
        most = max(models, key=lambda model: sum(f.model == model for f in own))
        return [f for f in own if f.model == most]

    @property
    def lacking(self) -> str:
        """Why nothing of the table can be filled from kvbench's own tasks, or an empty string."""
        if any(task_weights(f, ()) for f in self.figures):
            return ""
        times = [f for f in self.figures if f.metric in _TIMES]
        if times:
            names = ", ".join(dict.fromkeys(f.column for f in times))
            return f"it needs {names} at fixed batches and lengths, which a run does not measure"
        names = ", ".join(datasets(self.figures))
        return f"kvbench has no task for {names}"


def published_layouts() -> dict[str, PublishedLayout]:
    """All layouts of published tables, by name."""
    found = [
        PublishedLayout(name, papers()[name].table(number))
        for name, numbers in _TABLES.items()
        for number in numbers.split()
    ]
    return {one.name: one for one in found}


def published_layout(name: str) -> PublishedLayout:
    """A layout by name.

    Raises:
        UserError: There is none of that name; the nearest names are given.
    """
    if name not in published_layouts():
        raise unknown("layout", name, published_layouts(), "kvbench list layouts")
    return published_layouts()[name]


def task_weights(figure: Figure, more: Collection[str]) -> Weights:
    """The mean of tasks that a figure is the score of; empty if there are no such tasks.

    Args:
        figure: The figure.
        more: Tasks that there are beside those of the installed benchmarks.
    """
    sets = catalogue.task_sets()
    if figure.metric not in _ANSWERS:
        return ()
    if not figure.task and figure.dataset in _PARTS:
        return ((_PARTS[figure.dataset], 1.0),)
    known = figure.task in more or any(figure.task in leaves for leaves in sets.values())
    if not figure.task or not (known or figure.task in sets):
        return ()
    leaves = sets.get(figure.task, (figure.task,))
    return tuple((Source(leaf), 1 / len(leaves)) for leaf in leaves)


def datasets(figures: Iterable[Figure]) -> list[str]:
    """What figures are scores of, as the paper calls it."""
    return list(dict.fromkeys(f.dataset for f in figures if f.metric in _ANSWERS))
