"""lmms-eval as a harness: definitions, splitting, scoring and what is refused.

The tests of the tasks compare prompts and scores with lmms-eval's own evaluator.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.benchmark import Benchmark, Doc
from kvbench.errors import LeftOut, UserError
from kvbench.harness import optional
from kvbench.harness.lmms_prompts import MediaRows, media_end
from kvbench.harness.optional import lacking
from kvbench.harness.rows import SENTINEL

from ...lmms import needs_lmms_eval
from ...vision import encoded, load_task, picture


def bench(folder: Path, rows: list[Doc], yaml: str, **changes: Any) -> Benchmark:
    folder.mkdir(exist_ok=True)
    (folder / "look.yaml").write_text(yaml)
    usual: dict[str, Any] = {
        "name": "look",
        "leaves": ("look",),
        "docs": lambda leaf, **_: rows,
        "yaml": folder,
        "harness": "lmms_eval",
        "metric": "average",
        "media": ("image",),
        "sized": False,
    }
    return Benchmark(**usual | changes)


MMSTAR = "definition: mmstar/mmstar.yaml\n"


def row(**changes: Any) -> Doc:
    usual = {
        "index": 0,
        "question": "How many?",
        "image": encoded(),
        "answer": "B",
        "category": "math",
        "l2_category": "geometry",
    }
    return {**usual, **changes}


@needs_lmms_eval
def test_our_yaml_replaces_parts_of_the_definition(tmp_path: Path) -> None:
    plain = load_task("look", bench(tmp_path, [row()], MMSTAR), tmp_path)
    assert plain.requests[0].question.startswith("How many?\nAnswer with the option's letter")
    assert plain.requests[0].max_new_tokens == 128
    other = (
        MMSTAR + 'doc_to_text: "{{question}} {{answer}}?"\ngeneration_kwargs: {max_new_tokens: 7, '
        "temperature: 0.5, do_sample: true}\nrepeats: 2\nmetric: math\n"
    )
    changed = load_task("look", bench(tmp_path, [row()], other), tmp_path)
    [request] = changed.requests
    assert request.question.startswith("How many? B?")
    assert (request.max_new_tokens, request.repeats, changed.metric) == (7, 2, "math")
    assert request.sampling is not None
    assert request.sampling.temperature == 0.5


@needs_lmms_eval
def test_every_answer_is_scored_alone_and_repeatably(tmp_path: Path) -> None:
    rows = [row(index=i, answer=gold, l2_category=f"c{i}") for i, gold in enumerate("ABC")]
    task = load_task("look", bench(tmp_path, rows, MMSTAR), tmp_path)
    keys = {(r.sample_id, r.question_id, 0): "B" for r in task.requests}
    scores, mean = task.score(keys)
    assert sorted(scores.values()) == [0, 0, 1]
    assert mean == pytest.approx(1 / 3)
    one = next(key for key, score in scores.items() if score)
    assert task.score({one: "B"}) == ({one: 1.0}, 1.0)
    assert task.score({})[0] == {}
    state = random.getstate()
    assert task.score(keys) == (scores, mean)
    assert random.getstate() == state
    with pytest.raises(KeyError):
        task.score({("9", 9, 0): "B"})


@needs_lmms_eval
def test_the_other_metrics_have_the_responses_that_they_are_about(tmp_path: Path) -> None:
    rows = [row(index=i, answer="B", category=name) for i, name in enumerate(("math", "math", "science & technology"))]
    task = load_task("look", bench(tmp_path, rows, MMSTAR), tmp_path)
    keys = {(r.sample_id, r.question_id, 0): "AB B".split(" ")[r.doc_id > 0] for r in task.requests}
    metrics = {metric.name: metric for metric in task.score_metrics(keys)}
    assert next(iter(metrics)) == "average" and {len(metrics[name].values) for name in ("average",)} == {3}
    assert (len(metrics["math"].values), len(metrics["science & technology"].values)) == (2, 1)
    assert metrics["science & technology"].score == 1 and metrics["math"].higher_is_better
    assert all(metric.aggregate is None and not metric.filter for metric in metrics.values())


@needs_lmms_eval
def test_it_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    yaml = "definition: mmmu_pro/mmmu_pro_vision.yaml\n"
    rows = [{"id": "test_Art_1", "image": encoded(), "answer": "A", "subject": "Art"}]
    task = load_task("look", bench(tmp_path, rows, yaml, metric="mmmu_acc"), tmp_path)
    assert task.score({("0", 0, 0): "A"})[1] == 1  # lmms-eval prints a table here
    assert capfd.readouterr() == ("", "")


@needs_lmms_eval
@pytest.mark.parametrize(
    ("yaml", "changes", "message"),
    [
        ("task: x\n", {}, r"look\.yaml must name a definition of lmms-eval"),
        ("definition: none/none.yaml\n", {}, r"lmms-eval has no definition none/none\.yaml"),
        (MMSTAR, {"metric": "score"}, "look has no metric 'score'; it has .*average"),
        (MMSTAR + "output_type: generate_until_multi_round\n", {}, "only generate_until"),
        (MMSTAR + "doc_to_visual: null\n", {}, "has neither images nor videos"),
    ],
)
def test_what_is_wrong_with_a_benchmark_is_said(yaml: str, changes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_task("look", bench(tmp_path, [row()], yaml, **changes), tmp_path)


def test_a_text_model_is_told_before_anything_is_read(tmp_path: Path) -> None:
    def docs(leaf: str, **_: Any) -> list[Doc]:
        raise AssertionError("the rows are not needed")

    look = bench(tmp_path, [], MMSTAR, docs=docs)
    with pytest.raises(LeftOut, match="model tiny takes no images; use --model with a vision"):
        load_task("look", look, tmp_path, processor=None)


def test_a_missing_package_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only(*there: str) -> None:
        find = {name: object() for name in there}.get
        monkeypatch.setattr(optional.importlib.util, "find_spec", find)

    images = bench(tmp_path, [], MMSTAR)
    videos = bench(tmp_path, [], MMSTAR, media=("video",))
    only()
    assert "run `make vision`, or: pip install 'kvbench[vision]' && pip install" in lacking(images)
    assert "needs lmms-eval" in lacking(videos)
    with pytest.raises(LeftOut, match="it needs lmms-eval, which is not installed"):
        load_task("look", images, tmp_path)
    only("lmms_eval")
    assert lacking(images) == ""
    assert "needs opencv" in lacking(videos)
    only("lmms_eval", "cv2")
    assert lacking(videos) == ""


@pytest.mark.slow
def test_an_import_of_a_definition_that_fails_is_named(tmp_path: Path) -> None:
    pytest.importorskip("lmms_eval", reason="lmms-eval is not installed (make vision)")
    code = (
        "import sys; sys.modules['cv2'] = None\n"
        "from kvbench.harness.lmms_eval import _definition, _quiet\n"
        "with _quiet():\n    _definition('videomme/videomme.yaml')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "LeftOut: it needs cv2, which is not installed; run `make vision`" in done.stderr


def test_documents_are_new_mappings_with_pictures() -> None:
    given = [{"n": [1], "image": encoded(picture("red")), "extra": {"a": 1}}]
    table = MediaRows(given)
    first = table[0]
    first["n"].append(2)
    assert table[0]["n"] == given[0]["n"] == [1]
    assert "extra" not in first
    assert first["image"].convert("RGB").medium.load().size == (64, 48)
    with pytest.raises(UserError, match="RGB images, not L"):
        first["image"].convert("L")
    assert list(table.features) == ["n", "image"]
    table.forget_media()
    assert list(table) == [{"n": [1]}]


def test_the_end_of_the_last_medium() -> None:
    assert media_end("no") == 0
    text = "a<|kvb_image|>b<|kvb_video|>c"
    assert text[media_end(text) :] == "c"
    assert SENTINEL not in text
