"""Live dialogues: the cache grows over turns and is cut back to budget before each new one.

The model's own answers stay in the history. The first turn is prefilled once for all cells. From
then on the cache of a dialogue belongs to its cell, and the dialogues of one policy run in one
batch.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor

from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import Batch, DecodeRow
from kvbench.engine.evict import read_few, restore
from kvbench.engine.fidelity import FidelityRow, FullAnswer, answer_greedily
from kvbench.engine.models import model_info
from kvbench.engine.prefix import Prefix
from kvbench.engine.threads import now
from kvbench.engine.vision import remembered_bytes
from kvbench.errors import PluginError
from kvbench.harness.protocol import Request
from kvbench.runs.answers import Prompt, begun, by_cell, empty, ended, forks, key_of
from kvbench.runs.cell import Cell
from kvbench.runs.full_answers import answer_limit, unobserved
from kvbench.runs.index import Key
from kvbench.runs.schema import Response
from kvbench.runs.work import dialogue_key, dialogue_tokens, earlier_of
from kvbench.runs.worker import Worker
from kvbench.view import ModelInfo


@dataclass
class Dialogue:
    """One dialogue of one cell.

    Attributes:
        full_answers: What the full cache answers in its own dialogue, by turn; empty if it does not matter.
    """

    cell: Cell
    turns: list[Prompt]
    cache: RaggedCache
    logits: Tensor
    prefill_s: float
    full_answers: Sequence[FullAnswer] = ()


@torch.no_grad()
def answer_dialogues(worker: Worker, prompts: Sequence[Prompt], cells: Sequence[Cell]) -> None:
    """Hold every dialogue that has an open turn, for every cell.

    Args:
        worker: The model.
        prompts: The turns of all dialogues; those of one dialogue are adjacent and in order, one
            repeat after the other.
        cells: Cells at moment `turns`.
    """
    done_keys = worker.store.keys()
    queues: dict[str, list[Dialogue]] = {}
    turn_width = max(_longest(worker, list(same_dialogue)) for _, same_dialogue in groupby(prompts, _name))
    visual_tokens = {prompt.media: worker.visual_count(prompt.ids) for prompt in prompts if prompt.media}
    worker.batching.fit(
        max(len(prompt.ids) + prompt.limit for prompt in prompts),
        [turn_width],
        media_bytes=remembered_bytes(sum(visual_tokens.values())),
    )
    for _, dialogue_group in groupby(prompts, dialogue_key):
        repeats = [list(same_dialogue) for _, same_dialogue in groupby(dialogue_group, _name)]
        pending = [
            (cell, missing_turns)
            for cell in cells
            if cell.cell not in worker.failed
            and (
                missing_turns := [
                    turn_prompts
                    for turn_prompts in repeats
                    if any(key_of(cell, prompt) not in done_keys for prompt in turn_prompts)
                ]
            )
        ]
        if not pending:
            continue
        needs = frozenset(need for cell, _ in pending for need in cell.policy.needs)
        first_prompt = repeats[0][0]
        with worker.meter.contexts(dialogue_tokens(first_prompt, [cell for cell, _ in pending])):
            prefix, logits = worker.prefill(first_prompt.ids, needs, first_prompt.media)
            full_answers = _full_dialogue(worker, prefix, logits, repeats[0]) if worker.fidelity else []
            for cell, missing_turns in pending:
                cache = worker.compress(prefix, cell, first_prompt)
                if cache is None:
                    continue
                policy = str(cell.policy)
                for turns, forked in zip(missing_turns, forks(len(missing_turns), cache), strict=True):
                    compared_answers = full_answers if turns[0].repeat == 0 else []
                    dialogue = Dialogue(cell, turns, forked, logits, prefix.seconds, compared_answers)
                    # Padding would push tokens out of sliding windows.
                    if cache.forbids_gaps or _shows_alone(worker, turns):
                        _hold(worker, [dialogue], turn_width, done_keys)
                        continue
                    queue = queues.setdefault(policy, [])
                    queue.append(dialogue)
                    waiting_caches = (waiting.cache for queue in queues.values() for waiting in queue)
                    if not worker.batching.own.has_room(len(queue), waiting_caches):
                        _hold(worker, queues.pop(policy), turn_width, done_keys)
    for queue in queues.values():
        _hold(worker, queue, turn_width, done_keys)


def _full_dialogue(worker: Worker, prefix: Prefix, logits: Tensor, turns: Sequence[Prompt]) -> list[FullAnswer]:
    """Hold a dialogue on the full cache; return its answers.

    Args:
        prefix: The prefilled first turn.
        logits: Logits after it, `[1, vocabulary]`.
        turns: The turns of the dialogue.
    """
    prefix = unobserved(prefix)
    answers: list[FullAnswer] = []
    for turn, prompt in enumerate(turns):
        stop = worker.stop(prompt)
        if turn:
            row = DecodeRow(len(answers[-1].tokens), stop, [*answers[-1].tokens], answers[-1].reason)
            pixels = worker.pixels(prompt.request.delta_media)
            logits = prefix.extend(worker.tensor(_next(worker, turns, turn, row)), pixels=pixels)
        limit = answer_limit(prompt.request, worker.tokenizer)
        answers.append(answer_greedily(prefix, logits, limit, stop))
        if answers[-1].reason == "error":
            break
    return answers


def _shows_alone(worker: Worker, turns: Sequence[Prompt]) -> bool:
    """Return whether a dialogue shows media after its first turn that others cannot be shown with."""
    later_media = [medium for prompt in turns[1:] for medium in prompt.request.delta_media]
    return bool(later_media) and not worker.joins_images(later_media)


def _name(prompt: Prompt) -> tuple[str, int]:
    return prompt.request.dialogue, prompt.repeat


def _hold(worker: Worker, dialogues: list[Dialogue], turn_width: int, done_keys: Container[Key]) -> None:
    """Run dialogues of one policy to their end in one batch, and store the answers."""
    for dialogue in dialogues:
        earlier_turns = earlier_of(dialogue.turns)
        for prompt in dialogue.turns:
            if key_of(dialogue.cell, prompt) not in done_keys:
                worker.meter.begin(dialogue.cell, prompt, earlier_turns.get(id(prompt)))
    try:
        with worker.policy_call():  # the policy runs again before every turn
            compared = [dialogue for dialogue in dialogues if dialogue.full_answers]
            pairs = _turns(worker, compared, turn_width, fed=True) if compared else ()
            columns = {
                response.key: row.columns() for response, row in pairs if isinstance(row, FidelityRow) and not row.error
            }
            responses = [
                replace(response, **columns.get(response.key, {}))
                for response, _ in _turns(worker, dialogues, turn_width)
            ]
    except PluginError as error:
        cell_groups = by_cell(dialogues)
        if len(cell_groups) == 1:
            for dialogue in dialogues:
                worker.fail(dialogue.cell, dialogue.turns[0], str(error))
        else:
            for cell_group in cell_groups:  # run each cell alone to find out which one fails
                _hold(worker, cell_group, turn_width, done_keys)
        return
    new_responses = [response for response in responses if response.key not in done_keys]
    worker.done(new_responses, [dialogue.cell for dialogue in dialogues])


def _turns(
    worker: Worker, dialogues: list[Dialogue], turn_width: int, *, fed: bool = False
) -> Iterator[tuple[Response, DecodeRow]]:
    """Yield every answer of dialogues of one policy, and its row.

    Args:
        fed: Whether the full cache's answers are fed and compared instead of answers being generated.
    """
    runs_alone = _shows_alone(worker, dialogues[0].turns)
    batch_slots = 1 if runs_alone else worker.batching.own.slots(len(dialogues))
    batch = Batch(worker.model, [dialogue.cache for dialogue in dialogues], batch_slots)
    cache, eviction_state, model_facts = batch.cache, batch.cache.eviction_state, model_info(worker.model)
    last_rows: list[DecodeRow] = []
    failures = [False] * len(dialogues)
    turn_counts = [len(dialogue.full_answers if fed else dialogue.turns) for dialogue in dialogues]
    for turn in range(max(turn_counts)):
        alive = [
            turn < turn_count and not has_failed for turn_count, has_failed in zip(turn_counts, failures, strict=True)
        ]
        if not any(alive):
            return
        evict_seconds = 0.0 if eviction_state is None else eviction_state.seconds
        start_time = now(worker.device)
        if turn == 0:
            logits = torch.cat([dialogue.logits for dialogue in dialogues])
            start_responses = [
                begun(dialogue.cell, dialogue.turns[0], dialogue.cache, dialogue.prefill_s, 0.0)
                for dialogue in dialogues
            ]
        else:
            _cut(cache, dialogues, alive, model_facts)
            start_responses = [_state(cache, row_index, dialogue, turn) for row_index, dialogue in enumerate(dialogues)]
            turn_tokens = [
                _next(worker, dialogue.turns, turn, row) if is_alive else []
                for dialogue, is_alive, row in zip(dialogues, alive, last_rows, strict=True)
            ]
            longest_turn = max(len(new_tokens) for new_tokens in turn_tokens)
            pixels = worker.pixels_of_rows(
                dialogue.turns[turn].request.delta_media
                for dialogue, is_alive in zip(dialogues, alive, strict=True)
                if is_alive
            )
            logits = batch.feed(
                turn_tokens,
                longest_turn if cache.forbids_gaps or runs_alone else max(turn_width, longest_turn),
                pixels,
            )
        rows: list[DecodeRow] = []
        for dialogue, is_alive in zip(dialogues, alive, strict=True):
            prompt = dialogue.turns[min(turn, len(dialogue.turns) - 1)]
            if fed and is_alive:
                rows.append(FidelityRow.of(dialogue.full_answers[turn], worker.stop(prompt)))
            else:
                rows.append(worker.row(dialogue.cell, prompt))
            rows[-1].reason = "" if is_alive else "over"
        if fed:
            batch.measure(rows, logits)
        else:
            batch.answer(rows, logits, pause_ended=True)
        evict_seconds = (0.0 if eviction_state is None else eviction_state.seconds) - evict_seconds
        row_seconds = (now(worker.device) - start_time - evict_seconds) / max(1, sum(alive))
        for start_response, row, is_alive in zip(start_responses, rows, alive, strict=True):
            if is_alive:
                yield replace(ended(start_response, row, row_seconds), compress_s=evict_seconds / sum(alive)), row
        last_rows = rows
        failures = [has_failed or bool(row.error) for has_failed, row in zip(failures, rows, strict=True)]


def _cut(cache: RaggedCache, dialogues: list[Dialogue], alive: list[bool], model_facts: ModelInfo) -> None:
    """Cut every dialogue that continues back to its share of the tokens seen so far.

    With a reader nothing is cut: the queries of the new turn read that share.
    """
    policy = dialogues[0].cell.policy
    if not policy.has_budget:
        return
    token_counts, visual_counts = cache.lengths().tolist(), cache.visual_tokens()
    cells = [dialogues[min(row_index, len(dialogues) - 1)].cell for row_index in range(cache.batch)]
    budgets = [
        cell.budget.per_head(token_count, visual_count)
        for cell, token_count, visual_count in zip(cells, token_counts, visual_counts, strict=True)
    ]
    if cache.eviction_state is None:
        read_few(cache, policy, model_facts, budgets)
        return
    cache.eviction_state.budget[: len(dialogues)] = budgets[: len(dialogues)]
    restore(cache, [row_index for row_index, is_alive in enumerate(alive) if is_alive])
    # Everything from here on belongs to the new turn.
    cache_width = cache.get_seq_length()
    cache.turns = [[*starts, cache_width] for starts in cache.turns or [[]] * cache.batch]


def _state(cache: RaggedCache, row_index: int, dialogue: Dialogue, turn: int) -> Response:
    """What a dialogue holds when a turn begins."""
    prompt = dialogue.turns[min(turn, len(dialogue.turns) - 1)]
    held_entries = cache.live_entries(row_index)
    eviction_state, budget_entries = cache.eviction_state, held_entries
    if eviction_state is not None:
        budget_entries = eviction_state.heads * eviction_state.budget[row_index]
    elif cache.readings and cache.budget_entries is not None:
        budget_entries = cache.budget_entries[row_index]
    return replace(
        empty(dialogue.cell, prompt),
        context_tokens=int(cache.lengths()[row_index]),
        question_tokens=len(prompt.question_ids),
        budget_entries=budget_entries,
        held_entries=held_entries,
        **cache.footprint(row_index),
    )


def _next(worker: Worker, turns: Sequence[Prompt], turn: int, row: DecodeRow) -> list[int]:
    """Tokens from the end of the last answer to the end of the next question."""
    last_request, next_request = turns[turn - 1].request, turns[turn].request
    if row.reason == "length":
        return row.tokens[-1:] + _added(worker, last_request.answer_end, next_request)
    # The token that ended the answer is not in the cache and stays out: the history closes an
    # answer in its own way. Text of the answer that came with that token is fed again. Text of the
    # closing that is in the cache already (a stop string of several tokens) is not.
    stop_text = row.stop.text(row.tokens)
    cached_text = worker.tokenizer.decode(row.tokens[:-1], skip_special_tokens=True)
    if cached_text.startswith(stop_text):
        return _added(
            worker,
            last_request.answer_end.removeprefix(cached_text[len(stop_text) :]),
            next_request,
        )
    missing_text = stop_text[len(cached_text) :] if stop_text.startswith(cached_text) else ""
    return _added(worker, missing_text + last_request.answer_end, next_request)


def _added(worker: Worker, answer_end: str, next_request: Request) -> list[int]:
    turn_text = answer_end + worker.expanded(next_request.delta, next_request.delta_media) + next_request.question
    token_ids: list[int] = worker.tokenizer(turn_text, add_special_tokens=False, verbose=False)["input_ids"]
    return token_ids


def _longest(worker: Worker, turns: list[Prompt]) -> int:
    request_pairs = pairwise([turn.request for turn in turns])
    # An answer's last token may have to be fed again, in other pieces.
    return 8 + max(
        (len(_added(worker, earlier.answer_end, later)) for earlier, later in request_pairs),
        default=1,
    )
