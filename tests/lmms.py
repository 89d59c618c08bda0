"""What lmms-eval itself asks and scores: its evaluator on canned answers, to compare with."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from kvbench.benchmark import Benchmark
from kvbench.harness.lmms_eval import _definition, _quiet

from . import vision

needs_lmms_eval = pytest.mark.skipif(
    not vision.installed("lmms_eval"), reason="lmms-eval is not installed (make vision)"
)
needs_videos = pytest.mark.skipif(
    not vision.installed("lmms_eval", "cv2"), reason="lmms-eval or opencv is not installed"
)


def write_video(path: Path, frames: int = 8) -> None:
    """A video of 64 x 48 pixels, five frames a second."""
    import cv2

    path.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 5, (64, 48))
    for level in range(frames):
        writer.write(np.full((48, 64, 3), 5 * level, np.uint8))
    writer.release()


@dataclass
class Evaluated:
    """Prompts and media that lmms-eval's model would see, its samples and its results."""

    prompts: list[str]
    media: list[list[Any]]
    samples: list[dict[str, Any]]
    results: dict[str, float]


def evaluated(
    definition: str,
    rows: Sequence[Mapping[str, Any]],
    answers: Sequence[str],
    folder: Path,
    kind: str = "qwen2_vl",
    lmms_model: str | None = None,
    **changes: Any,
) -> Evaluated:
    """Let lmms-eval evaluate canned answers on rows that `save_to_disk` has put into a folder.

    Args:
        definition: As in our YAML.
        rows: Raw rows, with encoded images.
        answers: A response to each row.
        folder: Where the rows go.
        kind: Whose chat template is applied.
        lmms_model: What `--model` of lmms-eval would name.
        changes: Changes of the definition.
    """
    with _quiet():
        config = _definition(definition)
    from lmms_eval.api.model import lmms
    from lmms_eval.api.task import ConfigurableMessagesTask
    from lmms_eval.evaluator import evaluate
    from lmms_eval.protocol import ChatMessages

    prompts, media = [], []

    class Canned(lmms):  # type: ignore[misc]
        is_simple = False

        def generate_until(self, requests: Any) -> list[str]:
            given = []
            for request in requests:
                _, messages_of, _, doc_id, _, split = request.args
                messages = ChatMessages(messages=messages_of(task.dataset[split][doc_id]))
                prompts.append(
                    vision.processor(kind).apply_chat_template(
                        messages.to_hf_messages(), tokenize=False, add_generation_prompt=True
                    )
                )
                images, videos, _ = messages.extract_media()
                media.append([*images, *videos])
                given.append(answers[doc_id])
            return given

        def loglikelihood(self, requests: Any) -> Any:
            raise NotImplementedError

        def generate_until_multi_round(self, requests: Any) -> Any:
            raise NotImplementedError

        def clean(self) -> None:
            """The evaluator's own deletes the attributes of a model."""

    table = datasets.Dataset.from_list([{k: _raw(v) for k, v in row.items()} for row in rows])
    for name, value in rows[0].items():
        if isinstance(value, Mapping) and "bytes" in value:
            table = table.cast_column(name, datasets.Image())
    datasets.DatasetDict({config["test_split"]: table}).save_to_disk(folder)
    config |= {"dataset_path": str(folder), "dataset_kwargs": {"load_from_disk": True}, **changes}
    with _quiet():
        task = ConfigurableMessagesTask(config=config, model_name=lmms_model)
        found = evaluate(Canned(), {task.config.task: task}, bootstrap_iters=0, process_docs_parallel=1)
    name = task.config.task
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    results = {metric.removesuffix(",none"): value for metric, value in found["results"][name].items()}
    return Evaluated(prompts, media, samples, results)


def _raw(value: Any) -> Any:
    if isinstance(value, Mapping) and "bytes" in value:
        return {**value, "bytes": base64.b64decode(value["bytes"])}
    return value


def compare(
    task: Any, bench: Benchmark, own: Evaluated, answers: Sequence[str], kind: str = "qwen2_vl"
) -> dict[int, float]:
    """Assert that kvbench asks the same, and return its scores by row.

    The scores are compared with lmms-eval's by the tests of the tasks.
    """
    by_row = {request.doc_id: request for request in task.requests}
    for doc_id, prompt in enumerate(own.prompts):
        request = by_row[doc_id]
        assert request.context + request.question == prompt
        placeholder = "<|video_pad|>" if "video" in bench.media else "<|image_pad|>"
        placeholder = "<image>" if kind == "llava" else placeholder
        assert request.context.count(placeholder) == len(request.media) == 1
        assert placeholder not in request.question
        for medium, seen in zip(request.media, own.media[doc_id], strict=True):
            if medium.kind == "image":
                assert medium.load().tobytes() == seen.tobytes()
    keys = {(r.sample_id, r.question_id, 0): r.doc_id for r in task.requests}
    scores, total = task.score({key: answers[doc_id] for key, doc_id in keys.items()})
    assert total == pytest.approx(sum(scores.values()) / len(scores))
    return {keys[key]: score for key, score in sorted(scores.items(), key=lambda kv: keys[kv[0]])}
