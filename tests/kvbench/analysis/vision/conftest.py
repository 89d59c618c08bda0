"""Tiny models that see images, and a task with one and with two images that are not square."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kvbench.benchmark import Ask, Benchmark, Medium
from kvbench.harness.protocol import LoadedTask, MetricScores, Request, TaskSettings
from kvbench.runs.grid import Grid
from kvbench.runs.planning import HARNESSES
from tests import vision

SIZES = ((56, 84), (112, 56), (56, 56))
"""Width and height in pixels."""


def noise(number: int) -> Image.Image:
    width, height = SIZES[number]
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def medium(number: int) -> Medium:
    return Medium("image", f"noise {number}", lambda: noise(number))


class Loaded(LoadedTask):
    def score_metrics(self, responses: Mapping[Any, str], marks: Sequence[Any] | None = None) -> list[MetricScores]:
        return [MetricScores("score", "", True, dict.fromkeys(responses, 0.0), 0.0)]


class Harness:
    """Two samples: a dialogue whose second turn shows two more images, and one with one image."""

    name = "made-up"

    def load(self, task: str, settings: TaskSettings, benchmark: Benchmark | None = None) -> LoadedTask:
        image = settings.processor.image_token
        if image == "<|image_pad|>":
            image = "<|vision_start|><|image_pad|><|vision_end|>"
        first = f"Look at {image} now."
        second = f"{first} A? b. Then {image} came, and {image} too."
        asked = [
            ("a", 0, first, (0,)),
            ("a", 1, second, (0, 1, 2)),
            ("b", 0, f"{image}, only this.", (1,)),
        ]
        requests = tuple(
            Request(
                task=task,
                sample_id=sample,
                doc_id=0,
                question_id=question,
                context_id=sample,
                context=context,
                question=" Which one?",
                until=(),
                max_new_tokens=5,
                target=("this",),
                media=tuple(medium(i) for i in images),
            )
            for sample, question, context, images in asked
            if settings.samples > 1 or sample == "a"
        )
        return Loaded(task, "made-up", "1", "0" * 16, "none", True, 0.0, 0, requests)


@pytest.fixture(autouse=True, scope="module")
def task() -> Iterator[str]:
    """The made-up task, by the name that --task knows it by."""
    bench = Benchmark(
        "made-up",
        ("images",),
        list,
        Path(),
        harness="made-up",
        sized=False,
        # An analysis scores nothing, so it needs no judge, and none is configured.
        judge="longmemeval",
        ask=lambda doc, response: Ask("longmemeval", {}),
    )
    leaves = Grid.leaves

    def known(grid: Grid) -> list[tuple[str, Benchmark]]:
        return [("images", bench)] if grid.tasks == ("images",) else leaves(grid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(HARNESSES, "made-up", Harness())
        patch.setattr(Grid, "leaves", known)
        yield "images"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of models by family."""
    return {kind: vision.save(kind, tmp_path_factory.mktemp(kind)) for kind in vision.KINDS}
