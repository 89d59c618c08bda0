"""Rows with images in the text harness: where they stand, what a context is, what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.benchmark import IMAGE, VIDEO, Benchmark, Doc
from kvbench.data.media import image, medium
from kvbench.engine.vision import Vision
from kvbench.errors import LeftOut, UserError
from kvbench.harness import rows as data
from kvbench.runs.prompts import Window, prompts_of

from ...vision import KINDS, encoded, load_task, picture, processor

YAML = """
task: look
output_type: generate_until
test_split: test
doc_to_text: "{{context}}<|kvb_split|>{{question}}"
doc_to_target: outputs
num_fewshot: 0
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
generation_kwargs: {until: [], max_gen_toks: 9, do_sample: false}
"""


def row(color: str = "red", **changes: Any) -> Doc:
    usual = {
        "context": f"Look: {IMAGE}",
        "question": "What colour?",
        "outputs": ["red"],
        "media": [encoded(picture(color))],
    }
    return {**usual, **changes}


def bench(folder: Path, rows: list[Doc], **changes: Any) -> Benchmark:
    (folder / "look.yaml").write_text(YAML)
    usual: dict[str, Any] = {
        "name": "look",
        "leaves": ("look",),
        "docs": lambda leaf, **_: rows,
        "yaml": folder,
        "metric": "exact_match",
        "media": ("image",),
        "sized": False,
    }
    return Benchmark(**usual | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_images_stand_in_the_context_as_the_template_writes_them(kind: str, tmp_path: Path) -> None:
    two = row(context=f"A {IMAGE} B {IMAGE} C ", media=[encoded(picture(c)) for c in ("red", "blue")])
    [request] = load_task("look", bench(tmp_path, [two]), tmp_path, kind).requests
    if kind == "llava":
        assert request.context == "USER: <image>\n<image>\nA   B   C "
        assert request.question == "What colour? ASSISTANT:"
    else:
        shown = "<|vision_start|><|image_pad|><|vision_end|>"
        assert request.context.endswith(f"<|im_start|>user\nA {shown} B {shown} C ")
        assert request.question == "What colour?<|im_end|>\n<|im_start|>assistant\n"
    assert [m.digest for m in request.media] == [medium(m).digest for m in two["media"]]
    whole = processor(kind).apply_chat_template(
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "A "},
                    {"type": "image"},
                    {"type": "text", "text": " B "},
                    {"type": "image"},
                    {"type": "text", "text": " C What colour?"},
                ],
            }
        ],
        add_generation_prompt=True,
    )
    assert request.context + request.question == whole


def test_contexts_differ_by_their_images_and_are_shared_by_questions(tmp_path: Path) -> None:
    rows = [row("red"), row("blue"), row("red", question="How big?")]
    requests = load_task("look", bench(tmp_path, rows), tmp_path).requests
    assert [(r.doc_id, r.sample_id, r.question_id) for r in requests] == [
        (0, "0", 0),
        (2, "0", 1),
        (1, "1", 0),
    ]
    assert len({r.context for r in requests}) == 1
    assert requests[0].context_id == requests[1].context_id != requests[2].context_id


def test_the_data_hash_is_that_of_the_pixels_files_and_texts(tmp_path: Path) -> None:
    def hashed(*rows: Doc) -> str:
        return load_task("look", bench(tmp_path, list(rows)), tmp_path).data_hash

    red = encoded(picture("red"))
    assert hashed(row("red")) == hashed(row(media=[{**red, "path": "elsewhere.png"}]))
    assert len({hashed(row("red")), hashed(row("blue")), hashed(row(question="?"))}) == 3


def test_generated_rows_with_images_are_kept_and_scored(tmp_path: Path) -> None:
    made = []

    def docs(leaf: str, *, samples: int, **_: Any) -> list[Doc]:
        made.append(samples)
        return [row(color) for color in ("red", "blue", "green")[:samples]]

    sized = bench(tmp_path, [], docs=docs, sized=True)
    task = load_task("look", sized, tmp_path, samples=3, length=512)
    again = load_task("look", sized, tmp_path, samples=3, length=512)
    assert made == [1, 3, 1]
    assert task.requests == again.requests
    assert task.data_hash == again.data_hash
    answers = dict(zip([("0", 0, 0), ("1", 0, 0), ("2", 0, 0)], ("red", "x", "red"), strict=True))
    assert task.score(answers) == ({k: float(v == "red") for k, v in answers.items()}, 2 / 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"media": []}, "0 media need as many markers in 'context', not 1"),
        ({"context": "no image"}, "1 media need as many markers in 'context', not 0"),
        ({"context": "", "question": f"{IMAGE}?"}, "1 media need as many markers"),
        ({"question": f"And {VIDEO}?"}, "images and videos belong in 'context'"),
        ({"media": ["x.png"]}, "'media' must be a list of images and videos"),
        ({"media": encoded()}, "'media' must be a list of images and videos"),
    ],
)
def test_markers_and_media_must_match(changes: Doc, message: str) -> None:
    with pytest.raises(UserError, match=f"row 1: {message}"):
        data.complete(row(**changes), "row 1")


def test_an_image_that_cannot_be_read_is_named_with_its_task_and_row(tmp_path: Path) -> None:
    broken = bench(tmp_path, [row(), row(media=[{"bytes": "abc$"}])])
    with pytest.raises(UserError, match=r"^look, row 1: an image is not base64: "):
        load_task("look", broken, tmp_path)
    unknown = bench(tmp_path, [row(), row(media=[image(b"no image")])])
    task = load_task("look", unknown, tmp_path)
    window, vision = Window("tiny", 0), Vision(processor(), "tiny")
    message = "^look, 1: an image cannot be read: Pillow does not know its format; convert it to PNG or JPEG$"
    with pytest.raises(UserError, match=message):
        prompts_of(task, processor().tokenizer, window, None, print, vision)


def test_a_text_model_is_told_what_it_lacks(bpe_tokenizer: Any, tmp_path: Path) -> None:
    look = bench(tmp_path, [row()])
    with pytest.raises(LeftOut, match="model tiny takes no images; use --model with a vision"):
        load_task("look", look, tmp_path, tokenizer=bpe_tokenizer, processor=None)
    both = bench(tmp_path, [row()], media=("image", "video"))
    with pytest.raises(LeftOut, match="takes no images and videos"):
        load_task("look", both, tmp_path, processor=None)
    with pytest.raises(UserError, match="leave out --no-chat-template"):
        load_task("look", look, tmp_path, chat_template=False)
    with pytest.raises(UserError, match="benchmark look must set media"):
        load_task("look", bench(tmp_path, [row()], media=()), tmp_path)


def test_a_text_task_of_a_vision_language_model_has_no_media(tmp_path: Path) -> None:
    plain = row(context="No image. ")
    del plain["media"]
    [request] = load_task("look", bench(tmp_path, [plain], media=()), tmp_path).requests
    assert request.media == ()
    assert request.context.endswith("user\nNo image. ")


@pytest.mark.slow
def test_text_tasks_need_no_vision_package(tmp_path: Path) -> None:
    # An import of a blocked package fails, as if it were not installed.
    code = (
        "import sys\n"
        "blocked = ('lmms_eval', 'torchvision', 'cv2', 'loguru', 'tenacity')\n"
        "sys.modules |= dict.fromkeys(blocked)\n"
        "from kvbench import cli\n"
        "flags = '--policy snapkv --budget 0.2 --task vt,mmstar --samples 1 --length 512 --quiet'\n"
        f"sys.exit(cli.call(['run', *flags.split(), '--out', {str(tmp_path / 'run')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "cells.parquet").is_file()
