"""Conversion of a task's requests to prompts: tokenised, truncated to the model, one per repeat."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, overload

from kvbench.data.spool import Spool
from kvbench.engine.vision import Vision
from kvbench.errors import UserError
from kvbench.harness.encode import Branch, encode_continuations, encode_windows, split_encode
from kvbench.harness.protocol import LoadedTask, Request
from kvbench.progress import Late, Reporter
from kvbench.runs.answers import Prompt
from kvbench.runs.generation import Truncation

_MOST_UNKNOWN = 0.1
"""Fraction of unknown tokens from which on a model has not understood its prompts."""


@dataclass(frozen=True)
class Window:
    """Context window of a model.

    Attributes:
        model: Name of the model.
        tokens: Limit of prompt and answer together; 0: unknown.
    """

    model: str
    tokens: int

    def check(self, length: int, label: str, advice: str = "a smaller --length") -> None:
        """Refuse a prompt that does not fit.

        Raises:
            UserError: The prompt does not fit; the message recommends `advice`.
        """
        if self.tokens and length > self.tokens:
            raise UserError(
                f"{label}: {length} tokens do not fit into the {self.tokens} of model {self.model}; "
                f"nothing is truncated, so use {advice}"
            )


class Prompts(Sequence[Prompt]):
    """The prompts of a task, with tokens on disk so that memory holds few at a time.

    Every access creates a new prompt object.

    Attributes:
        shows: Whether a prompt has images or videos.
        dialogues: Whether all prompts are turns of dialogues.
        rolls: Whether whole texts are measured.
        parted: Whether all prompts have a context and a question.
        longest: Tokens of the longest prompt, without its answer, or of the longest window of a whole text.
        limit: Maximum number of tokens after a prompt.
        only_measured: Whether texts are measured after every prompt, and no answer is generated.
        first_answered: Index of the first request that asks for an answer; 0 if all are measured.
        has_targets: Whether every request has a reference answer.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.shows, self.dialogues, self.rolls, self.parted = False, True, False, True
        self.longest = self.limit = self.first_answered = 0
        self.only_measured = self.has_targets = True
        self._requests = requests
        self._ids: Spool[tuple[bytes, ...]] = Spool()
        self._context_lengths, self._question_lengths = array("Q"), array("Q")  # of each request
        self._order = array("Q")  # the request of each prompt
        self._repeats = array("Q")

    def tokenised(self, prompt: Prompt) -> None:
        """Store the tokens of the next request."""
        branch_parts = ((branch.lead_ids, branch.answer_ids) for branch in prompt.branches)
        token_parts = (prompt.context_ids, prompt.question_ids, prompt.given_ids, *chain.from_iterable(branch_parts))
        if self.only_measured and not prompt.request.measures:
            self.only_measured, self.first_answered = False, len(self._ids)
        self._ids.append(tuple(array("I", ids).tobytes() for ids in token_parts))
        context_length = prompt.limit if prompt.request.rolling else len(prompt.context_ids)
        self._context_lengths.append(context_length)
        self._question_lengths.append(len(prompt.question_ids))
        self.shows |= bool(prompt.media)
        self.dialogues &= bool(prompt.request.dialogue)
        self.has_targets &= bool(prompt.request.target)
        self.rolls |= prompt.request.rolling
        self.parted &= bool(prompt.context_ids and prompt.question_ids)
        self.longest = max(self.longest, context_length + len(prompt.question_ids))
        self.limit = max(self.limit, prompt.limit)

    def lengths(self) -> list[tuple[int, int]]:
        """Return the tokens of every prompt's context (or longest window) and question, without reading the disk."""
        return [(self._context_lengths[i], self._question_lengths[i]) for i in self._order]

    def visual_tokens(self, vision: Vision) -> list[int]:
        """Return the number of visual tokens of every prompt."""
        return [sum(vision.counts(self._requests[i].media)) for i in self._order]

    def ask(self, request_index: int, repeat: int) -> None:
        """Add a prompt: a repeat of a request, by its index."""
        self._order.append(request_index)
        self._repeats.append(repeat)

    def part(self, positions: Iterable[int]) -> Prompts:
        """Return some of the prompts."""
        selected = copy.copy(self)
        selected._order, selected._repeats = array("Q"), array("Q")
        for position in positions:
            selected.ask(self._order[position], self._repeats[position])
        return selected

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        positions = range(len(self))[index]
        return self._made(positions) if isinstance(positions, int) else [*map(self._made, positions)]

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._made, range(len(self)))

    def _made(self, position: int) -> Prompt:
        request_index = self._order[position]
        request = self._requests[request_index]
        context_ids, question_ids, given_ids, *branch_parts = (
            tuple(array("I", packed_ids)) for packed_ids in self._ids[request_index]
        )
        branch_pairs = [*zip(branch_parts[::2], branch_parts[1::2], strict=True)]
        alone = [not context_ids or continuation.alone for continuation in request.continuations]
        branches = [
            Branch(lead_ids, answer_ids, is_alone)
            for (lead_ids, answer_ids), is_alone in zip(branch_pairs, alone or [True] * len(branch_pairs), strict=True)
        ]
        return Prompt(request, context_ids, question_ids, given_ids, self._repeats[position], tuple(branches))


def prompts_of(
    task: LoadedTask,
    tokenizer: Any,
    window: Window,
    truncate: str | None,
    notify: Callable[[str], None],
    vision: Vision | None = None,
    reporter: Reporter | None = None,
) -> tuple[Prompts, int]:
    """Tokenise a task's requests.

    Args:
        tokenizer: Tokenizer of the model.
        window: Window of the model.
        truncate: Spelling of a `Truncation`; None refuses prompts that do not fit.
        notify: Receives a line if contexts were truncated.
        vision: Turns media into tokens; None for a text model.
        reporter: Progress reporter, used once tokenising takes seconds.

    Returns:
        One prompt per request and repeat (all turns of a dialogue per repeat), and the number of truncated contexts.

    Raises:
        UserError: A context is empty, a continuation has no tokens, a prompt is longer than the model's window, or a
            context with images would be truncated.
    """
    prompts = Prompts(task.requests)
    unknown_id = getattr(tokenizer, "unk_token_id", None)
    truncated = token_count = unknown_count = 0
    progress = Late(reporter, len(task.requests), f"{task.name}: tokenising prompts")
    truncation = Truncation.parse(truncate) if truncate is not None else None
    token_limit = min(filter(None, (window.tokens, truncation.tokens if truncation else 0)), default=0)
    for request in task.requests:
        sample_label = f"{request.task}, {request.sample_id}"
        try:
            prompt = prompt_of(request, tokenizer, vision, window.tokens)
        except UserError as error:
            if not (request.media or request.continuations or request.rolling):
                raise
            raise UserError(f"{sample_label}: {error}") from error
        prompt_ids = prompt.ids
        token_count += len(prompt_ids)
        unknown_count += prompt_ids.count(unknown_id)
        if request.rolling:  # its windows fit
            prompts.tokenised(prompt)
            progress.advance()
            continue
        reserved_tokens = len(prompt.question_ids) + prompt.limit
        available = token_limit - reserved_tokens
        if truncation is not None and token_limit and len(prompt.context_ids) > available:
            if request.media:
                raise UserError(
                    f"{sample_label}: a context with images or videos is never truncated; "
                    "leave out --truncate, or choose samples that fit"
                )
            if available < 1:
                raise UserError(
                    f"{sample_label}: question and answer alone have {reserved_tokens} tokens and "
                    f"only {token_limit} fit; use a smaller --max-new-tokens or another --truncate"
                )
            prompt = replace(prompt, context_ids=tuple(truncation.cut([*prompt.context_ids], available)))
            truncated += 1
        advice = "a smaller --length"
        if not task.length:
            advice = "--truncate middle, a smaller --max-new-tokens or a shorter context"
        window.check(len(prompt.context_ids) + reserved_tokens, sample_label, advice)
        prompts.tokenised(prompt)
        progress.advance()
    progress.stop()
    if unknown_count > _MOST_UNKNOWN * token_count:
        notify(
            f"{task.name}: {unknown_count / token_count:.0%} of the prompts' tokens are words that the model does not "
            "know, so results say little; use another --model"
        )
    if truncated:
        notify(
            f"{task.name}: {truncated} of {len(task.requests)} contexts were truncated in the middle, "
            f"so that prompt and answer fit into {token_limit} tokens"
        )
    for position, repeat in _repeated(task.requests):
        prompts.ask(position, repeat)
    return prompts, truncated


def prompt_of(request: Request, tokenizer: Any, vision: Vision | None, window_tokens: int) -> Prompt:
    """Tokenise a request.

    Args:
        tokenizer: Tokenizer of the model.
        vision: Turns media into tokens; None for a text model.
        window_tokens: The model's maximum number of tokens; 0: unknown.

    Raises:
        UserError: Its context or text is empty, or a medium cannot be read.
    """
    if request.rolling:
        windows = encode_windows(tokenizer, request.context, window_tokens)
        if not windows:
            raise UserError("the text has no tokens, so nothing can be measured; leave it out")
        return Prompt(request, (), (), branches=tuple(windows))
    context_text = request.context
    if request.media:
        assert vision is not None
        context_text = vision.expand(context_text, request.media)
    if request.continuations:
        context_ids, question_ids, branches = encode_continuations(tokenizer, context_text, request.continuations)
        return Prompt(request, tuple(context_ids), tuple(question_ids), branches=tuple(branches))
    text_parts = [context_text, request.question, *filter(None, [request.given])]
    context_ids, question_ids, *given_parts = split_encode(tokenizer, *text_parts)
    given_ids = tuple(given_parts[0]) if given_parts else ()
    if not question_ids:  # the answer needs a token to start from
        context_ids, question_ids = context_ids[:-1], context_ids[-1:]
    if not context_ids:
        raise UserError(f"{request.task}, {request.sample_id}: the context has no tokens")
    return Prompt(request, tuple(context_ids), tuple(question_ids), given_ids)


def _repeated(requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    """Yield the request index and repeat of every prompt; the turns of a dialogue are repeated together."""
    request_facts = (
        (request_index, request.dialogue or request_index, request.repeats)
        for request_index, request in enumerate(requests)
    )
    for _, fact_group in groupby(request_facts, lambda fact: fact[1]):
        same_dialogue = [*fact_group]
        for repeat in range(same_dialogue[0][2]):
            yield from ((position, repeat) for position, _, _ in same_dialogue)
