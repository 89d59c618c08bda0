"""What printed figures claim about each other: averages, losses, quotients.

A rule reads a table and yields a claim for every figure that the table computes from others.
`RULES` says which rules hold in which table; a new paper adds its lines there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvbench.published.figures import SCORES, Figure

Numbers: TypeAlias = Sequence[float]


@dataclass(frozen=True)
class Claim:
    """A figure that others of its table determine.

    Attributes:
        figure: The figure.
        of: The figures that it is computed from.
        compute: From their numbers to its number; monotone in each of them.
        rule: How it is computed, in a few words.
    """

    figure: Figure
    of: tuple[Figure, ...]
    compute: Callable[[Numbers], float]
    rule: str

    @property
    def computed(self) -> float:
        """The number that the printed figures give."""
        return self.compute([figure.number for figure in self.of])

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and largest number that figures which round to the printed ones can give."""
        middle = [figure.number for figure in self.of]
        low, high = list(middle), list(middle)
        for i, figure in enumerate(self.of):
            nudged = [*middle[:i], middle[i] + figure.half_digit, *middle[i + 1 :]]
            sign = 1.0 if self.compute(nudged) >= self.compute(middle) else -1.0
            low[i] -= sign * figure.half_digit
            high[i] += sign * figure.half_digit
        return self.compute(low), self.compute(high)

    @property
    def holds(self) -> bool:
        """Whether rounding alone can explain the difference between printed and computed."""
        low, high = self.bounds
        slack = self.figure.half_digit + 1e-9
        return low - slack <= self.figure.number <= high + slack


@dataclass(frozen=True)
class Line:
    """The figures of one method, model, budget and setting in a table, by dataset and metric."""

    figures: Mapping[tuple[str, str], Figure]

    @property
    def first(self) -> Figure:
        """Any figure of the line; they agree on everything but dataset, metric and value."""
        return next(iter(self.figures.values()))

    @property
    def scores(self) -> dict[str, Figure]:
        """The scores of the line, by dataset."""
        return {dataset: f for (dataset, metric), f in self.figures.items() if metric in SCORES}

    def of(self, dataset: str) -> Figure | None:
        """The figure of a dataset, whatever its metric."""
        return next((f for (name, _), f in self.figures.items() if name == dataset), None)


Rule: TypeAlias = Callable[[Sequence[Line]], Iterator[Claim]]


def lines(figures: Iterable[Figure]) -> list[Line]:
    """Gather the figures of a table into lines."""
    found: dict[tuple[str, ...], dict[tuple[str, str], Figure]] = {}
    for f in figures:
        key = (f.method, f.model, f.kept, f.setting)
        found.setdefault(key, {})[f.dataset, f.metric] = f
    return [Line(line) for line in found.values()]


def claims(paper: str, table: str, figures: Iterable[Figure]) -> list[Claim]:
    """The claims of a table's figures; none if its figures do not depend on each other."""
    held = lines(figures)
    return [claim for rule in RULES.get((paper, table), ()) for claim in rule(held)]


# --- rules ----------------------------------------------------------------------------------------


def mean(target: str, weights: Mapping[str, float] | None = None) -> Rule:
    """`target` is the mean of the line's other scores.

    Args:
        target: Dataset of the mean.
        weights: Weights by task, or by dataset where there is no task; by default all are equal.
    """

    def rule(held: Sequence[Line]) -> Iterator[Claim]:
        for line in held:
            figure = line.of(target)
            if figure is None:
                continue
            rest = tuple(f for f in line.scores.values() if f is not figure)
            shares = [weights[f.task or f.dataset] if weights else 1.0 for f in rest]
            yield Claim(
                figure,
                rest,
                _weighted(shares),
                "weighted mean of its scores" if weights else "mean of its scores",
            )

    return rule


def loss(target: str, of: str) -> Rule:
    """`target` is the loss of `of` against the full cache, in percent of it."""
    return _against_full(target, of, lambda x, full: 100 * (1 - x / full), "loss against full, %")


def share(target: str, of: str) -> Rule:
    """`target` is `of` in percent of the full cache."""
    return _against_full(target, of, lambda x, full: 100 * x / full, "percent of full")


def change(target: str, of: str) -> Rule:
    """`target` is the change of `of` against the full cache, in percent of it."""
    return _against_full(target, of, lambda x, full: 100 * (x / full - 1), "change from full, %")


def mean_share(target: str, whose: Callable[[Figure], bool] = lambda _: True) -> Rule:
    """`target` is the mean over the line's scores of their percentages of the full cache.

    Args:
        target: Dataset of the mean.
        whose: Which figures of `target` claim so.
    """
    return _mean_against_full(target, lambda x, full: 100 * x / full, "mean percent of full", whose)


def mean_change(target: str) -> Rule:
    """`target` is the mean over the line's scores of their changes from the full cache."""
    return _mean_against_full(target, lambda x, full: 100 * (x / full - 1), "mean change, %")


def speed_up(metric: str, *, more_is_faster: bool) -> Rule:
    """Figures of metric `speed-up` compare those of `metric` with the full cache's."""

    def rule(held: Sequence[Line]) -> Iterator[Claim]:
        full = {f.dataset: f for f in _figures(held, metric) if f.policy == "full"}
        here = {(f.method, f.dataset): f for f in _figures(held, metric)}
        for figure in _figures(held, "speed-up"):
            pair = (here[figure.method, figure.dataset], full[figure.dataset])
            pair = pair if more_is_faster else pair[::-1]
            yield Claim(figure, pair, lambda x: x[0] / x[1], "speed-up over full")

    return rule


def quotient(target: str, above: str, below: str) -> Rule:
    """`target` is `above` in percent of `below`; all three are names of columns."""

    def rule(held: Sequence[Line]) -> Iterator[Claim]:
        for figure, x in _rows(held, target):
            yield Claim(
                figure,
                (x[above], x[below]),
                lambda v: 100 * v[0] / v[1],
                "quotient of the two columns, %",
            )

    return rule


def per_token(target: str, whole: str, before: str) -> Rule:
    """`target` is `whole` less `before`, per generated token; the row is PROMPT+GENERATED."""

    def rule(held: Sequence[Line]) -> Iterator[Claim]:
        for figure, x in _rows(held, target):
            compute = _rest_per(int(figure.row.partition("+")[2]))
            yield Claim(figure, (x[whole], x[before]), compute, "the rest of the time per token")

    return rule


def gain(over: Sequence[str]) -> Rule:
    """Figures of metric `gain` are the score less the best of the methods `over`."""

    def rule(held: Sequence[Line]) -> Iterator[Claim]:
        known = {(f.model, f.dataset, f.method): f for line in held for f in line.scores.values()}
        for figure in _figures(held, "gain"):
            key = figure.model, figure.dataset
            best = max((known[*key, method] for method in over), key=lambda f: f.number)
            pair = (known[*key, figure.method], best)
            yield Claim(
                figure, pair, lambda v: v[0] - v[1], f"gain over the best of {', '.join(over)}"
            )

    return rule


def _weighted(weights: Sequence[float]) -> Callable[[Numbers], float]:
    total = sum(weights)
    return lambda x: sum(w * value for w, value in zip(weights, x, strict=True)) / total


def _rest_per(tokens: int) -> Callable[[Numbers], float]:
    return lambda x: (x[0] - x[1]) / tokens


def _against_full(target: str, of: str, ratio: Callable[[float, float], float], name: str) -> Rule:
    def rule(held: Sequence[Line]) -> Iterator[Claim]:
        for line in held:
            figure, x = line.of(target), line.of(of)
            full = _full(held, line)
            if figure and x and full and (whole := full.of(of)):
                yield Claim(figure, (x, whole), lambda v: ratio(v[0], v[1]), name)

    return rule


def _mean_against_full(
    target: str,
    ratio: Callable[[float, float], float],
    name: str,
    whose: Callable[[Figure], bool] = lambda _: True,
) -> Rule:
    def compute(x: Numbers) -> float:
        half = len(x) // 2
        return sum(map(ratio, x[:half], x[half:])) / half

    def rule(held: Sequence[Line]) -> Iterator[Claim]:
        for line in held:
            figure, full = line.of(target), _full(held, line)
            if figure and full and whose(figure):
                mine = {k: f for k, f in line.scores.items() if k in full.scores}
                whole = [full.scores[k] for k in mine]
                yield Claim(figure, (*mine.values(), *whole), compute, name)

    return rule


def _full(held: Sequence[Line], line: Line) -> Line | None:
    """The full cache's line for the model of a line, with the same datasets."""
    for other in held:
        same = other.first.policy == "full" and other.first.model == line.first.model
        if same and other.figures.keys() & line.figures.keys():
            return other
    return None


def _figures(held: Sequence[Line], metric: str) -> Iterator[Figure]:
    return (f for line in held for f in line.figures.values() if f.metric == metric)


def _rows(held: Sequence[Line], target: str) -> Iterator[tuple[Figure, dict[str, Figure]]]:
    """Every figure of a column with the figures of its row, by column."""
    rows: dict[tuple[str, str], dict[str, Figure]] = {}
    for line in held:
        for f in line.figures.values():
            rows.setdefault((f.part, f.row), {})[f.column] = f
    for row in rows.values():
        yield row[target], row


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
    ("criticalkv", "1"): (mean("Avg. Score"), loss("loss ↓", of="Avg. Score")),
    ("criticalkv", "2"): (mean("Avg. Score", _DOMAINS), loss("Avg. Loss ↓", of="Avg. Score")),
    ("criticalkv", "4"): (mean("Avg.", _DOMAINS),),
    ("criticalkv", "6"): (speed_up("TTFT s", more_is_faster=False),),
    ("criticalkv", "7"): (mean("Avg.", _DOMAINS),),
    ("criticalkv", "9"): (quotient("Ratio", "Our Bound θ̂", "Prev. Bound θ̂relax"),),
    ("criticalkv", "14"): (mean("Ave. Score", _DOMAINS), loss("Avg. Loss ↓", of="Ave. Score")),
    # TrimKV and DBTrimKV stand beside a full cache of their own, whose scores are not printed.
    ("dbtrimkv", "1"): (mean_share("Avg. (%)", lambda f: f.row.endswith("*")),),
    ("dbtrimkv", "2"): (mean_share("(% vs Vanilla)"),),
    ("dbtrimkv", "3"): (share("MMDU % vs Vanilla", of="MMDU Overall"),),
    ("dbtrimkv", "6"): (share("MMDU % vs Vanilla", of="MMDU Overall"),),
    ("dbtrimkv", "7"): (change("Avg. Δ (%)", of="Avg. Acc"),),
    ("trimkv", "7"): (mean("LongMemEval-S", _QUESTIONS),),
    ("trimkv", "8"): (mean_change("Δ (%)"),),
    ("trimkv", "9"): (change("Δ (%)", of="Avg. Acc"),),
    ("d2o", "5"): (speed_up("tokens/s", more_is_faster=True),),
    ("d2o", "12"): _COSTS,
    ("d2o", "13"): _COSTS,
    # The row's label is lost; that this is what it holds follows from 14 of its 16 figures.
    ("d2o", "17"): (gain(["Local Window", "StreamingLLM", "H2O"]),),
}
"""The rules of each table, by paper and number."""
