"""Questions about pictures of coloured shapes, for the model `reference-vl`. See README.md."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from kvbench.benchmark import IMAGE, Benchmark, Doc
from kvbench.data.media import image
from kvbench.errors import UserError
from kvbench.reference_vl import LEXICON
from kvbench.reference_vl.dialogues import DialogueSample, DialogueSettings, Part, dialogue, vqa
from kvbench.reference_vl.pictures import Picture
from kvbench.reference_vl.questions import KINDS, PictureQuestion, chance

QUESTIONS = 4
"""Questions per context of `shapes_vqa`."""

_PICTURE, _REST = 26, 150
"""Maximum tokens of a picture with its hints, and of everything else: filler, questions, answers."""

_LIMIT = 4
"""New tokens per answer: one word and the end of the turn."""


def docs(
    leaf: str,
    *,
    length: int,
    samples: int,
    seed: int,
    size: Callable[..., int],
    **options: Any,
) -> list[Doc]:
    """See `Benchmark.docs`. A smaller length shows fewer pictures.

    Raises:
        UserError: Two pictures do not fit into `length`.
    """
    max_pictures = min(8, (length - _REST) // _PICTURE)
    if max_pictures < 2:
        raise UserError(f"{leaf} shows at least two pictures; use a --length of 256 or more")
    settings = DialogueSettings(images=(2, max_pictures))
    if leaf == "shapes_dialogue":
        return [_dialogue(dialogue(settings, seed, sample_index), sample_index) for sample_index in range(samples)]
    vqa_settings = dataclasses.replace(settings, questions=QUESTIONS)
    context_count = -(-samples // QUESTIONS)
    question_docs = [
        document
        for context_index in range(context_count)
        for document in _questions(vqa(vqa_settings, seed, context_index), context_index)
    ]
    return question_docs[:samples]


def _questions(sample: DialogueSample, index: int) -> list[Doc]:
    """Return the rows of one context, one per independent question."""
    (turn,) = sample.turns
    return [{**_row(turn.parts, question), **_extra(question, index)} for question in turn.questions]


def _dialogue(sample: DialogueSample, index: int) -> Doc:
    turns = [
        {
            **_row(turn.parts, turn.questions[0]),
            "answer": turn.questions[0].answer,
            **_extra(turn.questions[0], index),
        }
        for turn in sample.turns
    ]
    # Images need the chat template, so the frame of plain prompts is never used.
    return {"turns": turns, "frame": {"user": "", "assistant": "", "end": ""}}


def _row(turn_parts: Sequence[Part], question: PictureQuestion) -> Doc:
    contents = [IMAGE if isinstance(turn_part, Picture) else turn_part for turn_part in turn_parts]
    media = [image(_png(turn_part)) for turn_part in turn_parts if isinstance(turn_part, Picture)]
    return {
        "context": "".join(f"{content} " for content in contents),
        "question": " ".join(question.words),
        "outputs": [question.answer],
        "media": media,
        "max_new_tokens": _LIMIT,
    }


def _extra(question: PictureQuestion, index: int) -> Doc:
    return {"extra": {"kind": question.kind, "scene": index}}


def _png(picture: Picture) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture.pixels()).save(buffer, format="PNG")
    return buffer.getvalue()


def process_results(doc: Doc, results: list[str]) -> dict[str, float]:
    """Return 1 if the response is the answer's word; called by lm-eval."""
    return {"accuracy": float(results[0].strip() == doc["outputs"][0])}


def _chance() -> float:
    """Return the accuracy of guessing, for five pictures and the mix of questions."""
    kind_weights = dict(zip(KINDS, DialogueSettings().kinds, strict=True))
    return sum(weight * chance(kind, 5) for kind, weight in kind_weights.items()) / sum(kind_weights.values())


BENCHMARK = Benchmark(
    name="shapes",
    leaves=("shapes_vqa", "shapes_dialogue"),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Coloured shapes in 2 to 8 pictures: cells, counts, comparisons, dialogues",
    source="ours (kvbench)",
    licence="Apache-2.0",
    metric="accuracy",
    chance=_chance(),
    media=("image",),
    lexicons=(LEXICON,),
)
