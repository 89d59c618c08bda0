"""kvbench as a model of lmms-eval: the full cache equals lmms-eval's own loop, and an eviction equals `kvbench run`."""

from __future__ import annotations

import base64
import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import kvbench
from kvbench.benchmark import Benchmark
from kvbench.cli.app import call
from kvbench.data.media import picture
from kvbench.errors import UserError
from kvbench.harness import catalogue
from kvbench.lmms_eval import manifest, run_lmms_eval
from kvbench.reference_vl import LEXICON
from kvbench.reference_vl import path as reference_path
from kvbench.reference_vl.dialogues import DialogueSettings, vqa
from kvbench.reference_vl.pictures import Picture

from ..lmms import needs_lmms_eval
from ..vision import installed

ROOT = Path(__file__).parents[2]
TASK = "coloured_shapes"
YAML = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {output_type}
doc_to_visual: {look}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{max_new_tokens: 6}}
repeats: {repeats}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
FUNCTIONS = """
import base64, io
from PIL import Image

def look(doc):
    return [opened(entry) for entry in doc["pictures"]]

def opened(entry):
    return entry if hasattr(entry, "convert") else Image.open(io.BytesIO(base64.b64decode(entry["bytes"])))
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of lmms-eval: two questions about the pictures of each scene."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = []
    for scene in range(4):
        (turn,) = vqa(DialogueSettings(images=(2, 3), questions=2), 3, scene).turns
        pictures = [encoded(part) for part in turn.parts if isinstance(part, Picture)]
        documents += [
            {"pictures": pictures, "question": " ".join(question.words), "answer": question.answer}
            for question in turn.questions
        ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / "utils.py").write_text(FUNCTIONS)
    usual = {"rows": folder / "rows.jsonl", "output_type": "generate_until", "look": "!function utils.look"}
    for name, changes in {
        TASK: {"repeats": 1},
        "repeated": {"repeats": 2},
        "bare": {"look": "null", "repeats": 1},
        "rounds": {"output_type": "generate_until_multi_round", "repeats": 1},
    }.items():
        (folder / f"{name}.yaml").write_text(YAML.format(**{**usual, "name": name, **changes}))
    return folder


def encoded(shapes: Picture) -> dict[str, str]:
    content = io.BytesIO()
    Image.fromarray(shapes.pixels()).save(content, "PNG")
    return {"bytes": base64.b64encode(content.getvalue()).decode()}


def answers(tasks: Path, model: Any, name: str = TASK) -> tuple[list[Any], dict[str, Any]]:
    """Responses of a model to every document, and its results."""
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager

    manager = TaskManager(verbosity="ERROR", include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(
        model=model, tasks=[name], task_manager=manager, bootstrap_iters=0, process_docs_parallel=1, verbosity="ERROR"
    )
    samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0] for sample in samples], found["results"][name]


def kvbench_model(**settings: Any) -> Any:
    from kvbench.lmms_eval.model import KVBenchLMM

    return KVBenchLMM("reference-vl", device="cpu", dtype="float32", **settings)


@needs_lmms_eval
@pytest.mark.parametrize("settings", [{}, {"policy": "snapkv", "budget": 1.0, "moment": "context"}])
def test_a_cache_that_keeps_everything_equals_lmms_evals_own_loop(tasks: Path, settings: dict[str, Any]) -> None:
    from benchmarks.lmms_eval_stock import stock_model

    expected, expected_results = answers(tasks, stock_model(reference_path(), batch_size=1))
    found, results = answers(tasks, kvbench_model(**settings))
    assert found == expected
    assert len({str(answer) for answer in found}) > 2
    assert results == expected_results


@needs_lmms_eval
@pytest.mark.parametrize(
    ("policy", "budget", "moment", "changes"),
    [
        ("adakv:window=4", "0.3", "context", True),
        # Answers of one word: their first token is chosen before the eviction.
        ("snapkv:window=4", "0.3", "question", False),
        ("knorm", "visual:4", "context", True),
        ("divprune", "visual:3", "question", True),
    ],
)
def test_an_eviction_gives_the_answers_of_kvbench_run(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, budget: str, moment: str, changes: bool
) -> None:
    rows = [json.loads(line) for line in (tasks / "rows.jsonl").read_text().splitlines()]
    (tmp_path / f"{TASK}.yaml").write_text(f"definition: {tasks / TASK}.yaml\n")
    shapes = Benchmark(
        name=TASK,
        leaves=(TASK,),
        docs=lambda *_, **__: rows,
        yaml=tmp_path,
        harness="lmms_eval",
        metric="exact_match",
        sized=False,
        lexicons=(LEXICON,),
        media=("image",),
    )
    monkeypatch.setattr(catalogue, "resolve_task", lambda spec, *_: [(spec, shapes)])
    grid = {
        "models": ["reference-vl"],
        "tasks": [TASK],
        "policies": [policy],
        "budgets": [budget],
        "moments": [moment],
        "samples": len(rows),
        "dtype": "float32",
        "device": "cpu",
        "out": str(tmp_path / "run"),
    }
    run = kvbench.run(grid, progress=False).samples
    expected = run[run.policy != "full"].sort_values("doc_id").response.tolist()
    found, _ = answers(tasks, kvbench_model(policy=policy, budget=budget, moment=moment))
    assert [answer for [answer] in found] == expected
    full = run[run.policy == "full"].sort_values("doc_id").response.tolist()
    assert (expected != full) == changes


@needs_lmms_eval
def test_every_repeat_of_a_prompt_has_an_answer(tasks: Path) -> None:
    once, _ = answers(tasks, kvbench_model())
    twice, _ = answers(tasks, kvbench_model(), "repeated")
    assert twice == [answer * 2 for answer in once]


@needs_lmms_eval
def test_prompts_without_images_are_compressed_after_the_question_only(tasks: Path) -> None:
    full, _ = answers(tasks, kvbench_model(), "bare")
    kept, _ = answers(tasks, kvbench_model(policy="snapkv", budget=1.0), "bare")
    assert kept == full
    for settings, says in (
        ({"policy": "snapkv", "budget": 0.5, "moment": "context"}, "so none has a context; use moment=question"),
        ({"policy": "snapkv", "budget": "visual:4"}, "use a budget such as 0.2 instead of a visual one"),
        ({"policy": "divprune", "budget": 0.5}, "divprune prunes images"),
    ):
        with pytest.raises(UserError, match=f"bare has prompts without images.*{says}"):
            answers(tasks, kvbench_model(**settings), "bare")


@needs_lmms_eval
def test_dialogues_are_refused_in_one_line(tasks: Path) -> None:
    with pytest.raises(UserError, match="rounds is a dialogue"):
        answers(tasks, kvbench_model(), "rounds")


@needs_lmms_eval
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"moment": "decode"}, "--moment decode; use context or question"),
        ({"policy": "snapvk"}, "did you mean snapkv"),
        ({"budget": 1.5}, "budget"),
        ({"buget": 0.2}, "no argument 'buget'; did you mean budget"),
        ({"batch_size": "few"}, "batch_size must be an integer"),
        ({"attn": "eagr"}, "unknown attn 'eagr'; did you mean eager"),
        ({"pretrained": "reference"}, "takes no images; use pretrained=reference-vl, or `kvbench lm-eval`"),
        ({"pretrained": "reference-vl", "policy": "fastv:layer=9"}, "use layer="),
    ],
)
def test_bad_settings_are_refused_before_a_model_is_loaded(settings: dict[str, Any], says: str) -> None:
    from kvbench.lmms_eval.model import KVBenchLMM

    with pytest.raises(UserError, match=says):
        KVBenchLMM(**settings)


@needs_lmms_eval
def test_lmms_eval_finds_the_model_by_its_entry_point() -> None:
    from lmms_eval.models.registry_v2 import ModelRegistryV2

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["lmms_eval.models"] == {"kvbench": "kvbench.lmms_eval:manifest"}
    # The metadata of an editable installation may be older than pyproject.toml.
    registry = ModelRegistryV2()
    registry.register_manifest(manifest())
    assert registry.get_model_class("kvbench").__name__ == "KVBenchLMM"


@pytest.mark.skipif(installed("lmms_eval"), reason="lmms-eval is installed")
def test_without_lmms_eval_the_command_says_how_to_install_it() -> None:
    with pytest.raises(UserError, match="lmms-eval is not installed; run `make vision`"):
        run_lmms_eval([])


def test_a_picture_is_identified_by_its_pixels() -> None:
    red = Image.new("RGB", (4, 3), "red")
    turned = red.copy()
    turned.info["exif"] = Image.Exif().tobytes()
    assert picture(red) == picture(turned) == picture(red.convert("P"))
    assert picture(red) != picture(Image.new("RGB", (3, 4), "red"))
    assert picture(red).load().tobytes() == red.tobytes()


@needs_lmms_eval
@pytest.mark.slow
def test_the_command_is_lmms_evals_own(tasks: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["lmms-eval", "--model", "kvbench", "--tasks", TASK, "--include_path", str(tasks), "--device", "cpu"]
    settings = "pretrained=reference-vl,policy=snapkv:window=4,budget=0.3,moment=context"
    assert call([*arguments, "--model_args", settings, "--limit", "2"]) == 0
    out = capfd.readouterr().out
    assert f"|{TASK}|" in out and "snapkv:window=4" in out
    assert call([*arguments, "--model_args", "policy=snapvk"]) == 2
    assert "did you mean snapkv" in capfd.readouterr().err
