"""From a task's requests to prompts: tokenised, made to fit the model, one for each repeat."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, overload

from kvbench.data.spool import Spool
from kvbench.engine.vision import Vision
from kvbench.errors import UserError
from kvbench.harness.encode import split_encode
from kvbench.harness.protocol import LoadedTask, Request
from kvbench.progress import Late, Reporter
from kvbench.runs.answers import Prompt
from kvbench.runs.generation import Truncation


@dataclass(frozen=True)
class Window:
    """How many tokens a model takes.

    Attributes:
        model: Name of the model.
        tokens: Limit of prompt and answer together; 0: unknown.
    """

    model: str
    tokens: int

    def check(self, length: int, what: str, advice: str = "a smaller --length") -> None:
        """Refuse a prompt that does not fit.

        Raises:
            UserError: The prompt does not fit; the message recommends `advice`.
        """
        if self.tokens and length > self.tokens:
            raise UserError(
                f"{what}: {length} tokens do not fit into the {self.tokens} of model {self.model}; "
                f"nothing is truncated, so use {advice}"
            )


class Prompts(Sequence[Prompt]):
    """The prompts of a task: their tokens lie on the disk, so that memory holds few at a time.

    Every access makes a prompt anew.

    Args:
        requests: What is asked.

    Attributes:
        shows: Whether a prompt has images or videos.
        dialogues: Whether all prompts are turns of dialogues.
        longest: Tokens of the longest prompt, without its answer.
        limit: Most tokens that follow a prompt.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.shows, self.dialogues = False, True
        self.longest = self.limit = 0
        self._requests = requests
        self._ids: Spool[tuple[bytes, ...]] = Spool()
        self._context_lengths, self._question_lengths = array("Q"), array("Q")  # of each request
        self._order = array("Q")  # the request of each prompt
        self._repeats = array("Q")

    def tokenised(self, prompt: Prompt) -> None:
        """Take the tokens of the next request."""
        parts = (prompt.context_ids, prompt.question_ids, prompt.given_ids)
        self._ids.append(tuple(array("I", ids).tobytes() for ids in parts))
        self._context_lengths.append(len(prompt.context_ids))
        self._question_lengths.append(len(prompt.question_ids))
        self.shows |= bool(prompt.media)
        self.dialogues &= bool(prompt.request.dialogue)
        self.longest = max(self.longest, len(prompt.ids))
        self.limit = max(self.limit, prompt.limit)

    def lengths(self) -> list[tuple[int, int]]:
        """Return the tokens of every prompt's context and question, without reading the disk."""
        return [(self._context_lengths[at], self._question_lengths[at]) for at in self._order]

    def visual_tokens(self, vision: Vision) -> list[int]:
        """Return the number of visual tokens of every prompt."""
        return [sum(vision.counts(self._requests[at].media)) for at in self._order]

    def ask(self, request: int, repeat: int) -> None:
        """Add a prompt: a repeat of a request, by its place."""
        self._order.append(request)
        self._repeats.append(repeat)

    def part(self, places: Iterable[int]) -> Prompts:
        """Some of the prompts."""
        made = copy.copy(self)
        made._order, made._repeats = array("Q"), array("Q")
        for place in places:
            made.ask(self._order[place], self._repeats[place])
        return made

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...

    @overload
    def __getitem__(self, place: slice) -> list[Prompt]: ...

    def __getitem__(self, place: int | slice) -> Prompt | list[Prompt]:
        places = range(len(self))[place]
        return self._made(places) if isinstance(places, int) else [*map(self._made, places)]

    def __iter__(self) -> Iterator[Prompt]:
        return map(self._made, range(len(self)))

    def _made(self, place: int) -> Prompt:
        at = self._order[place]
        context, question, given = (tuple(array("I", ids)) for ids in self._ids[at])
        return Prompt(self._requests[at], context, question, given, self._repeats[place])


def prompts_of(
    task: LoadedTask,
    tokenizer: Any,
    window: Window,
    truncate: str | None,
    say: Callable[[str], None],
    vision: Vision | None = None,
    reporter: Reporter | None = None,
) -> tuple[Prompts, int]:
    """Tokenise a task's requests.

    Args:
        task: The task.
        tokenizer: Tokenizer of the model.
        window: Window of the model.
        truncate: Spelling of a `Truncation`; None refuses prompts that do not fit.
        say: Receives a line if contexts were truncated.
        vision: Turns media into tokens; None for a text model.
        reporter: Told of every request, once that takes seconds.

    Returns:
        A prompt for each request and repeat (a dialogue passes through once per repeat), and the
        number of contexts that were truncated.

    Raises:
        UserError: A context is empty, a prompt is longer than the model's window, or a context with
            images would be truncated.
    """
    made = Prompts(task.requests)
    truncated = 0
    late = Late(reporter, len(task.requests), f"{task.name}: tokenising prompts")
    cut = Truncation.parse(truncate) if truncate is not None else None
    limit = min(filter(None, (window.tokens, cut.tokens if cut else 0)), default=0)
    for request in task.requests:
        name = f"{request.task}, {request.sample_id}"
        try:
            prompt = _prompt(request, tokenizer, vision)
        except UserError as error:
            if not request.media:
                raise
            raise UserError(f"{name}: {error}") from error
        rest = len(prompt.question_ids) + prompt.limit
        room = limit - rest
        if cut is not None and limit and len(prompt.context_ids) > room:
            if request.media:
                raise UserError(
                    f"{name}: a context with images or videos is never truncated; leave out "
                    "--truncate, or choose samples that fit"
                )
            if room < 1:
                raise UserError(
                    f"{name}: question and answer alone have {rest} tokens and only {limit} fit; "
                    "use a smaller --max-new-tokens or another --truncate"
                )
            prompt = replace(prompt, context_ids=tuple(cut.cut([*prompt.context_ids], room)))
            truncated += 1
        advice = "a smaller --length"
        if not task.length:
            advice = "--truncate middle, a smaller --max-new-tokens or a shorter context"
        window.check(len(prompt.context_ids) + rest, name, advice)
        made.tokenised(prompt)
        late.advance()
    late.stop()
    if truncated:
        say(
            f"{task.name}: {truncated} of {len(task.requests)} contexts were cut in the middle, so "
            f"that prompt and answer fit into {limit} tokens"
        )
    for place, repeat in _repeated(task.requests):
        made.ask(place, repeat)
    return made, truncated


def _prompt(request: Request, tokenizer: Any, vision: Vision | None) -> Prompt:
    context = request.context
    if request.media:
        assert vision is not None
        context = vision.expand(context, request.media)
    parts = [context, request.question, *filter(None, [request.given])]
    head, tail, *more = split_encode(tokenizer, *parts)
    given = tuple(more[0]) if more else ()
    if not tail:  # the answer needs a token to start from
        head, tail = head[:-1], head[-1:]
    if not head:
        raise UserError(f"{request.task}, {request.sample_id}: the context has no tokens")
    return Prompt(request, tuple(head), tuple(tail), given)


def _repeated(requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    """Place and repeat of every prompt; the turns of a dialogue are repeated together."""
    facts = ((i, r.dialogue or i, r.repeats) for i, r in enumerate(requests))
    for _, group in groupby(facts, lambda fact: fact[1]):
        together = [*group]
        for repeat in range(together[0][2]):
            yield from ((place, repeat) for place, _, _ in together)
