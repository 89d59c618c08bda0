"""From a task's requests to prompts: tokenised, made to fit the model, one for each repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvbench.decoding import Truncation
from kvbench.errors import UserError

if TYPE_CHECKING:
    from kvbench.harness.protocol import LoadedTask, Request
    from kvbench.runs.answers import Prompt


@dataclass(frozen=True)
class Window:
    """How many tokens a model takes.

    Attributes:
        model: Its name.
        tokens: Prompt and answer together; 0: nobody knows.
    """

    model: str
    tokens: int

    def check(self, length: int, what: str, advice: str = "a smaller --length") -> None:
        """Refuse what does not fit.

        Raises:
            UserError: It does not; the message says that `advice` would be right.
        """
        if self.tokens and length > self.tokens:
            raise UserError(
                f"{what}: {length} tokens do not fit into the {self.tokens} of model {self.model}; "
                f"nothing is truncated: {advice} would be right"
            )


def prompts_of(
    task: LoadedTask,
    tokenizer: Any,
    window: Window,
    truncate: str | None,
    say: Callable[[str], None],
) -> list[Prompt]:
    """Tokenise a task's requests.

    Args:
        task: Its `truncated` is set.
        tokenizer: Of the model.
        window: Of the model.
        truncate: Spelling of a `Truncation`; None refuses what does not fit.
        say: Told of contexts that were truncated.

    Returns:
        A prompt for each request and repeat; the turns of a dialogue go through repeat by repeat.

    Raises:
        UserError: A context is empty, or a prompt is longer than the model's window.
    """
    made = []
    task.truncated = 0
    cut = Truncation.parse(truncate) if truncate is not None else None
    limit = min(filter(None, (window.tokens, cut.tokens if cut else 0)), default=0)
    for request in task.requests:
        prompt = _prompt(request, tokenizer)
        name = f"{request.task}, {request.sample_id}"
        rest = len(prompt.question_ids) + prompt.limit
        room = limit - rest
        if cut is not None and limit and len(prompt.context_ids) > room:
            if room < 1:
                raise UserError(
                    f"{name}: question and answer alone have {rest} tokens, of {limit} that there "
                    "are; a smaller --max-new-tokens or another --truncate would be right"
                )
            prompt = replace(prompt, context_ids=tuple(cut.cut([*prompt.context_ids], room)))
            task.truncated += 1
        advice = "a smaller --length"
        if not task.length:
            advice = "a shorter context or --truncate middle"
        window.check(len(prompt.context_ids) + rest, name, advice)
        made.append(prompt)
    if task.truncated:
        say(
            f"{task.name}: {task.truncated} of {len(made)} contexts were cut in the middle, "
            f"so that prompt and answer fit into {limit} tokens"
        )
    return list(_repeated(made))


def _prompt(request: Request, tokenizer: Any) -> Prompt:
    from kvbench.harness.encode import split_encode
    from kvbench.runs.answers import Prompt

    parts = [request.context, request.question, *filter(None, [request.given])]
    head, tail, *more = split_encode(tokenizer, *parts)
    given = tuple(more[0]) if more else ()
    if not tail:  # the model needs a token to start the answer from
        head, tail = head[:-1], head[-1:]
    if not head:
        raise UserError(f"{request.task}, {request.sample_id}: the context is empty")
    return Prompt(request, tuple(head), tuple(tail), given)


def _repeated(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    apart = enumerate(prompts)
    for _, group in groupby(apart, lambda item: item[1].question.dialogue or item[0]):
        own = [prompt for _, prompt in group]
        for repeat in range(own[0].question.repeats):
            yield from (replace(prompt, repeat=repeat) for prompt in own)
