"""Options of a report's figures: formats, size, and which policies they show under which names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvbench.errors import UserError
from kvbench.report.figure_flags import FigureFlags
from kvbench.report.frames import Results
from kvbench.tables.figure_files import DEFAULT_FORMATS, FORMATS

X_AXES = ("budget", "bytes", "tokens")
WIDTH_LIMITS = (3.0, 14.0)
"""Least and largest width of a figure in inches: narrower panels have no room for text of 8 points."""


@dataclass(frozen=True)
class FigureOptions:
    """Options of a report's figures.

    Attributes:
        formats: File formats: `pdf`, `png` and `svg`.
        labels: Names to show for policies.
        policies: Policies to draw, in this order; all if empty. The full cache is always drawn.
        width: Width of every figure in inches; if None, one or two columns of a paper by the number of panels.
        has_title: Whether figures have a title.
        x_axis: `budget` for percent of the full cache, `bytes` for bytes, `tokens` for tokens per KV head; if None,
            percent with bytes along the top.

    Raises:
        UserError: A format or an axis is unknown, or the width is out of range.
    """

    formats: Sequence[str] = DEFAULT_FORMATS
    labels: Mapping[str, str] = field(default_factory=dict)
    policies: Sequence[str] = ()
    width: float | None = None
    has_title: bool = True
    x_axis: str | None = None

    def __post_init__(self) -> None:
        for format_name in self.formats:
            if format_name not in FORMATS:
                raise UserError(f"unknown format {format_name!r}; use {', '.join(FORMATS)}")
        if not self.formats:
            raise UserError(f"no format given; use {', '.join(FORMATS)}")
        if self.x_axis is not None and self.x_axis not in X_AXES:
            raise UserError(f"unknown x axis {self.x_axis!r}; use {', '.join(X_AXES)}")
        lower_limit, upper_limit = WIDTH_LIMITS
        if self.width is not None and not lower_limit <= self.width <= upper_limit:
            raise UserError(f"width {self.width:g} is out of range; use {lower_limit:g} to {upper_limit:g} inches")

    def label(self, policy: str) -> str:
        """Return the name to show for a policy."""
        return self.labels.get(policy, policy)

    def panels_across(self, most: int, *, margins: float, gap: float, least_width: float) -> int:
        """Return how many panels fit side by side into the requested width, at most `most`; without one, `most`.

        Args:
            most: Number of panels.
            margins: Inches to the left and right of all panels.
            gap: Inches between two panels.
            least_width: Inches that a panel needs.
        """
        if self.width is None:
            return most
        return max(1, min(most, int((self.width - margins + gap) / (least_width + gap))))

    def check(self, results: Results) -> None:
        """Check that the results have every policy that is chosen or labelled, and what the x axis shows.

        Raises:
            UserError: They do not have it.
        """
        for policy in (*self.policies, *self.labels):
            if policy not in ("full", *results.policies):
                raise _unknown_policy(policy, results.policies)
        cells = results.cells
        is_drawn = (cells["policy"] != "full") & (cells["status"] == "ok")
        if self.x_axis == "tokens" and cells.loc[is_drawn, "held_tokens"].isna().any():
            raise UserError(
                "--x tokens divides entries by the number of KV heads, which the full cache of the same model tells; "
                "run without --no-full, or use --x bytes"
            )

    def select(self, results: Results) -> Results:
        """Return the results of the chosen policies and the full cache, in the chosen order.

        Raises:
            UserError: The results do not have a policy that is chosen or labelled.
        """
        self.check(results)
        chosen_policies = [policy for policy in dict.fromkeys(self.policies) if policy != "full"]
        if not chosen_policies:
            return results
        cells, overall = (
            frame[frame["policy"].isin(["full", *chosen_policies])].reset_index(drop=True) if len(frame) else frame
            for frame in (results.cells, results.overall)
        )
        return replace(results, cells=cells, overall=overall, policies=chosen_policies)


DEFAULT_FIGURES = FigureOptions()


def figure_options(
    flags: FigureFlags, policies: Sequence[str], chosen_policies: Sequence[str] = (), x_axis: str | None = None
) -> FigureOptions:
    """Return the options of figures that a user gave.

    Args:
        flags: Options that all commands share.
        policies: Policies of the results, besides the full cache.
        chosen_policies: Policies to draw, in this order; all if empty.
        x_axis: x axis of Pareto fronts.

    Raises:
        UserError: A value is wrong, or the results do not have a labelled policy.
    """
    return FigureOptions(
        formats=flags.formats or DEFAULT_FORMATS,
        labels=parse_labels(flags.labels or (), policies),
        policies=chosen_policies,
        width=flags.width,
        has_title=not flags.no_title,
        x_axis=x_axis,
    )


def parse_labels(assignments: Sequence[str], policies: Sequence[str]) -> dict[str, str]:
    """Parse assignments such as `snapkv=SnapKV`; the policy itself may contain `=`.

    Args:
        assignments: The assignments.
        policies: Policies of the results, besides the full cache.

    Raises:
        UserError: An assignment has no label, the results do not have its policy, or two policies have one name.
    """
    labels: dict[str, str] = {}
    for assignment in assignments:
        matches = [policy for policy in ("full", *policies) if assignment.startswith(f"{policy}=")]
        if not matches and "=" in assignment:
            raise _unknown_policy(assignment.rpartition("=")[0], policies)
        policy = max(matches, key=len, default="")
        label = assignment[len(policy) + 1 :].strip() if policy else ""
        if not label:
            raise UserError(f"{assignment!r} is not a label; write POLICY=LABEL, such as snapkv=SnapKV")
        labels[policy] = label
    shown = [labels.get(policy, policy) for policy in dict.fromkeys(("full", *policies))]
    if twice := [label for label in shown if shown.count(label) > 1]:
        raise UserError(f"two policies would be called {twice[0]!r}; give each a label of its own")
    return labels


def _unknown_policy(policy: str, policies: Sequence[str]) -> UserError:
    return UserError(f"no policy {policy!r} in the results; they have {', '.join(policies)}")
