"""From a raw dialogue of MMDU to a row: `<ImageHere>` stands for the next of its images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.benchmark import IMAGE, Doc
from kvbench.errors import UserError

HERE = "<ImageHere>"


class WrongImages(UserError):
    """A dialogue has another number of places than of images."""


_LIMIT = 1024
"""New tokens of an answer; the authors leave it to each model's default."""


def dialogue(row: Mapping[str, Any], images: Mapping[str, Mapping[str, Any]]) -> Doc:
    """Make a row of a dialogue.

    Args:
        row: The raw dialogue: `id`, `image` (paths) and `conversations` (`from` and `value` of the
            messages, where user and assistant take turns).
        images: Encoded images by file name.

    Raises:
        WrongImages: The messages do not match the images.
        UserError: An image is missing, or user and assistant do not take turns.
    """
    said = [(part["from"], part["value"]) for part in row["conversations"]]
    asked, answered = said[::2], said[1::2]
    roles = {who for who, _ in asked}, {who for who, _ in answered}
    names = [path.rpartition("/")[2] for path in row["image"]]
    if roles != ({"user"}, {"assistant"}) or len(asked) != len(answered):
        raise UserError(f"MMDU, dialogue {row['id']}: user and assistant do not take turns")
    if (count := sum(text.count(HERE) for _, text in asked)) != len(names):
        raise WrongImages(f"MMDU, dialogue {row['id']}: {count} places for {len(names)} images")
    if missing := [name for name in names if name not in images]:
        raise UserError(f"MMDU, dialogue {row['id']}: there is no image {missing[0]}")
    left = iter(names)
    turns = []
    for number, ((_, text), (_, answer)) in enumerate(zip(asked, answered, strict=True)):
        told, here, question = text.rpartition(HERE)
        context = (told + here).replace(HERE, IMAGE)
        turns.append(
            {
                "context": context,
                "question": question,
                "outputs": [answer.strip()],
                "answer": answer.strip(),
                "asked": text.replace(HERE, "[image]").strip(),
                "media": [images[next(left)] for _ in range(context.count(IMAGE))],
                "max_new_tokens": _LIMIT,
                "extra": {"turn": number, "images": len(names)},
            }
        )
    # Images need the chat template, so the frame of plain prompts is never used.
    return {"turns": turns, "frame": {"user": "", "assistant": "", "end": ""}}
