"""Relations between published results: averages, losses, quotients.

A rule yields a claim for every result that a table computes from others. `RULES` lists the rules of each table; add
lines there for a new paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvbench.papers.published.results import SCORES, Figure

Numbers: TypeAlias = Sequence[float]


@dataclass(frozen=True)
class Claim:
    """A published result that is computed from others of its table.

    Attributes:
        figure: The result.
        of: The results that it is computed from.
        compute: Maps their numbers to the result; monotone in each of them.
        rule: The computation in a few words.
    """

    figure: Figure
    of: tuple[Figure, ...]
    compute: Callable[[Numbers], float]
    rule: str

    @property
    def computed(self) -> float:
        """The number computed from the printed results."""
        return self.compute([figure.number for figure in self.of])

    @property
    def bounds(self) -> tuple[float, float]:
        """Range of the computed number over all operands that round to the printed ones."""
        printed_numbers = [figure.number for figure in self.of]
        lowest_numbers, highest_numbers = list(printed_numbers), list(printed_numbers)
        for figure_index, figure in enumerate(self.of):
            nudged_numbers = [
                *printed_numbers[:figure_index],
                printed_numbers[figure_index] + figure.half_digit,
                *printed_numbers[figure_index + 1 :],
            ]
            sign = 1.0 if self.compute(nudged_numbers) >= self.compute(printed_numbers) else -1.0
            lowest_numbers[figure_index] -= sign * figure.half_digit
            highest_numbers[figure_index] += sign * figure.half_digit
        return self.compute(lowest_numbers), self.compute(highest_numbers)

    @property
    def holds(self) -> bool:
        """Whether rounding can explain the difference between printed and computed number."""
        lower_bound, upper_bound = self.bounds
        slack = self.figure.half_digit + 1e-9
        return lower_bound - slack <= self.figure.number <= upper_bound + slack


@dataclass(frozen=True)
class Line:
    """The results of one method, model, budget and setting in a table, by dataset and metric."""

    figures: Mapping[tuple[str, str], Figure]

    @property
    def first(self) -> Figure:
        """The first result of the line; all agree on everything but dataset, metric and value."""
        return next(iter(self.figures.values()))

    @property
    def scores(self) -> dict[str, Figure]:
        """The scores of the line, by dataset."""
        return {dataset: figure for (dataset, metric), figure in self.figures.items() if metric in SCORES}

    def of(self, dataset: str) -> Figure | None:
        """Return the result of a dataset, regardless of its metric."""
        return next(
            (figure for (figure_dataset, _), figure in self.figures.items() if figure_dataset == dataset),
            None,
        )


Rule: TypeAlias = Callable[[Sequence[Line]], Iterator[Claim]]


def lines(figures: Iterable[Figure]) -> list[Line]:
    """Group the results of a table into lines."""
    figures_by_line: dict[tuple[str, ...], dict[tuple[str, str], Figure]] = {}
    for figure in figures:
        line_key = (figure.method, figure.model, figure.kept, figure.setting)
        figures_by_line.setdefault(line_key, {})[figure.dataset, figure.metric] = figure
    return [Line(line_figures) for line_figures in figures_by_line.values()]


def claims(paper_name: str, table_number: str, figures: Iterable[Figure], *, of_a_run: bool = False) -> list[Claim]:
    """Return the claims of a table's results; none if they do not depend on each other.

    Args:
        paper_name: Name of the paper.
        table_number: Number of the table.
        figures: Results of the table.
        of_a_run: Whether a run fills the table. All its policies have one full cache, which a paper's may not have.
    """
    table_lines = lines(figures)
    rules = RULES.get((paper_name, table_number), ())
    if of_a_run:
        rules = RULES_OF_RUNS.get((paper_name, table_number), rules)
    return [claim for rule in rules for claim in rule(table_lines)]


# --- rules ----------------------------------------------------------------------------------------


def mean(target: str, weights: Mapping[str, float] | None = None) -> Rule:
    """Rule: `target` is the mean of the line's other scores.

    Args:
        target: Dataset of the mean.
        weights: Weights by task, or by dataset if there is no task; equal by default.
    """

    def rule(table_lines: Sequence[Line]) -> Iterator[Claim]:
        for line in table_lines:
            figure = line.of(target)
            if figure is None:
                continue
            other_figures = tuple(score_figure for score_figure in line.scores.values() if score_figure is not figure)
            weight_list = [
                weights[score_figure.task or score_figure.dataset] if weights else 1.0 for score_figure in other_figures
            ]
            yield Claim(
                figure,
                other_figures,
                _weighted(weight_list),
                "weighted mean of its scores" if weights else "mean of its scores",
            )

    return rule


def loss(target: str, dataset: str) -> Rule:
    """Rule: `target` is the relative loss of `dataset` versus the full cache, in percent."""
    return _against_full(
        target,
        dataset,
        lambda score, full_score: 100 * (1 - score / full_score),
        "loss against full, %",
    )


def share(target: str, dataset: str) -> Rule:
    """Rule: `target` is `dataset` in percent of the full cache."""
    return _against_full(target, dataset, lambda score, full_score: 100 * score / full_score, "percent of full")


def change(target: str, dataset: str) -> Rule:
    """Rule: `target` is the relative change of `dataset` from the full cache, in percent."""
    return _against_full(
        target,
        dataset,
        lambda score, full_score: 100 * (score / full_score - 1),
        "change from full, %",
    )


def mean_share(target: str, applies_to: Callable[[Figure], bool] = lambda _: True) -> Rule:
    """Rule: `target` is the mean of the line's scores, each in percent of the full cache.

    Args:
        target: Dataset of the mean.
        applies_to: Which results of `target` the rule applies to.
    """
    return _mean_against_full(
        target,
        lambda score, full_score: 100 * score / full_score,
        "mean percent of full",
        applies_to,
    )


def mean_change(target: str) -> Rule:
    """Rule: `target` is the mean of the relative changes of the line's scores from the full cache."""
    return _mean_against_full(target, lambda score, full_score: 100 * (score / full_score - 1), "mean change, %")


def speed_up(metric: str, *, more_is_faster: bool) -> Rule:
    """Rule: results of metric `speed-up` compare those of `metric` with the full cache's."""

    def rule(table_lines: Sequence[Line]) -> Iterator[Claim]:
        full_figures = {
            metric_figure.dataset: metric_figure
            for metric_figure in _figures(table_lines, metric)
            if metric_figure.policy == "full"
        }
        figure_by_method = {
            (metric_figure.method, metric_figure.dataset): metric_figure
            for metric_figure in _figures(table_lines, metric)
        }
        for figure in _figures(table_lines, "speed-up"):
            figure_pair = (
                figure_by_method[figure.method, figure.dataset],
                full_figures[figure.dataset],
            )
            figure_pair = figure_pair if more_is_faster else figure_pair[::-1]
            yield Claim(figure, figure_pair, lambda numbers: numbers[0] / numbers[1], "speed-up over full")

    return rule


def quotient(target: str, numerator: str, denominator: str) -> Rule:
    """Rule: `target` is `numerator` in percent of `denominator`; all three are column names."""

    def rule(table_lines: Sequence[Line]) -> Iterator[Claim]:
        for figure, row_figures in _rows(table_lines, target):
            yield Claim(
                figure,
                (row_figures[numerator], row_figures[denominator]),
                lambda numbers: 100 * numbers[0] / numbers[1],
                "quotient of the two columns, %",
            )

    return rule


def per_token(target: str, total: str, prefill: str) -> Rule:
    """Rule: `target` is `total` minus `prefill`, per generated token; the row is PROMPT+GENERATED."""

    def rule(table_lines: Sequence[Line]) -> Iterator[Claim]:
        for figure, row_figures in _rows(table_lines, target):
            compute = _rest_per(int(figure.row.partition("+")[2]))
            yield Claim(
                figure,
                (row_figures[total], row_figures[prefill]),
                compute,
                "the rest of the time per token",
            )

    return rule


def gain(other_methods: Sequence[str]) -> Rule:
    """Rule: results of metric `gain` are the score minus the best of `other_methods`."""

    def rule(table_lines: Sequence[Line]) -> Iterator[Claim]:
        figure_by_method = {
            (score_figure.model, score_figure.dataset, score_figure.method): score_figure
            for line in table_lines
            for score_figure in line.scores.values()
        }
        for figure in _figures(table_lines, "gain"):
            cell_key = figure.model, figure.dataset
            best_figure = max(
                (figure_by_method[*cell_key, method] for method in other_methods),
                key=lambda score_figure: score_figure.number,
            )
            figure_pair = (figure_by_method[*cell_key, figure.method], best_figure)
            yield Claim(
                figure,
                figure_pair,
                lambda numbers: numbers[0] - numbers[1],
                f"gain over the best of {', '.join(other_methods)}",
            )

    return rule


def _weighted(weights: Sequence[float]) -> Callable[[Numbers], float]:
    weight_sum = sum(weights)
    return lambda numbers: sum(weight * value for weight, value in zip(weights, numbers, strict=True)) / weight_sum


def _rest_per(token_count: int) -> Callable[[Numbers], float]:
    return lambda numbers: (numbers[0] - numbers[1]) / token_count


def _against_full(target: str, dataset: str, ratio: Callable[[float, float], float], rule_name: str) -> Rule:
    def rule(table_lines: Sequence[Line]) -> Iterator[Claim]:
        for line in table_lines:
            figure, source_figure = line.of(target), line.of(dataset)
            full_line = _full(table_lines, line)
            if figure and source_figure and full_line and (full_figure := full_line.of(dataset)):
                yield Claim(
                    figure,
                    (source_figure, full_figure),
                    lambda numbers: ratio(numbers[0], numbers[1]),
                    rule_name,
                )

    return rule


def _mean_against_full(
    target: str,
    ratio: Callable[[float, float], float],
    rule_name: str,
    applies_to: Callable[[Figure], bool] = lambda _: True,
) -> Rule:
    def compute(numbers: Numbers) -> float:
        half = len(numbers) // 2
        return sum(map(ratio, numbers[:half], numbers[half:])) / half

    def rule(table_lines: Sequence[Line]) -> Iterator[Claim]:
        for line in table_lines:
            figure, full_line = line.of(target), _full(table_lines, line)
            if figure and full_line and applies_to(figure):
                line_scores = {
                    dataset: score_figure
                    for dataset, score_figure in line.scores.items()
                    if dataset in full_line.scores
                }
                full_figures = [full_line.scores[dataset] for dataset in line_scores]
                yield Claim(figure, (*line_scores.values(), *full_figures), compute, rule_name)

    return rule


def _full(table_lines: Sequence[Line], line: Line) -> Line | None:
    """Return the full-cache row for a row's model and datasets."""
    for other_line in table_lines:
        is_full_line = other_line.first.policy == "full" and other_line.first.model == line.first.model
        if is_full_line and other_line.figures.keys() & line.figures.keys():
            return other_line
    return None


def _figures(table_lines: Sequence[Line], metric: str) -> Iterator[Figure]:
    return (figure for line in table_lines for figure in line.figures.values() if figure.metric == metric)


def _rows(table_lines: Sequence[Line], target: str) -> Iterator[tuple[Figure, dict[str, Figure]]]:
    """Yield every result of a column with the results of its row, by column."""
    figures_by_row: dict[tuple[str, str], dict[str, Figure]] = {}
    for line in table_lines:
        for figure in line.figures.values():
            figures_by_row.setdefault((figure.part, figure.row), {})[figure.column] = figure
    for row_figures in figures_by_row.values():
        yield row_figures[target], row_figures


# --- which rules hold where -----------------------------------------------------------------------

_DOMAINS = {
    "longbench_single_doc_qa": 3.0,
    "longbench_multi_doc_qa": 3.0,
    "longbench_summarization": 3.0,
    "longbench_few_shot": 3.0,
    "longbench_synthetic": 2.0,
    "longbench_code": 2.0,
}
"""Sets in each domain of LongBench (CriticalKV, Table 15)."""

_QUESTIONS = {
    "LongMemEval-S Multi": 133.0,
    "LongMemEval-S Knowledge": 78.0,
    "LongMemEval-S SS-User": 70.0,
    "LongMemEval-S SS-Pref": 30.0,
    "LongMemEval-S SS-Assist": 56.0,
    "LongMemEval-S Temporal": 133.0,
}
"""Questions of each type in LongMemEval-S (arXiv 2410.10813)."""

_OVERALL, _ENCODING = "Overall Generation Duration (s)", "Prompt Encoding Duration (s)"
_COSTS = (
    quotient("Prompt Encoding/Overall (%)", _ENCODING, _OVERALL),
    per_token("Decoding Time Per Token (s)", _OVERALL, _ENCODING),
)

RULES: dict[tuple[str, str], tuple[Rule, ...]] = {
    ("criticalkv", "1"): (mean("Avg. Score"), loss("loss ↓", dataset="Avg. Score")),
    ("criticalkv", "2"): (mean("Avg. Score", _DOMAINS), loss("Avg. Loss ↓", dataset="Avg. Score")),
    ("criticalkv", "4"): (mean("Avg.", _DOMAINS),),
    ("criticalkv", "6"): (speed_up("TTFT s", more_is_faster=False),),
    ("criticalkv", "7"): (mean("Avg.", _DOMAINS),),
    ("criticalkv", "9"): (quotient("Ratio", "Our Bound θ̂", "Prev. Bound θ̂relax"),),
    ("criticalkv", "14"): (mean("Ave. Score", _DOMAINS), loss("Avg. Loss ↓", dataset="Ave. Score")),
    # TrimKV and DBTrimKV are printed relative to a separate full cache, whose scores are not printed.
    ("dbtrimkv", "1"): (mean_share("Avg. (%)", lambda f: f.row.endswith("*")),),
    ("dbtrimkv", "2"): (mean_share("(% vs Vanilla)"),),
    ("dbtrimkv", "3"): (share("MMDU % vs Vanilla", dataset="MMDU Overall"),),
    ("dbtrimkv", "6"): (share("MMDU % vs Vanilla", dataset="MMDU Overall"),),
    ("dbtrimkv", "7"): (change("Avg. Δ (%)", dataset="Avg. Acc"),),
    ("trimkv", "7"): (mean("LongMemEval-S", _QUESTIONS),),
    ("trimkv", "8"): (mean_change("Δ (%)"),),
    ("trimkv", "9"): (change("Δ (%)", dataset="Avg. Acc"),),
    ("d2o", "5"): (speed_up("tokens/s", more_is_faster=True),),
    ("d2o", "12"): _COSTS,
    ("d2o", "13"): _COSTS,
    # The row's label is lost; 14 of its 16 results confirm this rule.
    ("d2o", "17"): (gain(["Local Window", "StreamingLLM", "H2O"]),),
}
"""The rules of each table, by paper and number."""

RULES_OF_RUNS: dict[tuple[str, str], tuple[Rule, ...]] = {("dbtrimkv", "1"): (mean_share("Avg. (%)"),)}
"""The rules that differ if a run fills the table."""
