"""kvbench's side of `benchmarks/kvpress_agreement.py`, and the comparison of a cell."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kvpress_rows import DRAWN, ROWS, STEPS, Case, Row, budgets, forwards, spelled

ROUNDING = 1e-5
KINDS = ("tie", "design", "real")


@dataclass(frozen=True)
class Cell:
    """One row on one case at one budget.

    Attributes:
        kept: Entries that kvpress keeps.
        other: How many of them kvbench does not keep.
        kind: `tie`; `design` where kvbench keeps what kvpress does without the row's reason;
            `real`; or "".
        error: Largest difference of the scores, relative to the head's largest.
        moved: Largest difference of the keys that kvpress has moved to adjacent positions from ours
            moved likewise, relative to the largest; None if it moves none, or keeps other entries.
        merged: Largest difference of the keys and values of heads, relative to the largest of all,
            but for heads in which rounding decides; None if nothing is merged.
    """

    kept: int
    other: int
    kind: str
    error: float
    moved: float | None = None
    merged: float | None = None


class Side:
    """What kvbench keeps of a case at a budget, with its own scores or with kvpress'.

    Args:
        row, case, budget: What is compared.
        model: The model.
        theirs: What kvpress keeps, in rows with a reason without it (`kept`, bool `[L, H, T]`) and,
            if they are known, its scores or the norms that it scores by, float32 `[L, H, T]`, the
            keys that it has moved, the keys and values that it has merged, and the heads in which
            rounding decides that (`close`, bool `[L, H]`), which are then not compared.
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
        self.theirs, self.merged = theirs["kept"], theirs.get("merged")
        self.sure = ~theirs.get("close", np.zeros(self.theirs.shape[:2], bool))
        # How many entries every head keeps, if kvpress decides that.
        self.counts = torch.from_numpy(theirs["kept"].sum(-1)) if row.counts else None
        self.policy = kvbench.policy(spelled(row, case))
        self.error = 0.0
        self.chosen: dict[int, np.ndarray] = {}
        self.stored: dict[int, torch.Tensor] = {}

    def kept(self, given: bool = False) -> np.ndarray:
        """Entries that stay, bool `[L, H, T]`; `given`: with kvpress' scores."""
        import kvbench
        from kvbench.plugin import Merger, Need, Score, Scores, View

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

        merger = self.policy.merge

        class Stored(Merger):
            """The policy's merger; notes what stays."""

            @property
            def needs(self) -> frozenset[Need]:
                assert merger is not None
                return merger.needs

            def merge(self, v: View, keep: Any, state: Any) -> Any:
                assert merger is not None
                found = merger.merge(v, keep, state)
                rows = torch.cat([x[0] for x in found], -1).masked_fill(~keep[0, ..., None], 0.0)
                out = torch.zeros(rows.shape[0], len(side.case["ids"]), rows.shape[2])
                place = v.position[0][..., None].expand_as(rows)
                side.stored[v.layer] = out.scatter_add(1, place, rows)
                return found

        parts = {} if self.merged is None else {"merge": Stored()}
        policy = kvbench.policy(self.policy, score=Watched(), **parts)
        held = self.held(policy)
        return np.stack([self.chosen[layer] for layer in sorted(self.chosen)]) if self.chosen else held

    def compared(self, found: Any, given: torch.Tensor) -> Any:
        """Note how far scores differ where they decide; give kvpress' with our protection."""
        from kvbench.plugin import Scores

        if self.policy.name == "streaming_llm":  # it scores 1 or 0
            return Scores(given, torch.zeros_like(found.protect))
        free = found.protect <= 0
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
        moment: Any = {"question": "context", "decode_at_budget": "decode"}.get(self.row.moment, self.row.moment)
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

    def merged_error(self, ours: np.ndarray) -> float | None:
        """How far merged keys and values are from ours (see `Cell.merged`)."""
        if self.merged is None:
            return None
        stored = np.stack([self.stored[layer].numpy() for layer in sorted(self.stored)])
        stored = stored[:, :, : ours.shape[-1]]
        off = np.abs(stored - self.merged)[self.sure]
        return float(off.max(initial=0.0) / np.abs(self.merged).max())


def compare(side: Side, kept: np.ndarray) -> Cell:
    """Compare one cell with what kvpress keeps, bool `[L, H, T]`.

    In rows with a reason the cell must agree with the mended press, whatever the press keeps.
    """
    ours = side.kept()
    count, other, error = int(kept.sum()), int((kept & ~ours).sum()), side.error
    same = np.array_equal(ours[side.sure], side.theirs[side.sure])
    merged = side.merged_error(ours)
    if side.row.merges and not (merged is not None and merged <= ROUNDING):
        return Cell(count, other, "real", error, merged=merged)
    if not (same or tied(side, ours)):
        return Cell(count, other, "real", error, merged=merged)
    moved = side.moved_error(ours) if same else None
    if moved is not None and not moved <= ROUNDING:
        return Cell(count, other, "real", error, moved, merged)
    kind = "" if same else "tie"
    if side.row.reason and not np.array_equal(ours, kept):
        kind = "design"
    return Cell(count, other, kind, error, moved, merged)


def tied(side: Side, ours: np.ndarray) -> bool:
    """Whether kvpress keeps other entries because scores are the same."""
    if side.norms is not None:
        return swapped(ours, side.theirs, side.norms, ROUNDING)
    if side.scores is None:
        return False
    return side.error <= ROUNDING and (
        np.array_equal(side.kept(given=True), side.theirs) or swapped(ours, side.theirs, side.scores.numpy())
    )


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

    return even(ours, kept, scores) or all(layer(*parts) for parts in zip(ours, kept, scores, strict=True))


def draws(listed: list[Case], folder: Path) -> None:
    """Save what kvbench draws for the rows of `DRAWN`, as the policy's own cuts are shown it."""
    made: dict[str, np.ndarray] = {}
    for number, case in enumerate(listed):
        for name in (x for x in DRAWN if x in case["presses"]):
            for budget in budgets(ROWS[name], case):
                side = Side(ROWS[name], case, budget, load(case), {"kept": np.zeros(1)})
                for what, array in drawn(side).items():
                    made[f"{number}/{name}/{budget}/{what}"] = array
    np.savez(folder / "draws.npz", **made)


def drawn(side: Side) -> dict[str, np.ndarray]:
    """Noise of a policy's entries and of its mergers, `[L, H, T]`, and Gaussian matrices."""
    import kvbench
    from kvbench.plugin import Score, View
    from kvbench_policies.projections import gaussian

    noise: dict[int, torch.Tensor] = {}
    matrices: dict[int, list[torch.Tensor]] = {}

    class Probe(Score):
        """The view's noise; notes all that can be drawn."""

        def score(self, v: View) -> torch.Tensor:
            rows = noise.setdefault(v.layer, torch.zeros(2, v.shape[1], len(side.case["ids"])))
            both = torch.stack([v.noise(0)[0], v.noise(1)[0]])
            rows.scatter_(2, v.position.expand_as(both), both)
            matrices[v.layer] = [gaussian(v, v.key.shape[-1], sketch)[0] for sketch in (20, 48)]
            return v.noise()

    side.held(kvbench.policy(side.policy, score=Probe(), merge=None))
    layers = sorted(noise)
    of_entries, of_mergers = (np.stack([noise[i][n].numpy() for i in layers]) for n in (0, 1))
    narrow, wide = (np.stack([matrices[i][n].numpy() for i in layers]) for n in (0, 1))
    return {"noise": of_entries, "merging": of_mergers, "gaussian20": narrow, "gaussian48": wide}


@functools.cache
def _loaded(folder: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load(case: Case) -> Any:
    """The model of a case."""
    return _loaded(case["folder"])


def cells_of(folder: Path, theirs: Any) -> Iterator[tuple[str, Case, list[tuple[float, Cell]]]]:
    """Compare every row on every case: its name, the case, and a cell for every budget."""
    listed = json.loads((folder / "cases.json").read_text())
    for name in listed[0]["presses"]:
        row = ROWS[name]
        for number, case in enumerate(listed):
            made = []
            for budget in budgets(row, case):
                prefix = f"{number}/{name}/{budget}/"
                mended = f"{prefix}mended/" if row.reason else prefix
                found = {
                    what: theirs[mended + what]
                    for what in ("kept", "scores", "norms", "keys", "merged", "close")
                    if mended + what in theirs
                }
                side = Side(row, case, budget, load(case), found)
                made.append((budget, compare(side, theirs[prefix + "kept"])))
            yield name, case, made
