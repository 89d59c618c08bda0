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
from kvbench.reference_vl.dialogues import Part, Sample, Settings, dialogue, vqa
from kvbench.reference_vl.pictures import Picture
from kvbench.reference_vl.questions import KINDS, Question, chance

QUESTIONS = 4
"""Questions about one context of `shapes_vqa`."""

_PICTURE, _REST = 26, 150
"""Most tokens of a picture with its hints, and of everything else: filler, questions, answers."""

_LIMIT = 4
"""New tokens of an answer, which is one word and the end of the turn."""


def docs(
    leaf: str,
    *,
    length: int,
    samples: int,
    seed: int,
    size: Callable[..., int],
    **_: Any,
) -> list[Doc]:
    """See `Benchmark.docs`. A smaller length shows fewer pictures.

    Raises:
        UserError: Two pictures do not fit into `length`.
    """
    most = min(8, (length - _REST) // _PICTURE)
    if most < 2:
        raise UserError(f"{leaf} shows at least two pictures; use a --length of 256 or more")
    settings = Settings(images=(2, most))
    if leaf == "shapes_dialogue":
        return [_dialogue(dialogue(settings, seed, i), i) for i in range(samples)]
    several = dataclasses.replace(settings, questions=QUESTIONS)
    contexts = -(-samples // QUESTIONS)
    rows = [row for i in range(contexts) for row in _questions(vqa(several, seed, i), i)]
    return rows[:samples]


def _questions(sample: Sample, index: int) -> list[Doc]:
    """The rows of one context: its questions, asked apart."""
    (turn,) = sample.turns
    return [
        {**_row(turn.parts, question), **_extra(question, index)} for question in turn.questions
    ]


def _dialogue(sample: Sample, index: int) -> Doc:
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


def _row(parts: Sequence[Part], question: Question) -> Doc:
    told = [IMAGE if isinstance(part, Picture) else part for part in parts]
    media = [image(_png(part)) for part in parts if isinstance(part, Picture)]
    return {
        "context": "".join(f"{text} " for text in told),
        "question": " ".join(question.words),
        "outputs": [question.answer],
        "media": media,
        "max_new_tokens": _LIMIT,
    }


def _extra(question: Question, index: int) -> Doc:
    return {"extra": {"kind": question.kind, "scene": index}}


def _png(picture: Picture) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture.pixels()).save(file, format="PNG")
    return file.getvalue()


def process_results(doc: Doc, results: list[str]) -> dict[str, float]:
    """1 if the response is the word of the answer; called by lm-eval."""
    return {"accuracy": float(results[0].strip() == doc["outputs"][0])}


def _chance() -> float:
    """The share of right answers by guessing, for five pictures and the mix of questions."""
    mix = dict(zip(KINDS, Settings().kinds, strict=True))
    return sum(weight * chance(kind, 5) for kind, weight in mix.items()) / sum(mix.values())


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
