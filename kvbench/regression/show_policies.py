"""Comparison of two policies as tables, as a sentence for a paper, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.regression import significance
from kvbench.regression.policies import PolicyComparison, PolicyDifference
from kvbench.report.frames import FIDELITY_NAMES, metric_title, policy_title
from kvbench.tables.numbers import LEAST_P, NumberFormat, interval, number, score_kind
from kvbench.tables.outputs import LATEX_PACKAGES, latex, latex_text, markdown, markdown_text, plain_text
from kvbench.tables.table import Column, Interval, Name, Phrase, Table, TableCell, beside
from kvbench.tables.text import counted, mean_of, tokens


@dataclass(frozen=True)
class PolicyPair:
    """The compared policies and how they are shown.

    Attributes:
        base: Policy to compare with.
        policy: The other policy.
        alpha: Level of the tests.
        labels: Names to show for policies.
    """

    base: str
    policy: str
    alpha: float = 0.05
    labels: Mapping[str, str] = field(default_factory=dict)

    def titles(self, comparison: PolicyComparison) -> tuple[Phrase, Phrase]:
        """Return the names to show for base and policy; policies that see the answer are marked."""
        base, policy = (
            policy_title(name, informed=name in comparison.informed, labels=self.labels)
            for name in (self.base, self.policy)
        )
        return base, policy


def sentence(comparison: PolicyComparison, pair: PolicyPair) -> Phrase:
    """Return the overall difference as a sentence for a paper; an undecided difference is called undecided."""
    overall = comparison.overall
    kind = score_kind(unit_scaled=comparison.unit_scaled)
    base, policy = pair.titles(comparison)
    metric, unit = FIDELITY_NAMES.get(comparison.metric, ("", ""))
    unit_text = " points" if comparison.unit_scaled else f" {unit}".rstrip()
    gap, bounds = overall.change, interval(overall.change.lo, overall.change.hi, kind, signed=True)
    scores = f"{number(overall.score, kind)} vs {number(overall.base_score, kind)}"
    test_text = f"paired permutation test over {counted(overall.contexts, 'context')}"
    if overall.family_size > 1:
        test_text += f", Holm-corrected for {overall.family_size} comparisons"
    evidence = f"95% interval {bounds}; {_p_text(overall.p_corrected)}, {test_text}"
    scope = _scope(comparison)
    if not overall.differs:
        return (*scope, policy, " and ", base, f" score the same on every question ({scores}; {evidence}).")
    if not overall.is_decided(pair.alpha):
        gap_text = number(gap.mean, kind, signed=True) + unit_text
        least_contexts = significance.least_contexts(pair.alpha / overall.family_size)
        hint = f"; fewer than {least_contexts} contexts cannot show any difference"
        return (
            *scope, f"the difference {f'in {metric} ' * bool(metric)}between ", policy, " and ", base,
            f" is undecided ({scores}, {gap_text}; {evidence}{hint * (overall.contexts < least_contexts)}).",
        )  # fmt: skip
    gap_text = number(abs(gap.mean), kind) + unit_text
    direction = "higher" if gap.mean > 0 else "lower"
    meaning = ", which is " + ("better" if gap.mean < 0 else "worse") if not comparison.higher_is_better else ""
    claim: tuple[Phrase, ...] = (policy, f" scores {gap_text} {direction} than ", base)
    if metric:
        claim = (f"the {metric} of ", policy, f" is {gap_text} {direction} than that of ", base)
    return (*scope, *claim, f"{meaning} ({scores}; {evidence}).")


def notes(comparisons: Sequence[PolicyComparison], pair: PolicyPair) -> Iterator[str]:
    """Yield explanations of the tables, and what is left out of them."""
    parts = [part for comparison in comparisons for part in comparison.parts]
    families = [f"for the {counted(parts[0].family_size, 'part')} whose scores differ"] if parts else []
    if len(comparisons) > 1:
        families.append(f"for the {counted(comparisons[0].overall.family_size, 'overall difference')}")
    correction = f" p is corrected by Holm's method {', and '.join(families)}." if families else ""
    yield (
        "Differences are paired by question, brackets are 95% intervals. A difference is decided if its corrected p is "
        f"below {pair.alpha:g} and its interval does not contain 0.{correction}"
    )
    decided_signs = {part.change.mean > 0 for part in parts if part.is_decided(pair.alpha)}
    if len(decided_signs) > 1:
        yield "Decided differences go both ways, so an overall difference depends on the budgets, moments and tasks."
    for comparison in comparisons:
        if comparison.at_chance:
            yield f"Left out: {', '.join(comparison.at_chance)}; the full cache is not above chance."
        if comparison.unaveraged:
            task_list = ", ".join(comparison.unaveraged)
            yield f"Left out: {task_list}; the score is not a mean over samples, so it has no paired test."
        if comparison.unpaired:
            point_list = ", ".join(f"{budget} ({moment})" for moment, budget in comparison.unpaired)
            yield f"Left out of {comparison.group}: {point_list}; not every task has a common score there."


def tables(comparisons: Sequence[PolicyComparison], pair: PolicyPair) -> list[Table]:
    """Return a table per model, benchmark, length and seed: the overall difference, then its parts."""
    return [_table(comparison, pair) for comparison in comparisons]


def latex_document(comparisons: Sequence[PolicyComparison], pair: PolicyPair) -> str:
    """Return the sentences and the tables in LaTeX, after a line that names the required packages."""
    sentences = [latex_text(sentence(comparison, pair)) for comparison in comparisons]
    table_texts = [latex(table, fit=True) for table in tables(comparisons, pair)]
    return LATEX_PACKAGES + "\n\n".join([*sentences, *table_texts])


def markdown_document(comparisons: Sequence[PolicyComparison], pair: PolicyPair) -> str:
    """Return the sentences, the tables and the notes in Markdown."""
    phrases = [sentence(comparison, pair) for comparison in comparisons]
    table_texts = list(map(markdown, tables(comparisons, pair)))
    return (
        "\n\n".join([*map(markdown_text, phrases), *table_texts, *map(markdown_text, notes(comparisons, pair))]) + "\n"
    )


def as_records(comparisons: Sequence[PolicyComparison], pair: PolicyPair) -> list[dict[str, Any]]:
    """Return the comparisons as JSON-serialisable data; numbers that are not finite become null."""
    return [
        {
            "model": comparison.model,
            "group": comparison.group,
            "length": comparison.length,
            "seed": comparison.seed,
            "base": pair.base,
            "policy": pair.policy,
            "alpha": pair.alpha,
            "informed": sorted(comparison.informed),
            "metric": comparison.metric,
            "higher_is_better": comparison.higher_is_better,
            "sentence": plain_text(sentence(comparison, pair)),
            "latex": latex_text(sentence(comparison, pair)),
            "overall": _record(comparison.overall, pair),
            "parts": [_record(part, pair) for part in comparison.parts],
            "at_chance": list(comparison.at_chance),
            "not_means": list(comparison.unaveraged),
            "not_paired": [{"moment": moment, "budget": budget} for moment, budget in comparison.unpaired],
        }
        for comparison in comparisons
    ]


def _record(difference: PolicyDifference, pair: PolicyPair) -> dict[str, Any]:
    numbers = {
        "base_score": difference.base_score,
        "score": difference.score,
        "diff": difference.change.mean,
        "diff_lo": difference.change.lo,
        "diff_hi": difference.change.hi,
        "p": difference.p,
        "p_corrected": difference.p_corrected,
    }
    return {
        "tasks": list(difference.tasks),
        "moments": difference.moments,
        "budgets": difference.budgets,
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "tests": difference.family_size,
        "contexts": difference.contexts,
        "decided": difference.is_decided(pair.alpha),
    }


def _scope(comparison: PolicyComparison) -> tuple[Phrase, ...]:
    """Return the beginning of a sentence: tasks, model, budgets, moments and length."""
    overall = comparison.overall
    if len(overall.tasks) > 1:
        tasks: tuple[Phrase, ...] = (f"the {mean_of(len(overall.tasks))} of ", Name(comparison.group))
    else:
        tasks = (Name(overall.tasks[0]),)
    moments = [moment for moment in overall.moments if moment]
    settings = [_counted_list("budget", overall.budgets)]
    settings += [_counted_list("moment", moments)] if moments else []
    settings += [tokens(comparison.length)] if comparison.length else []
    return ("On ", *tasks, " (model ", Name(comparison.model), f", {', '.join(settings)}), ")


def _counted_list(noun: str, values: Sequence[str]) -> str:
    *first_values, last_value = values
    return f"{noun}s {', '.join(first_values)} and {last_value}" if first_values else f"{noun} {last_value}"


def _p_text(p_value: float) -> str:
    return f"p < {LEAST_P:g}" if p_value < LEAST_P else f"p = {p_value:.2g}"


def _table(comparison: PolicyComparison, pair: PolicyPair) -> Table:
    differences = [comparison.overall, *comparison.parts]
    kind = score_kind(unit_scaled=comparison.unit_scaled)
    gap_cells: list[TableCell] = [
        Interval(difference.change.mean, difference.change.lo, difference.change.hi) for difference in differences
    ]
    base, policy = pair.titles(comparison)
    outcomes = ["decided" if difference.is_decided(pair.alpha) else "undecided" for difference in differences]
    columns: list[tuple[Column, Sequence[TableCell]]] = [
        (Column("task"), [_task_cell(difference) for difference in differences]),
        (Column("moment"), [", ".join(difference.moments) for difference in differences]),
        (Column("budget"), [", ".join(difference.budgets) for difference in differences]),
        (Column(base, kind), [difference.base_score for difference in differences]),
        (Column(policy, kind), [difference.score for difference in differences]),
        (Column("difference", kind, signed=True), gap_cells),
        (Column("corrected p", NumberFormat.P_VALUE), [difference.p_corrected for difference in differences]),
        (Column("contexts", NumberFormat.COUNT), [difference.contexts for difference in differences]),
        (Column("result"), list(outcomes)),
    ]
    direction = f", {metric_title(comparison.metric)}" * (comparison.metric in FIDELITY_NAMES)
    direction += "" if comparison.higher_is_better else ", lower is better"
    title: tuple[Phrase, ...] = (
        policy, " minus ", base, " · ", Name(comparison.model), " · ",
        Name(comparison.group), f", {tokens(comparison.length)}, seed {comparison.seed}{direction}",
    )  # fmt: skip
    groups = ["overall", *("mean" if len(part.tasks) > 1 else "task" for part in comparison.parts)]
    return beside(title, columns, groups=groups)


def _task_cell(difference: PolicyDifference) -> Phrase:
    return Name(difference.tasks[0]) if len(difference.tasks) == 1 else mean_of(len(difference.tasks))
