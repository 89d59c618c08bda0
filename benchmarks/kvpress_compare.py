"""kvbench's side of `benchmarks/kvpress_agreement.py`, and the comparison of a cell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kvpress_rows import ROWS, STEPS, Case, Row, budgets, forwards, spelled

ROUNDING = 1e-5
KINDS = ("tie", "newest", "design", "real")


@dataclass(frozen=True)
class Cell:
    """One row on one case at one budget.

    Attributes:
        kept: Entries that kvpress keeps.
        other: How many of them kvbench does not keep.
        kind: `tie`, `newest` where `TOVAPress` has kept the newest token and nothing else differs,
            `design` for the row's reason, `real`, or "".
        error: Largest difference of the scores, relative to the head's largest.
        moved: Largest difference of the keys that kvpress has moved to adjacent positions from ours
            moved likewise, relative to the largest; None if it moves none, or keeps other entries.
    """

    kept: int
    other: int
    kind: str
    error: float
    moved: float | None = None


class Side:
    """What kvbench keeps of a case at a budget, with its own scores or with kvpress'.

    Args:
        row, case, budget: What is compared.
        model: The model.
        theirs: What kvpress keeps (`kept`, bool `[L, H, T]`) and, if they are known, its scores or
            the norms that it scores by, float32 `[L, H, T]`.
    """

    def __init__(
        self,
        row: Row,
        case: Case,
        budget: float,
        model: Any,
        theirs: dict[str, np.ndarray],
    ) -> None:
        import kvbench

        self.row, self.case, self.budget, self.model = row, case, budget, model
        self.scores = torch.from_numpy(theirs["scores"]) if "scores" in theirs else None
        self.norms, self.keys = theirs.get("norms"), theirs.get("keys")
        # How many entries every head keeps, if kvpress decides that.
        self.counts = torch.from_numpy(theirs["kept"].sum(-1)) if row.counts else None
        self.policy = kvbench.policy(spelled(row, case))
        self.error = 0.0
        self.chosen: dict[int, np.ndarray] = {}

    def kept(self, given: bool = False) -> np.ndarray:
        """Entries that stay, bool `[L, H, T]`; `given`: with kvpress' scores."""
        import kvbench
        from kvbench.plugin import Need, Score, Scores, View

        side, own, select = self, self.policy.score, self.policy.select
        assert own is not None

        class Watched(Score):
            """The policy's score, or kvpress' with the protection of the policy's."""

            extras = own.extras
            nonnegative = own.nonnegative

            @property
            def needs(self) -> frozenset[Need]:
                return own.needs

            def score(self, v: View) -> Scores:
                found = own.score(v)
                if not isinstance(found, Scores):
                    found = Scores(found, torch.zeros_like(v.col))
                if side.scores is not None:
                    other = side.compared(found, side.scores[v.layer][None])
                    found = other if given else found
                if side.counts is not None:
                    share = side.counts[v.layer][None]
                    mask = select.select(v, select.prepare(v, found), share)
                    side.chosen[v.layer] = mask[0].numpy()
                return found

        policy = kvbench.policy(self.policy, score=Watched())
        held = self.held(policy)
        return (
            np.stack([self.chosen[layer] for layer in sorted(self.chosen)]) if self.chosen else held
        )

    def compared(self, found: Any, given: torch.Tensor) -> Any:
        """Note how far scores differ where they decide; give kvpress' with our protection."""
        from kvbench.plugin import Scores

        name = self.policy.name
        if name == "streaming_llm":  # it scores 1 or 0
            return Scores(given, torch.zeros_like(found.protect))
        free = found.protect <= 0
        if name == "tova":
            free[..., -1] = False
        scale = given.masked_fill(~free, 0.0).abs().amax(-1, keepdim=True)
        error = ((found.value - given) / scale).abs()[free]
        if len(error) and not self.error >= float(error.max()):  # a NaN stays
            self.error = float(error.max())
        return Scores(given.masked_fill(~free, 0.0), found.protect)

    @torch.no_grad()
    def held(self, policy: Any) -> np.ndarray:
        """Entries that the cache holds behind all forwards of the row, bool `[L, H, T]`."""
        import kvbench

        ids = torch.tensor([self.case["ids"]])
        steps = forwards(self.row, self.case, self.budget)
        cuts = {steps[0][1] + n * self.case["window"] for n in range(1, STEPS + 1)}
        moment: Any = {"question": "context", "decode_at_budget": "decode"}.get(
            self.row.moment, self.row.moment
        )
        with kvbench.attach(self.model, policy, self.budget, moment=moment) as cache:
            if self.row.moment == "question":
                cache.asked = self.case["window"]
            for start, end in steps:
                self.model(ids[:, start:end], past_key_values=cache, logits_to_keep=1)
                if self.row.moment == "turns" and end in cuts:
                    cache.compress()
            return np.stack([mask[0].numpy() for mask in cache.kept() if mask is not None])

    @torch.no_grad()
    def moved_error(self, kept: np.ndarray) -> float | None:
        """How far kvpress' keys are from ours moved to adjacent positions (see `Cell.moved`)."""
        if self.keys is None:
            return None
        cache = self.model(torch.tensor([self.case["ids"]])).past_key_values
        frequency = self.model.model.rotary_emb.inv_freq.double()
        worst = 0.0
        for layer, (masks, theirs) in enumerate(zip(kept, self.keys, strict=True)):
            for head, mask in enumerate(masks):
                place = torch.from_numpy(mask.nonzero()[0])
                angle = (torch.arange(len(place)) - place)[:, None] * frequency
                turn = torch.polar(torch.ones_like(angle), angle)
                key = cache.layers[layer].keys[0, head][place].double()
                turned = torch.complex(*key.chunk(2, -1)) * turn
                ours = torch.cat([turned.real, turned.imag], -1)
                off = (ours - torch.from_numpy(theirs[head])).abs().max() / ours.abs().max()
                worst = max(worst, float(off))
        return worst


def compare(side: Side, kept: np.ndarray) -> Cell:
    """Compare one cell with what kvpress keeps, bool `[L, H, T]`."""
    ours = side.kept()
    extra = kept & ~ours
    count, other, error = int(kept.sum()), int(extra.sum()), side.error
    if not other and np.array_equal(ours, kept):
        return Cell(count, 0, "", error, side.moved_error(kept))
    if side.policy.name == "tova" and not extra[..., :-1].any():
        return Cell(count, other, "newest", error)
    if side.row.reason and not (side.row.first_layer and extra[0].any()):
        return Cell(count, other, "design", error)
    if side.norms is not None:
        tie = swapped(ours, kept, side.norms, ROUNDING)
    elif side.scores is not None:
        tie = error <= ROUNDING and (
            np.array_equal(side.kept(given=True), kept) or swapped(ours, kept, side.scores.numpy())
        )
    else:
        tie = False
    return Cell(count, other, "tie" if tie else "real", error)


def swapped(ours: np.ndarray, kept: np.ndarray, scores: np.ndarray, rounding: float = 0.0) -> bool:
    """Whether only entries of one score differ: in each head, in each layer, or in all layers.

    As many were exchanged, or kvpress keeps more: a threshold lets all entries of one score pass,
    one of which kvbench keeps, too.
    Scores are one if they differ by at most `rounding` of their largest.
    """

    def even(mine: np.ndarray, theirs: np.ndarray, value: np.ndarray) -> bool:
        found = value[mine != theirs]
        if mine.sum() != theirs.sum():
            more = not (mine & ~theirs).any() and np.isin(found, value[mine]).all()
            return bool(more and np.ptp(found) == 0)
        return not len(found) or bool(np.ptp(found) <= rounding * np.abs(found).max())

    def layer(*parts: np.ndarray) -> bool:
        return even(*parts) or all(even(*head) for head in zip(*parts, strict=True))

    return even(ours, kept, scores) or all(
        layer(*parts) for parts in zip(ours, kept, scores, strict=True)
    )


def cells_of(folder: Path, theirs: Any) -> Iterator[tuple[str, Case, list[tuple[float, Cell]]]]:
    """Compare every row on every case: its name, the case, and a cell for every budget."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    models: dict[str, Any] = {}
    listed = json.loads((folder / "cases.json").read_text())
    for name in listed[0]["presses"]:
        row = ROWS[name]
        for number, case in enumerate(listed):
            if case["folder"] not in models:
                models[case["folder"]] = AutoModelForCausalLM.from_pretrained(
                    case["folder"], dtype=torch.float32
                ).eval()
            made = []
            for budget in budgets(row, case):
                prefix = f"{number}/{name}/{budget}/"
                found = {
                    what: theirs[prefix + what]
                    for what in ("kept", "scores", "norms", "keys")
                    if prefix + what in theirs
                }
                side = Side(row, case, budget, models[case["folder"]], found)
                made.append((budget, compare(side, found["kept"])))
            yield name, case, made
