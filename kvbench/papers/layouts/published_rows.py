"""Published results in the rows of a layout, below those of the runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from kvbench.papers.layouts.slots import PUBLISHED_ROW
from kvbench.papers.published.beside import is_same_model
from kvbench.papers.published.claims import Claim
from kvbench.papers.published.results import Figure
from kvbench.tables.numbers import NumberFormat
from kvbench.tables.table import Graded, Name, Phrase, TableCell

_SCALES = {"judge": (10, NumberFormat.RATING)} | dict.fromkeys(
    ("loss %", "share %", "change %"), (100, NumberFormat.PERCENT)
)
"""Scale and format of the metrics that are not scores from 0 to 100."""


class PublishedRows:
    """Published results beside those of one model of the runs.

    They are for the same model if the paper has it, otherwise for the model with the most results.

    Args:
        figures: Published results of all models, with the run's replacements applied.
        main_model: The paper's model with the most results.
        run_model: The run's model.
        claims: Rules of the computed results in the layout.
        all_claims: The same for the whole table, before columns were left out.
    """

    def __init__(
        self,
        figures: Sequence[Figure],
        main_model: str,
        run_model: str,
        claims: Mapping[Figure, Claim],
        all_claims: Mapping[Figure, Claim],
    ) -> None:
        models = dict.fromkeys(figure.model for figure in figures)
        self.run_model = run_model
        self.model = next((name for name in models if is_same_model(run_model, name)), main_model)
        self.figures = {_key(figure): figure for figure in figures if figure.model == self.model}
        self.claims = claims
        self.operand_counts = {_key(figure): len(claim.of) for figure, claim in all_claims.items()}
        self.has_recomputed = False

    def cell(self, figure: Figure) -> TableCell:
        """Return the published result in the place of a figure of the layout."""
        printed = self.figures.get(_key(figure))
        if printed is None or math.isnan(value := self._number(figure)):
            return None
        scale, number_format = _SCALES.get(figure.metric, (100, NumberFormat.POINTS))
        # Without the error of the division: 0.339, not 0.33899999999999997.
        return Graded(round(value / scale, 12), number_format, figure.metric == "change %", digits=printed.decimals)

    def _number(self, figure: Figure) -> float:
        """Return a printed number; recomputed if some of its operands were left out of the layout."""
        printed = self.figures.get(_key(figure))
        if printed is None:
            return math.nan
        if not self._is_partial(figure):
            return printed.number
        claim = self.claims.get(figure)
        if claim is None:
            return math.nan
        operands = [self._number(operand) for operand in claim.of]
        if any(map(math.isnan, operands)):
            return math.nan
        self.has_recomputed = True
        try:
            return claim.compute(operands)
        except ZeroDivisionError:  # the full cache scores 0
            return math.nan

    def _is_partial(self, figure: Figure) -> bool:
        operands = self.claims[figure].of if figure in self.claims else ()
        return len(operands) < self.operand_counts.get(_key(figure), 0) or any(map(self._is_partial, operands))

    def notes(self) -> Iterator[Phrase]:
        """Yield a note about the origin of the published results."""
        same = is_same_model(self.run_model, self.model)
        yield (
            f"{PUBLISHED_ROW}: the paper's results for ", Name(self.model or "an unnamed model"),
            *(() if same else (", another model than ", Name(self.run_model))),
            ", as printed; its prompts, lengths and data are its own",
            "; averages over fewer columns are computed from its columns shown here" * self.has_recomputed,
            ".",
        )  # fmt: skip


def _key(figure: Figure) -> tuple[str, ...]:
    return figure.method, figure.kept, figure.setting, figure.dataset, figure.metric
