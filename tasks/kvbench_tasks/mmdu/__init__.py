"""MMDU (arXiv:2406.11833): long dialogues about several images. See README.md."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from kvbench.benchmark import Benchmark, Doc, Source
from kvbench.data.sources import rows
from kvbench.errors import UserError
from kvbench_tasks.mmdu.dialogues import WrongImages, dialogue
from kvbench_tasks.mmdu.metric import ask

DIALOGUES = Source("laolao77/MMDU", file="benchmark.json", columns=("id", "image", "conversations"))
IMAGES = Source("laolao77/MMDU", file="mmdu_pics.zip:*mmdu_pics/*")


def docs(leaf: str, *, cache_dir: Path, **options: Any) -> list[Doc]:
    """See `Benchmark.docs`. Dialogues that do not match their images are skipped with a warning.

    Raises:
        UserError: No dialogue is left, or one has another error.
    """
    images = {record["path"].rpartition("/")[2]: record for record in rows(IMAGES, cache_dir)}
    documents = []
    for record in rows(DIALOGUES, cache_dir):
        try:
            documents.append(dialogue(record, images))
        except WrongImages as error:
            warnings.warn(f"{error}; it is left out", stacklevel=2)
    if not documents:
        raise UserError("MMDU: no dialogue fits its images; fetch the data again")
    return documents


BENCHMARK = Benchmark(
    name="mmdu",
    leaves=("mmdu",),
    docs=docs,
    yaml=Path(__file__).parent,
    version="1",
    summary="Dialogues of up to 27 turns about 2 to 20 images, judged answer by answer",
    source="https://github.com/Liuziyu77/MMDU (arXiv:2406.11833)",
    licence="CC-BY-NC-4.0",
    sources={"mmdu": (DIALOGUES, IMAGES)},
    metric="overall",
    judge="dialogue_answer",
    ask=ask,
    media=("image",),
    sized=False,
    lexicons=("natural",),
)
