"""Runs of vision-language models: images in contexts and dialogues, at every moment."""

from __future__ import annotations

import io
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

import kvbench
from kvbench.benchmark import IMAGE, Benchmark, Doc
from kvbench.data.media import image
from kvbench.engine import attachment, driver
from kvbench.engine import vision as vision_module
from kvbench.engine.vision import Vision
from kvbench.errors import UserError
from kvbench.harness import catalogue
from kvbench.runs import dialogues
from kvbench.runs.batching import Batching
from kvbench.runs.runner import Run
from tests import vision
from tests.sweeps import slow_but

KEY = ["policy", "budget", "moment", "sample_id", "question_id"]
COLOURS = ("red", "green", "blue", "yellow", "white", "black")
SIZES = ((64, 48), (40, 90))


def docs(leaf: str, **_: Any) -> list[Doc]:
    """Two contexts of two questions, or two dialogues of three turns; those of `pictures_chat` bring new images."""
    if leaf == "pictures_chat":
        return [_dialogue(seed, (0, 2 - seed)) for seed in range(2)]
    if leaf == "pictures_first":
        return [_dialogue(seed, (0,)) for seed in range(2)]
    return [
        {
            "context": f"Look: {IMAGE} and {IMAGE} are two pictures. ",
            "question": f"Which is {word}?",
            "outputs": ["x"],
            "media": [_picture(seed), _picture(seed + 1)],
            "max_new_tokens": 4,
        }
        for seed in range(2)
        for word in ("larger", "darker")
    ]


def _dialogue(seed: int, with_picture: tuple[int, ...]) -> Doc:
    turns = [
        {
            "context": f"Picture {turn}: {IMAGE} " * (turn in with_picture),
            "question": f"What is it, {turn}?",
            "answer": "a picture",
            "outputs": ["x"],
            "media": [_picture(seed + turn)] * (turn in with_picture),
            "max_new_tokens": 4,
        }
        for turn in range(3)
    ]
    return {"turns": turns, "frame": {"user": "", "assistant": "", "end": ""}}


def _picture(seed: int) -> dict[str, str]:
    file = io.BytesIO()
    vision.picture(COLOURS[seed], SIZES[seed % 2]).save(file, "PNG")
    return image(file.getvalue())


@pytest.fixture(scope="module")
def yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("yaml")
    (folder / "pictures.yaml").write_text(
        "task: pictures\noutput_type: generate_until\ntest_split: test\n"
        'doc_to_text: "{{context}}<|kvb_split|>{{question}}"\ndoc_to_target: outputs\n'
        "process_results: !function kvbench.harness.own.process_results\n"
        "metric_list:\n  - {metric: score, aggregation: mean, higher_is_better: true}\n"
        "generation_kwargs: {do_sample: false, until: []}\n"
    )
    return folder


@pytest.fixture(autouse=True)
def benchmark(yaml: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Benchmark(
        name="pictures",
        leaves=("pictures", "pictures_chat", "pictures_first"),
        docs=lambda leaf, **k: [_with_metric(row) for row in docs(leaf, **k)],
        yaml=yaml,
        sized=False,
        media=("image",),
    )
    monkeypatch.setattr(catalogue, "resolve_task", lambda spec, *_: [(spec, made)])
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path_factory.getbasetemp() / "pictures-cache"))


def _with_metric(row: Doc) -> Doc:
    return {**row, "metric": "contains_all"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("vl")
    kinds = ["qwen2_vl", "qwen3_vl", *vision.WRAPPERS]
    if not vision.installed("torchvision"):
        kinds = [kind for kind in kinds if kind not in vision.NEED_TORCHVISION]
    return {kind: vision.save(kind, base / kind) for kind in kinds}


def models_or_skip(models: dict[str, str], kind: str) -> str:
    if kind not in models:
        pytest.skip(f"the processor of {kind} needs torchvision")
    return models[kind]


def run(out: Path, model: str, **changes: Any) -> Run:
    base = {"task": "pictures", "samples": 9, "out": str(out), "device": "cpu", "model": model}
    return kvbench.run({**base, **changes}, progress=False)


def texts(made: Run) -> dict[tuple[Any, ...], str]:
    frame = made.samples.set_index(KEY)
    return dict(zip(frame.index, frame["response"], strict=True))


def test_limits_of_pixels_are_part_of_the_cell(models: dict[str, str], tmp_path: Path) -> None:
    model = models_or_skip(models, "qwen2_vl")
    plain = run(tmp_path / "plain", model, policy="full")
    limited = run(tmp_path / "limited", model, policy="full", max_pixels=2 * 28 * 28, max_frames=4)
    assert limited.samples.visual_tokens.max() < plain.samples.visual_tokens.max()
    for label in ("cell", "match"):
        assert not set(limited.cells[label]) & set(plain.cells[label])
    generation = [json.loads(versions).get("generation", {}) for versions in limited.cells.versions]
    assert generation == [{"max_pixels": 2 * 28 * 28}]  # it has no videos, so the number of frames does not count
    assert "pixels" not in plain.cells.versions.item()


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", *vision.WRAPPERS])
@torch.no_grad()
def test_the_full_cache_answers_like_the_model_itself(kind: str, models: dict[str, str], tmp_path: Path) -> None:
    made = run(tmp_path, models_or_skip(models, kind), policy="full")
    processor, model = vision.processor(kind), vision.model(kind)
    for row, doc in zip(made.samples.itertuples(), docs("pictures"), strict=True):
        seed = int(row.sample_id)
        pictures = [vision.picture(COLOURS[s], SIZES[s % 2]) for s in (seed, seed + 1)]
        content: list[dict[str, str]] = []
        for i, text in enumerate(doc["context"].split(IMAGE)):
            content += [{"type": "image"}] * bool(i) + [{"type": "text", "text": text}]
        content.append({"type": "text", "text": doc["question"]})
        messages = [{"role": "user", "content": content}]
        prompt = processor.apply_chat_template(messages, add_generation_prompt=True)
        inputs = processor(text=[prompt], images=pictures, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        answer = out[0, inputs["input_ids"].shape[1] :]
        assert row.response == processor.tokenizer.decode(answer, skip_special_tokens=True)
        visual = int((inputs["input_ids"] == processor.image_token_id).sum())
        assert row.visual_tokens == visual > 0
        assert row.context_tokens + row.question_tokens == inputs["input_ids"].shape[1]
    assert len({row.response for row in made.samples.itertuples()}) > 1


GRIDS: dict[str, dict[str, Any]] = {
    "context": {"policy": "h2o,snapkv:window=4,random", "budget": "0.3,visual:3"},
    "question": {"policy": "snapkv:window=4,fastv:layer=1", "budget": "visual:0.3"},
    "decode": {"policy": "h2o:buffer=1", "budget": "20"},
    "turns": {"policy": "h2o,random", "budget": "0.3,visual:0.5", "task": "pictures_chat"},
}


@pytest.mark.parametrize("moment", slow_but(GRIDS, next(iter(GRIDS))))
def test_responses_depend_neither_on_the_batch_nor_on_the_other_cells(
    moment: str, models: dict[str, str], tmp_path: Path
) -> None:
    grid = {**GRIDS[moment], "moment": moment}
    together = run(tmp_path / "all", models["qwen2_vl"], **grid)
    assert not together.failed
    alone: dict[tuple[Any, ...], str] = {}
    for policy in str(grid["policy"]).split(","):
        for budget in str(grid["budget"]).split(","):
            only = {**grid, "policy": policy, "budget": budget, "full": False, "batch_size": 1}
            folder = tmp_path / f"{policy}-{budget}".replace(":", "-")
            alone |= texts(run(folder, models["qwen2_vl"], **only))
    shared = texts(together)
    assert {k: v for k, v in shared.items() if k[0] != "full"} == alone
    assert len(set(shared.values())) > 2


def test_images_are_processed_and_encoded_once_for_all_cells_and_questions(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = {"policy": "divprune,cdpruner", "budget": "visual:3", "moment": "context,question"}
    calls = Counter[str]()

    def count(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(Vision, "_processed")
    count(Qwen2VisionTransformerPretrainedModel, "forward")
    planned: list[int] = []

    def noted(batching: Batching, *args: Any, original: Any = Batching.fit, **kwargs: Any) -> None:
        planned.append(kwargs["media_bytes"])
        original(batching, *args, **kwargs)

    monkeypatch.setattr(Batching, "fit", noted)
    once = run(tmp_path / "once", models["qwen2_vl"], **grid)
    visual_tokens = once.samples.groupby("sample_id").visual_tokens.first().sum()
    assert planned == [vision_module.remembered_bytes(visual_tokens)] and planned[0] > 0
    assert calls == {"_processed": 2, "forward": 2}  # two contexts
    monkeypatch.setattr(driver, "encoding_once", lambda model: nullcontext())
    monkeypatch.setattr(vision_module, "REMEMBERED", 0)  # only the last context's
    again = run(tmp_path / "again", models["qwen2_vl"], **grid)
    assert calls["_processed"] == 4 and calls["forward"] == 2 + 14
    assert texts(once) == texts(again)
    columns = ["held_visual", "held_entries"]
    assert once.samples[columns].equals(again.samples[columns])


@pytest.mark.parametrize(
    ("kind", "task", "together"),
    [("qwen2_vl", "pictures_first", 4), ("qwen3_vl", "pictures_chat", 4), ("mistral3", "pictures_chat", 1)],
)
def test_dialogues_with_images_are_decoded_in_one_batch_where_it_changes_nothing(
    kind: str, task: str, together: int, models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Qwen's models, and those whose images come first: of two dialogues at two budgets."""
    sizes: list[int] = []

    def noted(worker: Any, held: list[dialogues.Dialogue], *rest: Any, original: Any = dialogues._hold) -> None:
        sizes.append(len(held))
        original(worker, held, *rest)

    monkeypatch.setattr(dialogues, "_hold", noted)
    grid = {"policy": "h2o", "budget": "0.3,visual:0.5", "moment": "turns", "task": task, "full": False}
    model = models_or_skip(models, kind)
    batched = run(tmp_path / "batched", model, **grid)
    assert not batched.failed and set(sizes) == {together}
    sizes.clear()
    alone = run(tmp_path / "alone", model, batch_size=1, **grid)
    assert set(sizes) == {1}
    assert texts(batched) == texts(alone)
    assert len(set(texts(alone).values())) > 2


@pytest.mark.parametrize("kind", ["qwen2_vl", *vision.WRAPPERS])
def test_a_visual_budget_is_held_to_the_entry(kind: str, models: dict[str, str], tmp_path: Path) -> None:
    made = run(tmp_path, models_or_skip(models, kind), policy="divprune,random", budget="visual:3")
    heads = 2 * 2
    for row in made.samples[made.samples["policy"] != "full"].itertuples():
        text = row.context_tokens - row.visual_tokens
        assert row.held_entries == row.budget_entries == (text + 3) * heads
        if row.policy == "divprune":
            assert row.held_visual == 3 * heads
    cells = made.cells.set_index("policy")
    assert cells.loc["divprune", "held_visual"] == 12
    assert cells.loc["random", "held_visual"] != 12
    assert cells.loc["full", "held_visual"] == cells.loc["full", "visual_tokens"] * heads


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moment": "chunked:16", "policy": "h2o", "budget": "20"}, "moment chunked does not"),
        ({"policy": "fastv", "moment": "decode", "budget": "20"}, "prunes once"),
        ({"policy": "dart", "budget": "visual:2"}, "has only 2 layers; use layer=1"),
        ({"policy": "h2o", "truncate": "middle:60"}, "never truncated"),
    ],
)
def test_what_images_do_not_allow_is_refused(
    changes: dict[str, Any], message: str, models: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, models["qwen2_vl"], **changes)


def test_a_dialogue_goes_on_from_its_images(models: dict[str, str], tmp_path: Path) -> None:
    """With the reference answers in the history, and live: the tokens of all images are seen."""
    made = run(tmp_path, models["qwen2_vl"], policy="random", budget="0.5", moment="turns",
               task="pictures_chat")  # fmt: skip
    full = made.samples[made.samples["policy"] == "full"].sort_values(["sample_id", "question_id"])
    seen = full.groupby("sample_id")["visual_tokens"].apply(list)
    assert all(before > 0 for before, *_ in seen)
    assert [[tokens > before for tokens in row] for row in seen for before in row[:1]] == [
        [False, False, False],  # the second image comes with the last question
        [False, False, True],
    ]


def test_budgets_that_keep_none_or_all_of_the_images_are_told_in_a_line(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {"task": "pictures", "samples": 9, "device": "cpu", "model": models["qwen2_vl"]}

    def told(**changes: Any) -> tuple[Run, str]:
        given = {**base, **changes, "out": str(tmp_path / f"{len(list(tmp_path.iterdir()))}")}
        made = kvbench.run(given)
        return made, " ".join(capsys.readouterr().err.split())

    bare, said = told(policy="divprune,random", budget="0.2,visual:0.2")
    line = (
        "pictures: budget 0.2 is spent on text first, so divprune keeps no image tokens in 4 "
        "of 4 prompts; use a budget such as visual:0.2"
    )
    assert said.count("is spent on text first") == 1 and line in said
    held = bare.cells.set_index(["policy", "budget"])["held_visual"]
    assert held["divprune", "0.2"] == 0 < held["divprune", "visual:0.2"]

    most = int(bare.samples["visual_tokens"].max())
    whole, said = told(policy="random", budget=f"visual:{most},visual:{most - 1}", full=False)
    assert (
        f"pictures: budget visual:{most} keeps everything, because no prompt has more than {most} visual tokens"
    ) in said
    assert f"visual:{most - 1} keeps" not in said
    kept = whole.samples.groupby("budget")["held_visual"].max() / 4
    assert kept[f"visual:{most}"] == most


def test_masks_do_not_depend_on_a_forward_that_was_interrupted(models: dict[str, str], tmp_path: Path) -> None:
    """Gemma 4 makes its masks before its decoder runs."""
    name = models_or_skip(models, "gemma4")
    attachment._ACTIVE.append(None)  # type: ignore[arg-type]
    made = run(tmp_path / "run", name, policy="full", samples=1)
    assert not made.failed and not attachment._ACTIVE
