"""Rows for tasks of lmms-eval: made up, in the schema of the data sets, about pictures that `reference-vl` knows."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import datasets
from PIL import Image

from kvbench.reference_vl.dialogues import DialogueSettings, vqa
from kvbench.reference_vl.pictures import Picture
from kvbench.reference_vl.words import NO, YES

Row = Mapping[str, Any]

ROWS = 8
"""Rows per task."""

_SEED = 5
_OPTIONS = ("red", "green", "blue", "yellow")


@dataclass(frozen=True)
class Scene:
    """Pictures, and a question about them.

    Attributes:
        index: Its number, from 0.
        pictures: Two or three pictures.
        question: The words of the question.
        answer: One word.
    """

    index: int
    pictures: tuple[Image.Image, ...]
    question: str
    answer: str

    @property
    def options(self) -> list[str]:
        """Return four options, one of them right."""
        others = [option for option in _OPTIONS if option != self.answer]
        position = self.index % len(_OPTIONS)
        return [*others[:position], self.answer, *others[position : len(_OPTIONS) - 1]]

    @property
    def letter(self) -> str:
        """Return the letter of the right option."""
        return "ABCD"[self.options.index(self.answer)]

    @property
    def lettered(self) -> str:
        """Return the question with its options on lines of their own."""
        return "\n".join(
            [self.question, *(f"({letter}) {text}" for letter, text in zip("ABCD", self.options, strict=True))]
        )


def scenes(yes_no: bool = False, per_scene: int = 1) -> list[Scene]:
    """Return scenes, `per_scene` with the same pictures.

    Args:
        yes_no: Whether all answers are yes or no.
        per_scene: Questions about each scene.
    """
    settings = DialogueSettings(images=(2, 3), questions=8)
    found: list[Scene] = []
    for number in itertools.count():
        (turn,) = vqa(settings, _SEED, number).turns
        pictures = tuple(Image.fromarray(part.pixels()) for part in turn.parts if isinstance(part, Picture))
        fitting = [question for question in turn.questions if not yes_no or question.answer in (YES, NO)]
        for question in fitting[:per_scene]:
            found.append(Scene(len(found), pictures, " ".join(question.words), question.answer))
        if len(found) >= ROWS:
            return found[:ROWS]
    raise AssertionError("itertools.count never ends")


def _chartqa(scene: Scene) -> Row:
    kind = "human_test" if scene.index % 2 else "augmented_test"
    return {"image": scene.pictures[0], "question": scene.question, "answer": scene.answer, "type": kind}


def _pope(scene: Scene) -> Row:
    return {
        "id": str(scene.index),
        "question_id": str(scene.index),
        "question": scene.question,
        "answer": scene.answer,
        "image_source": f"picture_{scene.index}",
        "image": scene.pictures[0],
        "category": "popular",
    }


def _ai2d(scene: Scene) -> Row:
    return {
        "question": scene.question,
        "options": scene.options,
        "answer": str(scene.options.index(scene.answer)),
        "image": scene.pictures[0],
    }


def _realworldqa(scene: Scene) -> Row:
    answer = scene.letter if scene.index % 2 else scene.answer
    question = scene.lettered if scene.index % 2 else scene.question
    return {"image": scene.pictures[0], "question": question, "answer": answer, "image_path": f"{scene.index}.png"}


def _scienceqa(scene: Scene) -> Row:
    return {
        "image": scene.pictures[0] if scene.index % 4 else None,  # some questions have no image
        "question": scene.question,
        "choices": scene.options,
        "answer": scene.options.index(scene.answer),
        "hint": "look" if scene.index % 2 else "",
        "task": "closed choice",
        "grade": "grade2",
        "subject": "natural science",
        "topic": "colours",
        "category": "pictures",
        "skill": "look at a picture",
        "lecture": "",
        "solution": "",
    }


def _docvqa(scene: Scene) -> Row:
    return {
        "questionId": str(scene.index),
        "question": scene.question,
        "question_types": ["layout"],
        "image": scene.pictures[0],
        "docId": scene.index,
        "ucsf_document_id": f"d{scene.index}",
        "ucsf_document_page_no": "1",
        "answers": [scene.answer, f"a {scene.answer}"],
        "data_split": "val",
    }


def _textvqa(scene: Scene) -> Row:
    return {
        "image_id": f"i{scene.index}",
        "question_id": scene.index,
        "question": scene.question,
        "question_tokens": scene.question.split(),
        "image": scene.pictures[0],
        "image_width": scene.pictures[0].width,
        "image_height": scene.pictures[0].height,
        "flickr_original_url": "",
        "flickr_300k_url": "",
        "answers": [scene.answer] * 6 + ["red"] * 4,
        "image_classes": ["picture"],
        "set_name": "val",
        "ocr_name": [],
        "ocr_tokens": ["one", "two"],
        "answer": scene.answer,
    }


def _vqav2(scene: Scene) -> Row:
    answers = [scene.answer] * 5 + ["red"] * 3 + ["yes"] * 2
    return {
        "question_type": "what",
        "multiple_choice_answer": scene.answer,
        "answers": [
            {"answer": answer, "answer_confidence": "yes", "answer_id": number}
            for number, answer in enumerate(answers, 1)
        ],
        "image_id": scene.index,
        "answer_type": "other",
        "question_id": scene.index,
        "question": scene.question,
        "image": scene.pictures[0],
        "answer": scene.answer,
    }


def _mme(scene: Scene) -> Row:
    return {
        "question_id": f"code/{scene.index // 2}.png",
        "image": scene.pictures[0],
        "question": f"{scene.question} Please answer yes or no.",
        "answer": scene.answer.capitalize(),
        "category": "color" if scene.index < ROWS // 2 else "code_reasoning",
    }


def _mmstar(scene: Scene) -> Row:
    categories = {"math": "geometry", "coarse perception": "image emotion"}
    category = [*categories][scene.index % 2]
    return {
        "index": scene.index,
        "question": scene.lettered,
        "image": scene.pictures[0],
        "answer": scene.letter,
        "category": category,
        "l2_category": categories[category],
        "meta_info": {"source": "kvbench", "split": "val", "image_path": f"{scene.index}.png"},
    }


def _mmmu(scene: Scene) -> Row:
    subject = ("Art", "Music", "Physics")[scene.index % 3]
    images = {f"image_{number}": None for number in range(1, 8)}
    images |= {f"image_{number}": picture for number, picture in enumerate(scene.pictures[:2], 1)}
    return {
        "id": f"validation_{subject}_{scene.index}",
        "question": f"<image 1> first . <image 2> second . {scene.question}",
        "options": "[]",
        "explanation": "",
        **images,
        "img_type": "['Pictures']",
        "answer": scene.answer,
        "topic_difficulty": "Easy",
        "question_type": "open",
        "subfield": subject,
    }


def _blink(scene: Scene) -> Row:
    images = {f"image_{number}": None for number in range(1, 5)}
    images |= {f"image_{number}": picture for number, picture in enumerate(scene.pictures, 1)}
    return {
        "idx": f"val_Counting_{scene.index}",
        "sub_task": "Counting",
        "question": scene.question,
        **images,
        "choices": scene.options,
        "answer": f"({scene.letter})",
        "prompt": scene.lettered,
        "explanation": "",
    }


def _cv_bench(scene: Scene) -> Row:
    return {
        "idx": scene.index,
        "type": "2D",
        "task": "Count",
        "image": scene.pictures[0],
        "question": scene.question,
        "choices": scene.options,
        "answer": f"({scene.letter})",
        "prompt": scene.lettered,
        "filename": f"{scene.index}.png",
        "source": "COCO",
        "source_dataset": "COCO",
        "source_filename": f"{scene.index}.png",
    }


def _countbench(scene: Scene) -> Row:
    return {"image": scene.pictures[0], "text": "", "question": scene.question, "number": len(scene.answer) % 4}


@dataclass(frozen=True)
class Table:
    """A data set of the hub, as a task of lmms-eval reads it.

    Attributes:
        dataset: Its name on the hub.
        split: The split that the task reads.
        row: Makes a row.
        yes_no: Whether all answers are yes or no.
        per_scene: Questions about each scene.
    """

    dataset: str
    split: str
    row: Callable[[Scene], Row]
    yes_no: bool = False
    per_scene: int = 1

    def answers(self) -> list[str]:
        """Return an answer to each row: some right, as a word or as the letter of an option, others wrong."""
        return [
            (scene.answer, scene.letter, f"{scene.letter}. {scene.answer}", "apple")[scene.index % 4]
            for scene in scenes(self.yes_no, self.per_scene)
        ]

    def rows(self) -> datasets.DatasetDict:
        """Return the data set."""
        rows = [self.row(scene) for scene in scenes(self.yes_no, self.per_scene)]
        table = datasets.Dataset.from_list(rows)
        for column in {name for row in rows for name, value in row.items() if isinstance(value, Image.Image)}:
            table = table.cast_column(column, datasets.Image())
        return datasets.DatasetDict({self.split: table})


TABLES = {
    "chartqa": Table("lmms-lab-encoder/ChartQA", "test", _chartqa),
    "pope": Table("lmms-lab-encoder/POPE", "test", _pope, yes_no=True),
    "ai2d": Table("lmms-lab-encoder/ai2d", "test", _ai2d),
    "realworldqa": Table("lmms-lab-encoder/RealWorldQA", "test", _realworldqa),
    "scienceqa": Table("lmms-lab-encoder/ScienceQA", "test", _scienceqa),
    "docvqa_val": Table("lmms-lab-encoder/DocVQA", "validation", _docvqa, per_scene=2),
    "textvqa_val": Table("lmms-lab-encoder/textvqa", "validation", _textvqa),
    "vqav2_val": Table("lmms-lab-encoder/VQAv2", "validation", _vqav2),
    "mme": Table("lmms-lab-encoder/MME", "test", _mme, yes_no=True),
    "mmstar": Table("Lin-Chen/MMStar", "val", _mmstar),
    "mmmu_val": Table("lmms-lab-encoder/MMMU", "validation", _mmmu),
    "blink_counting": Table("BLINK-Benchmark/BLINK", "val", _blink),
    "cv_bench_2d": Table("nyu-visionx/CV-Bench", "test", _cv_bench),
    "countbench": Table("vikhyatk/CountBenchQA", "test", _countbench),
}
"""The data set of each task."""


@contextlib.contextmanager
def served() -> Iterator[None]:
    """Serve the rows in place of the hub's data sets, by their names."""
    by_name = {table.dataset: table for table in TABLES.values()}

    def load_dataset(path: str, name: str | None = None, **_: Any) -> datasets.DatasetDict:
        return by_name[path].rows()

    with mock.patch.object(datasets, "load_dataset", load_dataset):
        yield
