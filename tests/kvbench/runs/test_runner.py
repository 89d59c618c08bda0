"""The main road: a grid on a random Llama with a byte-level BPE tokenizer and a chat template."""

from __future__ import annotations

import json
import math
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import kvbench
from kvbench.engine import driver, pool
from kvbench.engine.observers import observer_for
from kvbench.errors import UserError
from kvbench.progress import Silent
from kvbench.runs.grid import Grid
from kvbench.runs.runner import describe, execute
from kvbench.runs.schema import FIDELITY
from kvbench.runs.store import RunStore
from kvbench_tasks.synthetic.words import prose
from tests.sweeps import slow

OWN: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cache")
    rng = random.Random(0)
    rows = []
    for _ in range(3):
        context = ". ".join(" ".join(w) for w in islice(prose(rng), 12))
        for question in (" What is green?", " Who has read the letter?"):
            row = {"context": context, "question": question, "answers": "x", "max_new_tokens": 4}
            rows.append(json.dumps(row))
    (folder / "own.jsonl").write_text("\n".join(rows))
    OWN[:] = [str(folder / "own.jsonl")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_CACHE", str(folder))
        yield


def make(folder: str, out: Path, **changes: Any) -> Grid:
    """18 cells: two tasks (30 and 4 tokens an answer, the second with two questions a context)."""
    base = {
        "policy": "random,snapkv:window=8",
        "budget": "0.2,24",
        "task": f"vt,{OWN[0]}",
        "model": folder,
        "length": 512,
        "samples": 3,
        "out": str(out),
        "moment": "context,question",
    }
    return Grid.from_dict({**base, **changes})


def texts(path: Path) -> dict[Any, str]:
    with RunStore(path) as store:
        return {r.key: r.response for r in store.responses()}


@pytest.fixture(scope="module")
def unbroken(llama_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("run") / "unbroken"
    return execute(make(llama_folder, out))


def test_results_have_every_cell_and_every_sample(unbroken: Any) -> None:
    cells, samples = kvbench.load(unbroken.path)
    assert len(cells) == 2 * (1 + 2 * 2 * 2)
    assert (cells.status == "ok").all()
    assert not cells.cell.duplicated().any()
    assert len(samples) == 9 * (3 + 3)
    numbers = cells.select_dtypes("float64")
    fidelity = [name for name in numbers if name in FIDELITY or name.startswith("kl_") or name == "fidelity_tokens"]
    assert len(fidelity) == len(FIDELITY) - 1 + 4 and numbers[fidelity].isna().all().all()  # log_kl is no column
    numbers = numbers.drop(columns=fidelity)
    assert not numbers.isna().any().any()
    full = cells[cells.policy == "full"]
    assert (full["diff"] == 0).all() and (full.score == full.full_score).all()


def test_budgets_are_held_to_the_entry(unbroken: Any) -> None:
    samples = unbroken.samples
    heads = 2 * 2
    for row in samples.itertuples():
        tokens = row.context_tokens
        if row.moment == "question":
            tokens += row.question_tokens
        kept = {"0.2": math.floor(0.2 * tokens + 0.5), "24": 24, "full": tokens}[row.budget]
        assert row.held_entries == row.budget_entries == heads * kept
        assert row.kv_bytes_live == row.held_entries * 2 * 16 * 4


@pytest.mark.parametrize(("together", "prefills"), [("auto", 3), (2, 2)])
def test_one_prefill_serves_the_grid(
    llama_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    together: int | str,
    prefills: int,
) -> None:
    from kvbench.engine.prefix import Prefix

    count = {"prefixes": 0}
    original = Prefix.__init__

    def counting(self: Any, *args: Any) -> None:
        count["prefixes"] += 1
        original(self, *args)

    monkeypatch.setattr(Prefix, "__init__", counting)
    execute(make(llama_folder, tmp_path / "run", task="vt", prefill_batch=together))
    assert count["prefixes"] == prefills, "one per context, or per two of them; not per cell"


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["context,question", slow("chunked:100")])
def test_contexts_that_are_prefilled_together_are_answered_alike(
    llama_folder: str, tmp_path: Path, moment: str
) -> None:
    found = []
    for together in (1, 3):
        grid = make(
            llama_folder,
            tmp_path / str(together),
            policy="random,h2o,sirllm,expected_attention",
            moment=moment,
            samples=4,
            prefill_batch=together,
        )
        found.append(texts(execute(grid).path))
    assert found[0] == found[1]
    assert len(set(found[0].values())) > 5


class Foreign:
    """An observer with nothing but what `kvbench.plugin.Observer` requires."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def update(self, *args: Any) -> None:
        self.own.update(*args)

    def read(self, layer: int) -> torch.Tensor:
        found: torch.Tensor = self.own.read(layer)
        return found

    def fork(self) -> Foreign:
        return Foreign(self.own.fork())


def test_an_observer_that_cannot_be_split_prefills_each_context_alone(
    llama_folder: str, tmp_path: Path, unbroken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "observer_for", lambda n, info: Foreign(observer_for(n, info)))
    found = texts(execute(make(llama_folder, tmp_path / "run", prefill_batch=3)).path)
    assert found == texts(unbroken.path)


def test_cells_alone_and_together_give_the_same_bytes(llama_folder: str, tmp_path: Path, unbroken: Any) -> None:
    alone = {}
    for i, (policy, size) in enumerate([("random", 1), ("snapkv:window=8", 5)]):
        out = tmp_path / str(i)
        execute(make(llama_folder, out, policy=policy, batch_size=size, full=False))
        alone |= texts(out)
    together = texts(unbroken.path)
    assert alone and all(together[key] == text for key, text in alone.items())


def test_a_broken_run_goes_on_to_the_same_bytes(
    llama_folder: str, tmp_path: Path, unbroken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, written, original = tmp_path / "broken", [], RunStore.append
    limit = 1

    def failing(self: RunStore, responses: Any) -> None:
        if len(written) >= limit:
            raise KeyboardInterrupt
        original(self, responses)
        written.append([r.key for r in responses])

    monkeypatch.setattr(RunStore, "append", failing)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            execute(make(llama_folder, out, samples=2, batch_size=3))
        limit += 1
    monkeypatch.undo()
    execute(make(llama_folder, out))
    assert texts(out) == texts(unbroken.path)
    keys = [key for block in written for key in block]
    assert len(keys) == len(set(keys)), "nothing is generated twice"


class Said(Silent):
    """Keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def test_a_run_goes_on_in_smaller_batches_when_memory_runs_out(
    llama_folder: str, tmp_path: Path, unbroken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pool.forward

    def scarce(model: Any, cache: Any, ids: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
        if len(ids) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(model, cache, ids, *more, **options)

    monkeypatch.setattr(pool, "forward", scarce)
    said = Said()
    found = execute(make(llama_folder, tmp_path / "run"), said)
    rows = [m.split()[5] for m in said.messages if m.startswith("out of memory")]
    assert rows == ["64", "32", "16", "8"]
    assert not found.failed
    assert texts(found.path) == texts(unbroken.path)


def test_more_samples_extend_a_run(llama_folder: str, tmp_path: Path, unbroken: Any) -> None:
    out = tmp_path / "grown"
    first = execute(make(llama_folder, out, samples=1))
    before = (out / "responses.jsonl").read_bytes()
    second = execute(make(llama_folder, out))
    assert (out / "responses.jsonl").read_bytes().startswith(before)
    assert len(second.samples) == 3 * len(first.samples)
    assert texts(out) == texts(unbroken.path)


def test_a_failing_policy_fails_its_cells_only(llama_folder: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def broken(v, after: int = 0):\n    raise RuntimeError('no luck')\n")
    done = execute(make(llama_folder, tmp_path / "run", policy=f"{bad}:broken,local", task="vt"))
    status = done.cells.groupby("policy").status.unique().apply(list).to_dict()
    assert status == {"full": ["ok"], "local": ["ok"], f"{bad}:broken": ["error"]}
    assert "no luck" in done.cells[done.cells.status == "error"].iloc[0].error
    assert done.failed
    bad.write_text("def broken(v, after: int = 0):\n    return v.noise()\n")
    mended = execute(make(llama_folder, tmp_path / "run", policy=f"{bad}:broken,local", task="vt"))
    assert (mended.cells.status == "ok").all()


def test_a_policy_that_fails_at_one_budget_keeps_its_other_cells(llama_folder: str, tmp_path: Path) -> None:
    picky = tmp_path / "picky.py"
    picky.write_text("def picky(v):\n    assert (v.budget != 24).all(), 'not this budget'\n    return v.noise()\n")
    done = execute(make(llama_folder, tmp_path / "run", policy=f"{picky}:picky", task="vt", full=False))
    for budget, group in done.cells.groupby("budget"):
        assert set(group.status) == ({"error"} if budget == "24" else {"ok"})


def test_memory_that_does_not_suffice_is_one_line_and_the_run_goes_on_later(
    llama_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from kvbench.engine.pool import Pool

    grid = make(llama_folder, tmp_path / "run", task="vt", budget="24", moment="question")
    with monkeypatch.context() as patch:

        def full(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nTry ...")

        patch.setattr(Pool, "add", full)
        with pytest.raises(UserError, match=r"CUDA out of memory.*--batch-size") as raised:
            execute(grid)
    assert "\n" not in str(raised.value)
    assert set(execute(grid).cells.status) == {"ok"}


def test_dry_run_says_what_would_be_done(llama_folder: str, tmp_path: Path, unbroken: Any) -> None:
    said: list[str] = []
    lines = describe(make(llama_folder, tmp_path / "dry"), said.append)
    assert "18 cells" in lines[0] and "54 responses, 54 still to generate" in lines[1]
    assert "estimate" in lines[2]
    assert not (tmp_path / "dry").exists()
    lines = describe(make(llama_folder, unbroken.path, samples=4), said.append)
    assert "72 responses, 18 still to generate" in lines[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 8192}, "8192 tokens do not fit into the 4096"),
        ({"model": "./nowhere"}, "no such folder"),
        ({"model": __file__}, "is a file, but not a GGUF file"),
        ({"model": "nobody/nothing-here"}, "cannot be loaded"),
        ({"device": "tpu9"}, "device tpu9"),
        ({"task": "qa_1"}, "nothing to run"),
        ({"max_pixels": 50176}, "--max-pixels is for tasks with images or videos"),
        ({"max_frames": 4}, "--max-frames is for tasks with images or videos"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    llama_folder: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        execute(make(llama_folder, tmp_path / "run", **changes))
    assert "\n" not in str(caught.value)


def test_own_data_and_own_file_with_the_library(llama_folder: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text(
        '{"context": "The door code is 4711. The garden is green. It rains.", '
        '"question": " What is the code?", "answers": ["4711"]}\n'
        '{"context": "The door code is 4711. The garden is green. It rains.", '
        '"question": " How is the garden?", "answers": "green", "max_new_tokens": 4}\n'
    )
    done = kvbench.run(
        {
            "policy": "streaming_llm",
            "budget": 6,
            "task": str(mine),
            "model": llama_folder,
            "out": str(tmp_path / "run"),
        }
    )
    assert list(done.cells.task) == ["mine", "mine"]
    assert list(done.cells.length) == [0, 0]
    assert done.samples.context_id.nunique() == 1


def test_another_grid_in_the_same_folder_is_refused(llama_folder: str, tmp_path: Path, unbroken: Any) -> None:
    before = (unbroken.path / "cells.parquet").read_bytes()
    with pytest.raises(UserError, match=r"another grid.*with other policies; add to it with --ext"):
        execute(make(llama_folder, unbroken.path, policy="local"))
    with pytest.raises(UserError, match=r"another grid.*with other seed; choose another --out"):
        execute(make(llama_folder, unbroken.path, seed=7))
    assert (unbroken.path / "cells.parquet").read_bytes() == before


def test_the_digest_of_a_model_covers_weights_tokenizer_and_generation(llama_folder: str, tmp_path: Path) -> None:
    import shutil

    from kvbench.named import model_digest

    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    seen = {model_digest(str(folder))}
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json"):
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)
        seen.add(model_digest(str(folder)))
    assert len(seen) == 4
    (folder / "notes.md").write_text("of no consequence")
    assert model_digest(str(folder)) in seen


def test_a_policy_that_changes_its_view_harms_no_other(llama_folder: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def harm(v):\n    v.key.zero_()\n    return v.noise()\n")
    plain = execute(make(llama_folder, tmp_path / "plain", policy="snapkv:window=8", task="vt"))
    mixed = execute(make(llama_folder, tmp_path / "mixed", policy=f"{bad}:harm,snapkv:window=8", task="vt"))
    failed = mixed.cells[mixed.cells.status != "ok"]
    assert set(failed.policy) == {f"{bad}:harm"}
    assert failed.error.str.contains("in place").all()
    ours, theirs = texts(plain.path), texts(mixed.path)
    assert all(theirs[key] == text for key, text in ours.items())


@pytest.mark.parametrize("grid", [None, 3, []])
def test_run_wants_a_grid(grid: Any) -> None:
    with pytest.raises(UserError, match="is not a grid"):
        kvbench.run(grid)
