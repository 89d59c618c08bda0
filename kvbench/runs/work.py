"""Work of a run: the missing responses, and the tokens that the model will read and write for them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from kvbench.engine.eviction_state import tail_of
from kvbench.engine.pruning import prunes
from kvbench.engine.replay import replayed_tokens
from kvbench.plugin import Replay
from kvbench.runs.answers import Prompt, by_request, key_of, leads, sees_question
from kvbench.runs.cell import Cell
from kvbench.runs.index import Key
from kvbench.runs.planning import Job, Stage
from kvbench.runs.prompts import Prompts

Wanted = list[tuple[Cell, list[Prompt]]]
"""Cells with the prompts that they have not answered yet."""


class Work(NamedTuple):
    """Planned tokens.

    Attributes:
        read: Tokens of contexts, and of questions that are read before the cache is compressed; those that a policy
            reads a second time count twice.
        answered: Tokens of answers up to their limits, and of questions that follow a compressed cache; with fidelity,
            the full cache's own answers as well, once alone and once for every cell.
    """

    read: int = 0
    answered: int = 0

    @property
    def tokens(self) -> int:
        """Return all tokens."""
        return self.read + self.answered


def total_work(parts: Iterable[Work]) -> Work:
    """Return the sum of planned tokens."""
    works = list(parts)
    return Work(sum(work.read for work in works), sum(work.answered for work in works))


@dataclass(frozen=True)
class Missing:
    """Missing responses of a job.

    Attributes:
        prompts: Its prompts that lack a response of some cell.
        responses: Number of missing responses.
        steps: Tokens of these responses if none ends before its limit.
        work: Tokens that the model will read and write.
    """

    job: Job
    prompts: Prompts
    responses: int
    steps: int
    work: Work

    @property
    def tokens(self) -> int:
        """Return the tokens of the contexts to prefill."""
        return sum({hash(prompt.context_ids): len(prompt.context_ids) for prompt in self.prompts}.values())


def missing_of(stage: Stage, done_keys: Container[Key], *, fidelity: bool) -> list[Missing]:
    """Return the missing responses of each job in a stage; complete jobs are left out.

    Args:
        stage: A model with its jobs.
        done_keys: Keys of the existing responses.
        fidelity: Whether cells are also compared with the full cache on its own answers.
    """
    return [missing for job in stage.jobs if (missing := _missing_of(job, done_keys, fidelity)).responses]


def _missing_of(job: Job, done_keys: Container[Key], fidelity: bool) -> Missing:
    read = answered = responses = steps = 0
    prompt_indices: set[int] = set()
    for has_turns in (True, False):
        cells = [cell for cell in job.cells if (cell.moment == "turns") is has_turns]
        if not cells:
            continue
        end_index = 0
        for _, prompt_group in groupby(job.prompts, key=dialogue_key if has_turns else context_key):
            prompts = list(prompt_group)
            start_index, end_index = end_index, end_index + len(prompts)
            wanted = unanswered(cells, prompts, done_keys)
            if not wanted:
                continue
            open_cells = [cell for cell, _ in wanted]
            read += dialogue_tokens(prompts[0], open_cells) if has_turns else context_tokens(wanted)
            pending = [(cell, prompt) for cell, missing_prompts in wanted for prompt in missing_prompts]
            earlier_turns = earlier_of(prompts) if has_turns else {}
            answered += sum(
                answer_tokens(cell, prompt, earlier_turns.get(id(prompt)), fidelity) for cell, prompt in pending
            )
            if fidelity:  # the full cache's own answers, one for all cells
                own_answers = {id(prompt): prompt for _, prompt in pending if is_compared(prompt)}.values()
                answered += sum(len(prompt.question_ids) + prompt.steps for prompt in own_answers)
            steps += sum(prompt.steps for _, prompt in pending)
            responses += len(pending)
            missing_ids = {id(prompt) for _, prompt in pending}
            prompt_indices.update(
                index for index, prompt in enumerate(prompts, start_index) if id(prompt) in missing_ids
            )
    return Missing(job, job.prompts.part(sorted(prompt_indices)), responses, steps, Work(read, answered))


def unanswered(cells: Iterable[Cell], prompts: Sequence[Prompt], done_keys: Container[Key]) -> Wanted:
    """Return the cells that have not answered some of the prompts, each with these prompts."""
    pending = [(cell, [prompt for prompt in prompts if key_of(cell, prompt) not in done_keys]) for cell in cells]
    return [(cell, missing_prompts) for cell, missing_prompts in pending if missing_prompts]


def context_key(prompt: Prompt) -> tuple[object, ...]:
    """Return what prompts of one context have in common; without a context, those of one request."""
    if prompt.context_ids:
        return prompt.context_ids, prompt.media
    return prompt.request.sample_id, prompt.request.question_id


def dialogue_key(prompt: Prompt) -> str:
    """Return what the turns of one dialogue have in common, also those of its repeats."""
    return prompt.request.dialogue


def context_tokens(wanted: Wanted) -> int:
    """Return the tokens of the forwards that prefill one context and its questions for cells of all moments but turns.

    Without a context there are none: whole texts count as answers.
    """
    context_length = len(wanted[0][1][0].context_ids)
    if not context_length:
        return 0
    shared: Wanted = []
    chunked: Wanted = []
    token_count = 0
    for cell, prompts in wanted:
        if prunes(cell.policy):
            token_count += sum(
                len(repeats[0].ids) if cell.moment == "question" else 0 for _, repeats in _requests(cell, prompts)
            )
            token_count += context_length if cell.moment != "question" else 0
        else:
            (chunked if cell.moment == "chunked" else shared).append((cell, prompts))
    if shared:
        token_count += context_length + _replayed(context_length, _early_cells(shared))
        by_question: dict[tuple[int, ...], list[Cell]] = {}
        for cell, prompts in shared:
            for prompt in prompts:
                if sees_question(cell, prompt):
                    by_question.setdefault(prompt.question_ids, []).append(cell)
        for question_ids, cells in by_question.items():
            token_count += len(question_ids) + _replayed(context_length + len(question_ids), cells)
    return token_count + _chunked_tokens(chunked)


def _requests(cell: Cell, prompts: Iterable[Prompt]) -> list[tuple[Cell, list[Prompt]]]:
    return by_request((cell, prompt) for prompt in prompts)


def _early_cells(wanted: Wanted) -> Iterator[Cell]:
    """Yield the cells that compress the cache of a context before a question."""
    for cell, prompts in wanted:
        if not all(sees_question(cell, prompt) for prompt in prompts):
            yield cell


def _chunked_tokens(chunked: Wanted) -> int:
    """Return the tokens of prefills in chunks, whose first chunks are shared."""
    first_chunks: set[tuple[int, ...]] = set()
    token_count = 0
    for cell, prompts in chunked:
        for _, repeats in _requests(cell, prompts):
            token_ids = repeats[0].ids
            trailing_tokens = tail_of(cell.policy, cell.budget, len(token_ids))
            first_chunk = token_ids[: min(cell.chunk, len(token_ids) - trailing_tokens)]
            first_chunks.add(first_chunk)
            token_count += len(token_ids) - len(first_chunk)
    return token_count + sum(map(len, first_chunks))


def dialogue_tokens(first_turn: Prompt, cells: Iterable[Cell]) -> int:
    """Return the tokens of the forwards that prefill the first turn of a dialogue for cells at moment `turns`."""
    return len(first_turn.ids) + _replayed(len(first_turn.ids), cells)


def _replayed(token_count: int, cells: Iterable[Cell]) -> int:
    """Return the tokens that policies read a second time; a replay serves all policies that need it."""
    needs = {need for cell in cells for need in cell.policy.needs if isinstance(need, Replay)}
    return sum(replayed_tokens(token_count, need.chunk) for need in needs)


def earlier_of(turns: Sequence[Prompt]) -> dict[int, Prompt]:
    """Return the turn before each turn of a dialogue but the first, by `id`; repeats follow one another."""
    return {id(later): earlier for earlier, later in pairwise(turns) if earlier.repeat == later.repeat}


def is_compared(prompt: Prompt) -> bool:
    """Return whether fidelity is measured on the answer to a prompt."""
    return not (prompt.branches or prompt.given_ids or prompt.repeat)


def answer_tokens(cell: Cell, prompt: Prompt, earlier_turn: Prompt | None = None, fidelity: bool = False) -> int:
    """Return the tokens of a response up to its limit, with the question if it follows the compressed cache.

    Args:
        cell: The cell.
        prompt: The prompt.
        earlier_turn: At moment `turns`, the turn before; None for the first, whose prompt is prefilled.
        fidelity: Whether the full cache's own answer is fed as well.
    """
    if fidelity and is_compared(prompt):
        return 2 * answer_tokens(cell, prompt, earlier_turn)
    if cell.moment == "turns":  # about as many as with the answer of the data in place of the model's own
        new_tokens = 0 if earlier_turn is None else max(1, len(prompt.ids) - len(earlier_turn.ids))
        return new_tokens + prompt.steps
    question_length = 0 if sees_question(cell, prompt) or cell.moment == "chunked" else len(prompt.question_ids)
    if not prompt.branches:
        return question_length + prompt.steps
    branches = [branch for branch in prompt.branches if not branch.alone]
    lead_ids = leads(prompt)
    if len(lead_ids) == 1:  # it is read once, before the texts branch
        fed_tokens = sum(map(len, lead_ids)) + sum(len(branch.answer_ids) - 1 for branch in branches)
    else:
        fed_tokens = sum(len(branch.input_ids) for branch in branches)
    return question_length + fed_tokens + 1
