"""Conversion of MMDU's raw dialogues to rows; `<ImageHere>` marks the next image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.benchmark import IMAGE, Doc
from kvbench.errors import UserError

HERE = "<ImageHere>"


class WrongImages(UserError):
    """The numbers of image places and images differ."""


_LIMIT = 1024
"""New tokens per answer; the authors use each model's default."""


def dialogue(record: Mapping[str, Any], images: Mapping[str, Mapping[str, Any]]) -> Doc:
    """Convert a dialogue to a row.

    Args:
        record: The raw dialogue: `id`, `image` (paths) and `conversations` (`from` and `value` of alternating messages
            of user and assistant).
        images: Encoded images by file name.

    Raises:
        WrongImages: The messages do not match the images.
        UserError: An image is missing, or user and assistant do not alternate.
    """
    messages = [(entry["from"], entry["value"]) for entry in record["conversations"]]
    user_messages, replies = messages[::2], messages[1::2]
    roles = {role for role, _ in user_messages}, {role for role, _ in replies}
    file_names = [path.rpartition("/")[2] for path in record["image"]]
    if roles != ({"user"}, {"assistant"}) or len(user_messages) != len(replies):
        raise UserError(f"MMDU, dialogue {record['id']}: user and assistant do not take turns")
    if (slot_count := sum(message.count(HERE) for _, message in user_messages)) != len(file_names):
        raise WrongImages(f"MMDU, dialogue {record['id']}: {slot_count} places for {len(file_names)} images")
    if missing := [file_name for file_name in file_names if file_name not in images]:
        raise UserError(f"MMDU, dialogue {record['id']}: there is no image {missing[0]}")
    remaining = iter(file_names)
    turns = []
    for turn_index, ((_, message), (_, answer)) in enumerate(zip(user_messages, replies, strict=True)):
        preceding, placeholder, question = message.rpartition(HERE)
        context = (preceding + placeholder).replace(HERE, IMAGE)
        turns.append(
            {
                "context": context,
                "question": question,
                "outputs": [answer.strip()],
                "answer": answer.strip(),
                "asked": message.replace(HERE, "[image]").strip(),
                "media": [images[next(remaining)] for _ in range(context.count(IMAGE))],
                "max_new_tokens": _LIMIT,
                "extra": {"turn": turn_index, "images": len(file_names)},
            }
        )
    # Images need the chat template, so the frame of plain prompts is never used.
    return {"turns": turns, "frame": {"user": "", "assistant": "", "end": ""}}
