"""Live dialogues: the cache grows over turns and is cut back to budget before each new one.

The model's own answers stay in the history. The first turn is prefilled once for all cells. From
then on the cache of a dialogue belongs to its cell, and the dialogues of one policy run in one
batch.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise

import torch
from torch import Tensor

from kvbench.engine.cache import RaggedCache
from kvbench.engine.clock import now
from kvbench.engine.decode import Batch, Row
from kvbench.engine.evict import read_few, restore
from kvbench.engine.models import model_info
from kvbench.errors import PluginError
from kvbench.harness.protocol import Request
from kvbench.runs.answers import Prompt, begun, by_cell, empty, ended, forks, key_of
from kvbench.runs.cell import Cell
from kvbench.runs.index import Key
from kvbench.runs.store import Response
from kvbench.runs.worker import Prefilled, Worker
from kvbench.view import ModelInfo


@dataclass
class Dialogue:
    """One dialogue of one cell."""

    cell: Cell
    turns: list[Prompt]
    cache: RaggedCache
    logits: Tensor
    prefill_s: float


@torch.no_grad()
def answer_dialogues(worker: Worker, prompts: Sequence[Prompt], cells: Sequence[Cell]) -> None:
    """Hold every dialogue that has an open turn, for every cell.

    Args:
        worker: The model.
        prompts: The turns of all dialogues; those of one dialogue are adjacent and in order, one
            repeat after the other.
        cells: Cells at moment `turns`.
    """
    done = worker.store.keys()
    lanes: dict[str, list[Dialogue]] = {}
    width = max(_longest(worker, list(g)) for _, g in groupby(prompts, _name))
    worker.batching.fit(max(len(p.ids) + p.limit for p in prompts), [width])
    for _, group in groupby(prompts, lambda p: p.request.dialogue):
        repeats = [list(g) for _, g in groupby(group, _name)]
        wanted = [
            (cell, missing)
            for cell in cells
            if cell.cell not in worker.failed
            and (missing := [t for t in repeats if any(key_of(cell, p) not in done for p in t)])
        ]
        if not wanted:
            continue
        needs = frozenset(need for cell, _ in wanted for need in cell.policy.needs)
        first = repeats[0][0]
        prefilled = Prefilled(partial(worker.prefill, first.ids, needs, first.media))
        for cell, missing in wanted:
            prefix = prefilled.intact()
            cache = worker.compress(prefix, cell, first)
            if cache is None:
                continue
            policy = str(cell.policy)
            for turns, copy in zip(missing, forks(len(missing), cache), strict=True):
                lane = lanes.setdefault(policy, [])
                lane.append(Dialogue(cell, turns, copy, prefilled.logits, prefix.seconds))
                waiting = (d.cache for lane in lanes.values() for d in lane)
                # Padding would push tokens out of sliding windows, and a forward takes the images
                # of one dialogue: there a dialogue goes alone.
                single = cache.slides or _shows(turns)
                if single or not worker.batching.has_room(len(lane), waiting):
                    _hold(worker, lanes.pop(policy), width, done)
    for lane in lanes.values():
        _hold(worker, lane, width, done)


def _shows(turns: Sequence[Prompt]) -> bool:
    """Whether a dialogue shows images or videos."""
    return any(prompt.media for prompt in turns)


def _name(prompt: Prompt) -> tuple[str, int]:
    return prompt.request.dialogue, prompt.repeat


def _hold(worker: Worker, dialogues: list[Dialogue], width: int, done: Container[Key]) -> None:
    """Run dialogues of one policy to their end in one batch, and store the answers."""
    try:
        with worker.policy_call():  # the policy runs again before every turn
            responses = list(_turns(worker, dialogues, width))
    except PluginError as error:
        groups = by_cell(dialogues)
        if len(groups) == 1:
            for d in dialogues:
                worker.fail(d.cell, d.turns[0], str(error))
        else:
            for group in groups:  # run each cell alone to find out which one fails
                _hold(worker, group, width, done)
        return
    missing = [r for r in responses if r.key not in done]
    worker.done(missing, [d.cell for d in dialogues])


def _turns(worker: Worker, dialogues: list[Dialogue], width: int) -> Iterator[Response]:
    shows = _shows(dialogues[0].turns)
    slots = 1 if shows else worker.batching.slots(len(dialogues))
    batch = Batch(worker.model, [d.cache for d in dialogues], slots)
    cache, upkeep, info = batch.cache, batch.cache.upkeep, model_info(worker.model)
    last_rows: list[Row] = []
    failed = [False] * len(dialogues)
    for turn in range(max(len(d.turns) for d in dialogues)):
        alive = [turn < len(d.turns) and not bad for d, bad in zip(dialogues, failed, strict=True)]
        if not any(alive):
            return
        cuts = 0.0 if upkeep is None else upkeep.seconds
        began = now(worker.device)
        if turn == 0:
            logits = torch.cat([d.logits for d in dialogues])
            states = [begun(d.cell, d.turns[0], d.cache, d.prefill_s, 0.0) for d in dialogues]
        else:
            _cut(cache, dialogues, alive, info)
            states = [_state(cache, i, d, turn) for i, d in enumerate(dialogues)]
            more = [
                _next(worker, d, turn, row) if ok else []
                for d, ok, row in zip(dialogues, alive, last_rows, strict=True)
            ]
            most = max(len(m) for m in more)
            pixels = worker.pixels(dialogues[0].turns[turn].request.delta_media) if shows else None
            logits = batch.feed(more, most if cache.slides or shows else max(width, most), pixels)
        rows = [worker.row(d.cell, d.turns[min(turn, len(d.turns) - 1)]) for d in dialogues]
        for row, ok in zip(rows, alive, strict=True):
            row.reason = "" if ok else "over"
        batch.answer(rows, logits, pause=True)
        cuts = (0.0 if upkeep is None else upkeep.seconds) - cuts
        each = (now(worker.device) - began - cuts) / max(1, sum(alive))
        for state, row, ok in zip(states, rows, alive, strict=True):
            if ok:
                yield replace(ended(state, row, each), compress_s=cuts / sum(alive))
        last_rows = rows
        failed = [bad or bool(row.error) for bad, row in zip(failed, rows, strict=True)]


def _cut(cache: RaggedCache, dialogues: list[Dialogue], alive: list[bool], info: ModelInfo) -> None:
    """Cut every dialogue that continues back to its share of the tokens seen so far.

    With a reader nothing is cut: the queries of the new turn read that share.
    """
    policy = dialogues[0].cell.policy
    if not policy.has_budget:
        return
    seen, visual = cache.lengths().tolist(), cache.visual_tokens()
    cells = [dialogues[min(i, len(dialogues) - 1)].cell for i in range(cache.batch)]
    allowed = [c.budget.per_head(n, v) for c, n, v in zip(cells, seen, visual, strict=True)]
    if cache.upkeep is None:
        read_few(cache, policy, info, allowed)
        return
    cache.upkeep.budget[: len(dialogues)] = allowed[: len(dialogues)]
    restore(cache, [i for i, ok in enumerate(alive) if ok])
    # Everything from here on belongs to the new turn.
    width = cache.get_seq_length()
    cache.turns = [[*starts, width] for starts in cache.turns or [[]] * cache.batch]


def _state(cache: RaggedCache, row: int, dialogue: Dialogue, turn: int) -> Response:
    """What a dialogue holds when a turn begins."""
    prompt = dialogue.turns[min(turn, len(dialogue.turns) - 1)]
    held = cache.live_entries(row)
    upkeep, allowed = cache.upkeep, held
    if upkeep is not None:
        allowed = upkeep.heads * upkeep.budget[row]
    elif cache.readings and cache.budget_entries is not None:
        allowed = cache.budget_entries[row]
    return replace(
        empty(dialogue.cell, prompt),
        context_tokens=int(cache.lengths()[row]),
        question_tokens=len(prompt.question_ids),
        budget_entries=allowed,
        held_entries=held,
        kv_bytes_live=cache.live_bytes(row),
        kv_bytes_read=cache.read_bytes(row),
        kv_bytes_allocated=cache.allocated_bytes(row),
        kv_bytes_full=cache.full_bytes(row),
        visual_tokens=cache.visual_tokens()[row],
        held_visual=cache.visual_entries(row),
    )


def _next(worker: Worker, dialogue: Dialogue, turn: int, row: Row) -> list[int]:
    """Tokens from the end of the last answer to the end of the next question."""
    last, new = dialogue.turns[turn - 1].request, dialogue.turns[turn].request
    if row.reason == "length":
        return row.tokens[-1:] + _added(worker, last.answer_end, new)
    # The token that ended the answer is not in the cache and stays out: the history closes an
    # answer in its own way. Text of the answer that came with that token is fed again. Text of the
    # closing that is in the cache already (a stop string of several tokens) is not.
    said = row.stop.text(row.tokens)
    cached = worker.tokenizer.decode(row.tokens[:-1], skip_special_tokens=True)
    if cached.startswith(said):
        return _added(worker, last.answer_end.removeprefix(cached[len(said) :]), new)
    missing = said[len(cached) :] if said.startswith(cached) else ""
    return _added(worker, missing + last.answer_end, new)


def _added(worker: Worker, closing: str, new: Request) -> list[int]:
    text = closing + worker.expanded(new.delta, new.delta_media) + new.question
    ids: list[int] = worker.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _longest(worker: Worker, turns: list[Prompt]) -> int:
    pairs = pairwise([t.request for t in turns])
    # An answer's last token may have to be fed again, in other pieces.
    return 8 + max((len(_added(worker, a.answer_end, b)) for a, b in pairs), default=1)
