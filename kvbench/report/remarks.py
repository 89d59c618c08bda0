"""Remarks to read before comparing the scores of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvbench.judge.base import LocalJudge
from kvbench.report.equal import equal_rows, labels, without_room
from kvbench.report.frames import Results, judged, readers, tasks_at_chance, unaveraged_tasks, uncompared
from kvbench.report.last_queries import LowBeforeQuestion, low_before_question
from kvbench.report.panel import MARK
from kvbench.runs.schema import FIDELITY
from kvbench.tables.numbers import NumberFormat, number
from kvbench.tables.table import Name, Phrase
from kvbench.tables.text import REFERENCE_MODEL, REFERENCE_NOTE, listed

_MOST_TASKS = 40
_MADE_WITH = {"dtype": "data types", "device": "devices", "attention": "attention implementations"}
"""What cells of one model can differ in without being other cells, and how it is called."""


def remarks(results: Results) -> Iterator[Phrase]:
    """Yield remarks on the model, the judges, missing references and uninformative tasks."""
    cells = results.cells
    if (cells["model_id"] == REFERENCE_MODEL).any():
        yield REFERENCE_NOTE
    for model, model_cells in cells.groupby("model", sort=False):
        for column, what in _MADE_WITH.items():
            if len(values := list(dict.fromkeys(model_cells[column].astype(str)))) > 1:
                yield (
                    "The rows of ", Name(str(model)), f" have different {what}: {listed(values)}. Bytes and scores may "
                    "differ for that alone.",
                )  # fmt: skip
    for judge_origin, task_names in judged(cells).items():
        judge_phrase: Phrase = ("the judge ", Name(judge_origin))
        if judge_origin == LocalJudge.origin:
            judge_phrase = (
                "the local judge, which only counts shared words: do not compare these scores with those of a model"
            )
        yield (_names(task_names), ": scored by ", judge_phrase, ".")
    for policies, places in equal_rows(results).items():
        yield (
            _names(policies), f" are equal at {listed(labels(results, places), 40)}: they gave the same response to "
            "every question and held the same number of entries. These rows are one result, not several.",
        )  # fmt: skip
    low = low_before_question(results)
    if low.policies:
        yield _low(low)
    full_budgets = without_room(results)
    if full_budgets:
        policy_budgets = (
            (policy_name, listed(labels(results, policy_places), 40))
            for (policy_name,), policy_places in full_budgets.items()
        )
        phrases = [(Name(policy_name), f" at {budgets}") for policy_name, budgets in policy_budgets]
        yield (
            "Fixed-size sinks and windows fill the budget of ",
            *((", " if index else "", phrase) for index, phrase in enumerate(phrases)),
            ", so that they alone determine what is kept. Use smaller ones.",
        )  # fmt: skip
    sparse = readers(cells)
    if sparse:
        yield (
            _names(sparse), " free no memory: the whole cache is held, and the budget limits what a decode step reads "
            "(KV read).",
        )  # fmt: skip
    # A distance from the full cache is one without its own row.
    uncompared_tasks = uncompared(cells[~cells["metric"].isin(FIDELITY)])
    if uncompared_tasks:
        everywhere = len(uncompared_tasks) == cells["task"].nunique()
        location: Phrase = "" if everywhere else (" on ", _names(uncompared_tasks))
        yield (
            "There is no full cache to compare with", location, ": it was not run, or it failed. Differences from it "
            "are unknown, and so is whether a task is informative. Run again without ", Name("--no-full"),
            " to add it.",
        )  # fmt: skip
    chance_tasks = tasks_at_chance(cells)
    if chance_tasks:
        yield (
            "The full cache is not above chance on ", _names(chance_tasks), f" (marked {MARK}), so differences between "
            "policies there are meaningless. Means and statements leave these tasks out.",
        )  # fmt: skip
    if unaveraged := unaveraged_tasks(cells):
        yield (
            "The score of ", _names(unaveraged), " is not a mean over samples, but computed from all of them. Means "
            "over tasks, divisions by a field and comparisons with a policy leave these tasks out.",
        )  # fmt: skip


def _low(low: LowBeforeQuestion) -> Phrase:
    """Say why policies are low before the question, and what to try."""
    is_single = len(low.policies) == 1
    reason: Phrase = (
        *("Before the question, ", _names(low.policies), " is low because it keeps " if is_single else " are low "),
        *(() if is_single else ("because they keep ",)),
        "what the prompt's last tokens attend to, and these cannot know yet what will be asked. ",
    )
    after: list[Phrase] = []
    for policy_name, score in low.after.items():
        after += [", " if after else "", Name(policy_name), f" {number(score, NumberFormat.POINTS)}"]
    advice: Phrase = ("After it: ", *after, ". ") if after else ("Try ", Name("--moment context,question"), ". ")
    better: Phrase = ("Best before it is ", Name(low.better), ", which does not go by them. ") if low.better else ""
    return (reason, advice, better, "More: docs/faq.md.")


def _names(names: Sequence[str]) -> Phrase:
    """Join names with commas; a long list is shortened to `a, b and 3 more`."""
    phrases: list[Phrase] = []
    for name in names[:_MOST_TASKS]:
        phrases += [", "] * bool(phrases) + [Name(name)]
    omitted_count = len(names) - _MOST_TASKS
    return (*phrases, f" and {omitted_count} more" if omitted_count > 0 else "")
