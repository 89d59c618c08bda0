"""Rendering of prompts as text, with or without a chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.benchmark import IMAGE, VIDEO
from kvbench.errors import UserError, reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

Message = dict[str, str]
"""`role` and `content`; the content has `IMAGE` or `VIDEO` as the placeholder of each medium."""

Shot = Mapping[str, str]
"""A worked example: question `user`, answer `assistant`, and `end`, which follows in plain text."""

Render = Callable[..., str]
"""`chat` bound to one tokenizer."""

_MEDIA = re.compile(f"({re.escape(IMAGE)}|{re.escape(VIDEO)})")


def chat(
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin,
    tokenizer_id: str,
    messages: list[Message],
    add_generation_prompt: bool = True,
    closed: bool = False,
    thinking: bool | None = None,
    parts: bool = False,
    template: str | None = None,
) -> str:
    """Apply the chat template of a tokenizer or processor.

    Args:
        tokenizer: The tokenizer, or the processor of a vision-language model.
        tokenizer_id: Its name in messages.
        messages: Messages of the chat.
        add_generation_prompt: Whether to start an answer; otherwise the last message is an unfinished answer and is
            left open.
        closed: Whether the last message is a complete answer.
        thinking: Passed to the template as `enable_thinking`; None: not passed.
        parts: Whether the template takes a message's content as a list of texts and media, as those of processors do.
        template: The template; None: the tokenizer's own.

    Raises:
        UserError: There is no chat template, or it fails.
    """
    if not tokenizer.chat_template:
        raise UserError(f"{tokenizer_id} has no chat template; use --no-chat-template")
    options: Any = {} if thinking is None else {"enable_thinking": thinking}
    conversation: Any = (
        [{**message, "content": _parts(message["content"])} for message in messages] if parts else messages
    )
    try:
        rendered = tokenizer.apply_chat_template(
            conversation,
            tokenize=False,
            add_generation_prompt=add_generation_prompt and not closed,
            continue_final_message=not add_generation_prompt and not closed,
            chat_template=template,
            **options,
        )
    except Exception as error:  # a template is third-party code
        raise UserError(
            f"the chat template of {tokenizer_id} fails ({reason_of(error)}); use --no-chat-template"
        ) from error
    assert isinstance(rendered, str)
    return rendered


def _parts(content: str) -> list[dict[str, str]]:
    """Return the texts and media of a message in the form that chat templates take."""
    kinds = {IMAGE: "image", VIDEO: "video"}
    return [
        {"type": kinds[piece]} if piece in kinds else {"type": "text", "text": piece}
        for piece in _MEDIA.split(content)
        if piece
    ]


def check_template(tokenizer: PreTrainedTokenizerBase, tokenizer_id: str) -> None:
    """Try the chat template before any work is done.

    Raises:
        UserError: It does not compile, or fails on a single question.
    """
    chat(tokenizer, tokenizer_id, [{"role": "user", "content": "?"}])


def check_thinking(tokenizer: PreTrainedTokenizerBase, tokenizer_id: str, has_template: bool) -> None:
    """Refuse the thinking flags if they would have no effect.

    Args:
        tokenizer_id: Its name in messages.
        has_template: Whether its chat template is applied.

    Raises:
        UserError: No chat template is applied, or it ignores `enable_thinking`.
    """
    if not has_template:
        raise UserError("--thinking and --no-thinking need a chat template, but none is applied; leave them out")
    messages = [{"role": "user", "content": "?"}]
    if chat(tokenizer, tokenizer_id, messages, thinking=True) == chat(
        tokenizer, tokenizer_id, messages, thinking=False
    ):
        raise UserError(
            f"the chat template of {tokenizer_id} ignores enable_thinking; leave out --thinking and --no-thinking"
        )


def shot_messages(shots: Sequence[Shot]) -> list[Message]:
    """Return the worked examples as chat messages."""
    roles = ("user", "assistant")
    return [{"role": role, "content": shot[role]} for shot in shots for role in roles]


def shot_text(shots: Sequence[Shot]) -> str:
    """Return the worked examples as plain text."""
    return "".join(
        shot["user"] + gap(shot["user"], shot["assistant"]) + shot["assistant"] + shot["end"] for shot in shots
    )


def after(render: Render, history: Sequence[Message]) -> Render:
    """Return a chat template that inserts messages before the last user message."""

    def rendered(messages: Sequence[Message], **options: Any) -> str:
        last_user = max(message_index for message_index, message in enumerate(messages) if message["role"] == "user")
        return render([*messages[:last_user], *history, *messages[last_user:]], **options)

    return rendered


def prompt(content: str, gen_prefix: str, render: Render | None, shots: Sequence[Shot] = ()) -> str:
    """Assemble a prompt as lm-eval does.

    Args:
        content: The user's message: context and question.
        gen_prefix: Start of the answer, given in the prompt.
        render: The chat template; None: no template.
        shots: Worked examples; see `Benchmark.docs`.
    """
    if render is not None:
        messages = [*shot_messages(shots), {"role": "user", "content": content}]
        if gen_prefix:
            messages.append({"role": "assistant", "content": gen_prefix})
        return render(messages, add_generation_prompt=not gen_prefix)
    return shot_text(shots) + content + gap(content, gen_prefix) + gen_prefix


def gap(left_text: str, right_text: str) -> str:
    """Return the space that lm-eval puts between two texts: none if either has whitespace there."""
    if not left_text or not right_text or left_text[-1].isspace() or right_text[0].isspace():
        return ""
    return " "
