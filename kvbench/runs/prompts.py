"""From a task's requests to prompts: tokenised, made to fit the model, one for each repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from kvbench.engine.vision import Vision
from kvbench.errors import UserError
from kvbench.harness.encode import split_encode
from kvbench.harness.protocol import LoadedTask, Request
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


def prompts_of(
    task: LoadedTask,
    tokenizer: Any,
    window: Window,
    truncate: str | None,
    say: Callable[[str], None],
    vision: Vision | None = None,
) -> tuple[list[Prompt], int]:
    """Tokenise a task's requests.

    Args:
        task: The task.
        tokenizer: Tokenizer of the model.
        window: Window of the model.
        truncate: Spelling of a `Truncation`; None refuses prompts that do not fit.
        say: Receives a line if contexts were truncated.
        vision: Turns media into tokens; None for a text model.

    Returns:
        A prompt for each request and repeat (a dialogue passes through once per repeat), and the
        number of contexts that were truncated.

    Raises:
        UserError: A context is empty, a prompt is longer than the model's window, or a context with
            images would be truncated.
    """
    made = []
    truncated = 0
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
        made.append(prompt)
    if truncated:
        say(
            f"{task.name}: {truncated} of {len(made)} contexts were cut in the middle, so that "
            f"prompt and answer fit into {limit} tokens"
        )
    return list(_repeated(made)), truncated


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


def _repeated(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """Repeat prompts; the turns of a dialogue are repeated together."""
    numbered = enumerate(prompts)
    for _, group in groupby(numbered, lambda item: item[1].request.dialogue or item[0]):
        together = [prompt for _, prompt in group]
        for repeat in range(together[0].request.repeats):
            yield from (replace(prompt, repeat=repeat) for prompt in together)
