"""Live dialogues: the cache grows over turns and is cut back to budget before each new one.

The model's own answers stay in the history. The first turn is prefilled once for all cells; from
then on a dialogue's cache belongs to its cell, and the dialogues of one policy go on side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decide import now
from kvbench.engine.decode import Batch, Row
from kvbench.errors import reason_of
from kvbench.harness.protocol import Request
from kvbench.plugin import Policy
from kvbench.runs.answers import (
    Prompt,
    begun,
    by_cell,
    empty,
    forks,
    key_of,
)
from kvbench.runs.cell import Cell
from kvbench.runs.store import Response

if TYPE_CHECKING:
    from kvbench.runs.worker import Executor

Done = set[tuple[str, str, int, int]]


@dataclass
class Dialogue:
    """One dialogue of one cell."""

    cell: Cell
    turns: list[Prompt]
    cache: RaggedCache
    logits: Tensor
    prefill_s: float


def run_dialogues(
    executor: Executor,
    prompts: Sequence[Prompt],
    cells: Sequence[Cell],
    policies: dict[str, Policy],
    done: Done,
) -> None:
    """Hold every dialogue of which a turn is still open, for every cell.

    Args:
        executor: Whose model talks.
        prompts: The turns of all dialogues, those of one adjacent and in order, repeat by repeat.
        cells: At moment `turns`.
        policies: Of the cells.
        done: Keys of the responses that are there.
    """
    lanes: dict[str, list[Dialogue]] = {}
    width = max(_longest(executor, list(g)) for _, g in groupby(prompts, _name))
    for _, group in groupby(prompts, lambda p: p.question.dialogue):
        repeats = [list(g) for _, g in groupby(group, _name)]
        wanted = [
            (c, missing)
            for c in cells
            if c.cell not in executor.failed
            and (missing := [t for t in repeats if any(key_of(c, p) not in done for p in t)])
        ]
        if not wanted:
            continue
        needs = {need for c, _ in wanted for need in policies[c.cell].needs}
        first = repeats[0][0]
        ids = (*first.context_ids, *first.question_ids)
        prefix, logits = executor.prefill(ids, needs)
        for cell, missing in wanted:
            cache = executor.compress(prefix, cell, policies[cell.cell], first)
            if cache is None:
                del prefix
                prefix, logits = executor.prefill(ids, needs)
                continue
            for turns, own in zip(missing, forks(len(missing), cache), strict=True):
                held = lanes.setdefault(cell.policy, [])
                held.append(Dialogue(cell, turns, own, logits, prefix.seconds))
                waiting = (d.cache for lane in lanes.values() for d in lane)
                if cache.slides or not executor.room(len(held), waiting):
                    _hold(executor, lanes.pop(cell.policy), width, done)
    for held in lanes.values():
        _hold(executor, held, width, done)


def _name(prompt: Prompt) -> tuple[str, int]:
    return prompt.question.dialogue, prompt.repeat


def _hold(executor: Executor, dialogues: list[Dialogue], width: int, done: Done) -> None:
    """Carry dialogues of one policy through, side by side, and store what was said."""
    try:
        said = list(_turns(executor, dialogues, width))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a policy that is asked again is foreign code
        apart = by_cell(dialogues)
        if len(apart) == 1:
            for d in dialogues:
                executor.fail(d.cell, d.turns[0], reason_of(error))
        else:  # whose fault it was shows when each goes alone
            for own in apart:
                _hold(executor, own, width, done)
        return
    executor.done([r for r in said if r.key not in done])


def _turns(executor: Executor, dialogues: list[Dialogue], width: int) -> Iterator[Response]:
    batch = Batch(executor.model, [d.cache for d in dialogues], executor.slots(len(dialogues)))
    cache, upkeep = batch.cache, batch.cache.upkeep
    open_rows: list[Row] = []
    for turn in range(max(len(d.turns) for d in dialogues)):
        alive = [turn < len(d.turns) for d in dialogues]
        cuts = 0.0 if upkeep is None else upkeep.seconds
        began = now(executor.device)
        if turn == 0:
            logits = torch.cat([d.logits for d in dialogues])
            held = [begun(d.cell, d.turns[0], d.cache, d.prefill_s, 0.0) for d in dialogues]
        else:
            _cut(cache, dialogues, alive)
            held = [_state(cache, i, d, turn) for i, d in enumerate(dialogues)]
            more = [
                _next(executor, d, turn, row) if ok else []
                for d, ok, row in zip(dialogues, alive, open_rows, strict=True)
            ]
            most = max(len(m) for m in more)
            # Padding would push tokens out of sliding windows: there a dialogue goes alone.
            logits = batch.feed(more, most if cache.slides else max(width, most))
        rows = [executor.row(d.cell, d.turns[min(turn, len(d.turns) - 1)]) for d in dialogues]
        for row, ok in zip(rows, alive, strict=True):
            row.reason = "" if ok else "over"
        batch.answer(rows, logits, pause=True)
        cuts = (0.0 if upkeep is None else upkeep.seconds) - cuts
        each = (now(executor.device) - began - cuts) / max(1, sum(alive))
        for i, (row, ok) in enumerate(zip(rows, alive, strict=True)):
            if ok:
                yield replace(
                    held[i],
                    response=row.text(),
                    stop=row.reason,
                    generated_tokens=len(row.tokens),
                    compress_s=cuts / sum(alive),
                    decode_s=each,
                )
        open_rows = rows


def _cut(cache: RaggedCache, dialogues: list[Dialogue], alive: list[bool]) -> None:
    """Cut every dialogue that goes on back to its share of the tokens seen so far."""
    upkeep = cache.upkeep
    if upkeep is None:
        return
    seen = cache.lengths().tolist()
    for i, d in enumerate(dialogues):
        upkeep.budget[i] = Budget.parse(d.cell.budget).per_head(seen[i])
    upkeep.restore(cache, [i for i, ok in enumerate(alive) if ok])
    # What comes from now on is the new turn.
    width = cache.get_seq_length()
    cache.turns = [[*starts, width] for starts in cache.turns or [[]] * cache.batch]


def _state(cache: RaggedCache, row: int, dialogue: Dialogue, turn: int) -> Response:
    """What a dialogue holds when a turn begins."""
    upkeep = cache.upkeep
    prompt = dialogue.turns[min(turn, len(dialogue.turns) - 1)]
    held = cache.live_entries(row)
    allowed = held
    if upkeep is not None:
        allowed = upkeep.info.layers * upkeep.info.kv_heads * upkeep.budget[row]
    seen = int(cache.lengths()[row])
    return replace(
        empty(dialogue.cell, prompt),
        context_tokens=seen,
        question_tokens=len(prompt.question_ids),
        budget_entries=allowed,
        held_entries=held,
        kv_bytes_live=cache.live_bytes(row),
        kv_bytes_allocated=cache.allocated_bytes(row),
        kv_bytes_full=cache.full_bytes(row),
    )


def _next(executor: Executor, dialogue: Dialogue, turn: int, row: Row) -> list[int]:
    """Tokens from the end of the last answer to the end of the next question."""
    last, new = dialogue.turns[turn - 1].question, dialogue.turns[turn].question
    if row.reason == "length":
        return row.tokens[-1:] + _added(executor, last.answer_end, new)
    # The last token, which has ended the answer, is not in the cache and stays out: the history
    # closes an answer in its own way. What of the answer came with that token is said again; what
    # of the closing is in the cache already (a stop string of several tokens) is not.
    said = row.stop.text(row.tokens)
    cached = executor.tokenizer.decode(row.tokens[:-1], skip_special_tokens=True)
    if cached.startswith(said):
        return _added(executor, last.answer_end.removeprefix(cached[len(said) :]), new)
    missing = said[len(cached) :] if said.startswith(cached) else ""
    return _added(executor, missing + last.answer_end, new)


def _added(executor: Executor, closing: str, new: Request) -> list[int]:
    text = closing + new.delta + new.question
    ids: list[int] = executor.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _longest(executor: Executor, turns: list[Prompt]) -> int:
    asked = [t.question for t in turns]
    pairs = pairwise(asked)
    # An answer's last token may have to be said again, in other pieces.
    return 8 + max((len(_added(executor, a.answer_end, b)) for a, b in pairs), default=1)
