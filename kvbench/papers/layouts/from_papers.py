"""Published tables whose layout runs can fill, and the tasks that correspond to their datasets."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kvbench.errors import unknown
from kvbench.harness import catalogue
from kvbench.papers.layouts.measures import ScoreSource, Weights
from kvbench.papers.published.results import SCORES, Figure, PublishedTable, papers

_TABLES = {
    "criticalkv": "1 2 4 7 14",
    "dbtrimkv": "1 2 3 6 7 8",
    "trimkv": "1 3 5 7 8 9",
    "d2o": "1 3 18 21",
}

_TIMES = ("tokens/s", "s", "TTFT s", "speed-up")
"""Speed metrics at a fixed batch size, which a run does not measure."""
_ANSWERS = (*SCORES, "judge")
"""Metrics of tasks."""
_PARTS = {
    "LongMemEval-S Multi": ScoreSource("longmemeval_s", "question_type", "multi-session"),
    "LongMemEval-S Knowledge": ScoreSource("longmemeval_s", "question_type", "knowledge-update"),
    "LongMemEval-S SS-User": ScoreSource("longmemeval_s", "question_type", "single-session-user"),
    "LongMemEval-S SS-Pref": ScoreSource("longmemeval_s", "question_type", "single-session-preference"),
    "LongMemEval-S SS-Assist": ScoreSource("longmemeval_s", "question_type", "single-session-assistant"),
    "LongMemEval-S Temporal": ScoreSource("longmemeval_s", "question_type", "temporal-reasoning"),
    "Acc. Short": ScoreSource("longbench_v2", "length", "short"),
    "Acc. Medium": ScoreSource("longbench_v2", "length", "medium"),
    "Acc. Easy": ScoreSource("longbench_v2", "difficulty", "easy"),
    "Acc. Hard": ScoreSource("longbench_v2", "difficulty", "hard"),
    "MMDU Answer Accuracy": ScoreSource("mmdu", metric="answer_accuracy", is_rating=True),
    "MMDU Creativity": ScoreSource("mmdu", metric="creativity", is_rating=True),
    "MMDU Richness": ScoreSource("mmdu", metric="richness", is_rating=True),
    "MMDU Visual Perception": ScoreSource("mmdu", metric="visual_perception", is_rating=True),
    "MMDU Logical Coherence": ScoreSource("mmdu", metric="logical_coherence", is_rating=True),
    "MMDU Image Relative": ScoreSource("mmdu", metric="image_relationships", is_rating=True),
    "MMDU Overall": ScoreSource("mmdu", is_rating=True),
}
"""Published datasets that are parts of a task, or another metric of it."""

LENGTHS = {"L=50k": (50_000, 51_200), "L=100k": (100_000, 102_400)}
"""Published settings that are lengths, and the corresponding lengths of a run."""


@dataclass(frozen=True)
class PublishedLayout:
    """A published table whose layout runs can fill.

    Attributes:
        paper: Name of the paper.
        table: The table.
    """

    paper: str
    table: PublishedTable

    @property
    def name(self) -> str:
        """Name on the command line."""
        return f"{self.paper}-{self.table.number}"

    @property
    def measured_figures(self) -> list[Figure]:
        """The results of all models, without rows that the paper copied."""
        return [figure for figure in self.table.figures if not figure.method.endswith("*")]

    @property
    def figures(self) -> list[Figure]:
        """The results of the model with the most results, without rows that the paper copied.

        Tables repeat the same rows for every model, so one model represents all.
        """
        measured_figures = self.measured_figures
        model_names = list(dict.fromkeys(figure.model for figure in measured_figures))
        main_model = max(
            model_names,
            key=lambda model_name: sum(figure.model == model_name for figure in measured_figures),
        )
        return [figure for figure in measured_figures if figure.model == main_model]

    @property
    def lacking(self) -> str:
        """Why kvbench's own tasks cannot fill any of the table, or an empty string."""
        if any(task_weights(figure, ()) for figure in self.figures):
            return ""
        speed_figures = [figure for figure in self.figures if figure.metric in _TIMES]
        if speed_figures:
            name_list = ", ".join(dict.fromkeys(figure.column for figure in speed_figures))
            return f"it needs {name_list} at fixed batches and lengths, which a run does not measure"
        name_list = ", ".join(datasets(self.figures))
        return f"kvbench has no task for {name_list}"


def published_layouts() -> dict[str, PublishedLayout]:
    """Return all layouts of published tables, by name."""
    layouts = [
        PublishedLayout(paper_name, papers()[paper_name].table(table_number))
        for paper_name, table_numbers in _TABLES.items()
        for table_number in table_numbers.split()
    ]
    return {layout.name: layout for layout in layouts}


def published_layout(layout_name: str) -> PublishedLayout:
    """Return a layout by name.

    Raises:
        UserError: There is no such layout; the message suggests the closest names.
    """
    if layout_name not in published_layouts():
        raise unknown("layout", layout_name, published_layouts(), "kvbench list layouts")
    return published_layouts()[layout_name]


def task_weights(figure: Figure, extra_tasks: Collection[str]) -> Weights:
    """Return the weighted tasks that correspond to a published result; empty if there are none.

    Args:
        figure: The published result.
        extra_tasks: Further tasks, besides those of the installed benchmarks.
    """
    task_sets = catalogue.task_sets()
    if figure.metric not in _ANSWERS:
        return ()
    if not figure.task and figure.dataset in _PARTS:
        return ((_PARTS[figure.dataset], 1.0),)
    is_known = figure.task in extra_tasks or any(figure.task in task_names for task_names in task_sets.values())
    if not figure.task or not (is_known or figure.task in task_sets):
        return ()
    task_names = task_sets.get(figure.task, (figure.task,))
    return tuple((ScoreSource(task_name), 1 / len(task_names)) for task_name in task_names)


def datasets(figures: Iterable[Figure]) -> list[str]:
    """Return the datasets of published scores, in the paper's words."""
    return list(dict.fromkeys(figure.dataset for figure in figures if figure.metric in _ANSWERS))
