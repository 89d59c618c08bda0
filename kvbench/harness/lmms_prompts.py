"""Prompts of lmms-eval's tasks: messages with images and videos, split after the last of them, and their requests."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.benchmark import IMAGE, VIDEO, Doc, Medium
from kvbench.data.media import image, is_medium, medium, picture, video
from kvbench.errors import LeftOut, UserError
from kvbench.harness import chat, loading
from kvbench.harness import rows as data
from kvbench.harness.protocol import Request, TaskSettings
from kvbench.harness.requests import AnswerSettings, arranged

_MAX_NEW_TOKENS = 128
"""Default token limit of lmms-eval's models."""


def lmms_requests(
    harness_task: Any,
    task_name: str,
    documents: Iterable[Doc],
    extra_fields: Sequence[Doc],
    settings: TaskSettings,
) -> Sequence[Request]:
    """Get every prompt from lmms-eval, and split it after its last medium.

    Raises:
        UserError: A prompt has audio, or a function of the task fails.
    """
    render = loading.renderer(settings)
    assert render is not None  # `settle` refuses media without a chat template
    token_limit, question_settings = answer_settings(
        task_name, harness_task.config.generation_kwargs or {}, int(harness_task.config.repeats or 1)
    )
    prompt_rows, prompt_parts, prompt_media = [], [], []
    distinct_media: dict[Medium, Medium] = {}  # hold an image shared by several questions once
    for document, doc_extra in zip(documents, extra_fields, strict=True):
        messages, doc_media = _messages(harness_task, task_name, document, settings.max_frames)
        context, _, question = render(messages).partition(data.SENTINEL)
        target = harness_task.doc_to_target(document)
        targets = target if isinstance(target, list) else [target]
        prompt_rows.append(
            {
                "outputs": [str(entry) for entry in targets],
                "extra": doc_extra,
                "max_new_tokens": token_limit,
                "until": [],
            }
        )
        prompt_parts.append((context, question))
        prompt_media.append(tuple(distinct_media.setdefault(entry, entry) for entry in doc_media))
    positions = [None] * len(prompt_rows)
    return arranged(task_name, prompt_rows, positions, prompt_parts, prompt_media, render, question_settings)


def _messages(
    harness_task: Any, task_name: str, document: Doc, max_frames: int | None
) -> tuple[list[chat.Message], list[Medium]]:
    """Return the messages of a prompt, with the sentinel after the last medium, and the media.

    Raises:
        LeftOut: A video is not where lmms-eval expects it.
        UserError: The prompt has audio.
    """
    try:
        messages = harness_task.doc_to_messages(document)
    except SystemExit as exit_error:  # definitions of lmms-eval exit if a video is missing
        video_path = str(exit_error).removeprefix("video path:").partition(" does not exist")[0]
        folder, dataset = Path(video_path).parent, harness_task.config.dataset_path
        raise LeftOut(
            f"it needs the video {video_path}; run `hf download --repo-type dataset {dataset}` and "
            f"unpack the videos of its archives into {folder}"
        ) from None
    return split_messages(task_name, messages, max_frames)


def split_messages(
    task_name: str, messages: Sequence[Mapping[str, Any]], max_frames: int | None = None
) -> tuple[list[chat.Message], list[Medium]]:
    """Convert messages of lmms-eval.

    Args:
        task_name: Name of the task in messages to the user.
        messages: Messages of a prompt, as `doc_to_messages` of a task returns them.
        max_frames: See `kvbench.data.media.medium`.

    Returns:
        The messages with a marker for each medium and the sentinel after the last one, and the media.

    Raises:
        UserError: A message has audio.
    """
    message_media: list[Medium] = []
    chat_messages: list[chat.Message] = []
    for message in messages:
        message_text = ""
        for content_part in message["content"]:
            if content_part["type"] == "text":
                message_text += content_part["text"]
                continue
            message_media.append(_medium(task_name, content_part["type"], content_part["url"], max_frames))
            message_text += VIDEO if message_media[-1].kind == "video" else IMAGE
        chat_messages.append({"role": message["role"], "content": message_text})
    for chat_message in reversed(chat_messages):
        if split_offset := media_end(chat_message["content"]):
            content = chat_message["content"]
            chat_message["content"] = content[:split_offset] + data.SENTINEL + content[split_offset:]
            break
    return chat_messages, message_media


def _medium(task_name: str, kind: str, value: Any, max_frames: int | None) -> Medium:
    """Return the medium of a part of a message: a `MediaValue`, an image of Pillow, or the path of a file."""
    from PIL import Image

    if isinstance(value, MediaValue):
        return value.medium
    if isinstance(value, Image.Image):
        return picture(value)
    if isinstance(value, str) and kind == "video":
        return medium(video(value), max_frames)
    if isinstance(value, str) and kind == "image":
        return medium(image(Path(value).read_bytes()))
    raise UserError(f"{task_name}: kvbench cannot pass on its {kind}")


def answer_settings(
    task_name: str, generation_kwargs: Mapping[str, Any], repeats: int = 1
) -> tuple[int, AnswerSettings]:
    """Return the limit of an answer in tokens, and how it is generated.

    The models of lmms-eval sample if the temperature is above 0, whatever `do_sample` says.

    Args:
        task_name: Name of the task in messages.
        generation_kwargs: `generation_kwargs` of the task.
        repeats: Number of answers.

    Raises:
        UserError: The task uses beam search.
    """
    if int(generation_kwargs.get("num_beams") or 1) > 1:
        raise UserError(
            f"{task_name} uses beam search (num_beams: {generation_kwargs['num_beams']}), which kvbench does not have; "
            "choose another task"
        )
    token_limit = int(generation_kwargs.get("max_new_tokens") or _MAX_NEW_TOKENS)
    sampled = {**generation_kwargs, "do_sample": bool(generation_kwargs.get("temperature"))}
    return token_limit, AnswerSettings(sampled, repeats)


def media_end(content: str) -> int:
    """Return the end of the last medium in a text; 0 if it has none."""
    return max(
        (content.rfind(media_marker) + len(media_marker) for media_marker in (IMAGE, VIDEO) if media_marker in content),
        default=0,
    )


class MediaValue:
    """A medium of a row for lmms-eval's functions: an image that converts to itself.

    lmms-eval's definitions call `convert("RGB")` on every image, which does not decode it here.
    """

    def __init__(self, value: Mapping[str, Any], max_frames: int | None = None) -> None:
        self._value, self._max_frames = value, max_frames

    @functools.cached_property
    def medium(self) -> Medium:
        """Return the medium for a request."""
        return medium(self._value, self._max_frames)

    def convert(self, mode: str) -> MediaValue:
        """Return the image itself, because its pixels become RGB when loaded."""
        if mode != "RGB":
            raise UserError(f"kvbench gives RGB images, not {mode}")
        return self

    def __deepcopy__(self, memo: Any) -> MediaValue:
        return self


class MediaRows:
    """Rows as lmms-eval reads them: a new mapping per access, with media as `MediaValue`s.

    Args:
        max_frames: See `kvbench.data.media.medium`.
    """

    def __init__(self, rows: Sequence[Doc], max_frames: int | None = None) -> None:
        self._rows = [
            {column: _seen(value, max_frames) for column, value in row.items() if column != "extra"} for row in rows
        ]
        self.features = dict.fromkeys(self._rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Doc]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Doc:
        return copy.deepcopy(self._rows[index])

    def forget_media(self) -> None:
        """Drop the columns of media, which lmms-eval does not need for scoring."""
        for row in self._rows:
            for column in [column for column, value in row.items() if isinstance(value, MediaValue)]:
                del row[column]


def _seen(value: Any, max_frames: int | None) -> Any:
    if is_medium(value):
        return MediaValue(value, max_frames)
    return [_seen(item, max_frames) for item in value] if isinstance(value, list) else value
