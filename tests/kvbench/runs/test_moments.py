"""Moments at which a cache is cut more than once, run end to end on the reference model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvbench
from kvbench.engine.decode import DecodeRow, Stop
from kvbench.engine.loading import load_model, load_tokenizer
from kvbench.runs.dialogues import _next
from kvbench.runs.runner import Run
from tests.sweeps import slow_but

LENGTH = 256
KEY = ["task", "policy", "budget", "moment", "sample_id", "question_id"]


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def run(out: Path, **changes: Any) -> Run:
    base = {"task": "vt", "length": LENGTH, "samples": 3, "out": str(out), "device": "cpu"}
    return kvbench.run({**base, **changes})


def texts(made: Run) -> dict[tuple[Any, ...], str]:
    frame = made.samples.set_index(KEY)
    return dict(zip(frame.index, frame["response"], strict=True))


GRIDS = {
    "decode": {
        "policy": "h2o:buffer=2,snapkv:window=8:allocate=global:buffer=3",
        "budget": "20",
        "moment": "decode",
        "task": "longgen_copy",
        "length": 128,
        "samples": 2,
        "max_new_tokens": 32,  # longer than the budget and its buffers
    },
    "chunked": {"policy": "h2o,keydiff", "budget": "0.3", "moment": "chunked:100"},
    "turns": {"policy": "h2o,sirllm", "budget": "0.4", "moment": "turns", "task": "dialogue"},
}


@pytest.mark.parametrize("moment", slow_but(GRIDS, next(iter(GRIDS))))
def test_responses_depend_neither_on_the_batch_nor_on_the_other_cells(moment: str, tmp_path: Path) -> None:
    grid = GRIDS[moment]
    together = texts(run(tmp_path / "all", **grid))
    alone: dict[tuple[Any, ...], str] = {}
    for policy in str(grid["policy"]).split(","):
        only = {**grid, "policy": policy, "full": False, "batch_size": 1}
        alone |= texts(run(tmp_path / policy.replace(":", "-"), **only))
    assert {k: v for k, v in together.items() if k[1] != "full"} == alone
    assert len(set(together.values())) > 2


def test_an_allowance_that_is_never_reached_changes_nothing(tmp_path: Path) -> None:
    for moment, budget, task in (("decode", "300", "vt"), ("chunked:64", "300", "vt")):
        made = run(tmp_path / task / moment, policy="h2o", budget=budget, moment=moment, task=task)
        kept, full = (made.samples[made.samples["policy"] == p] for p in ("h2o", "full"))
        assert list(kept["response"]) == list(full["response"])


def test_a_fraction_at_decode_is_a_number_of_tokens_of_the_prompt(tmp_path: Path) -> None:
    """Prompts of different lengths, each against a run with the number of tokens that its own fraction is."""
    grid = GRIDS["decode"] | {"policy": "d2o:buffer=0,pyramidkv:window=4:buffer=3", "length": "96,128", "full": False}
    fraction = run(tmp_path / "fraction", **{**grid, "budget": "0.3"}).samples
    prompt_lengths = fraction["context_tokens"] + fraction["question_tokens"]
    tokens = (prompt_lengths * 3 + 5) // 10
    assert tokens.nunique() > 1, "one number of tokens could serve all prompts"
    assert list(fraction["budget_entries"]) == list(tokens * kvbench_heads())
    assert (fraction["held_entries"] > fraction["budget_entries"]).all(), "entries are evicted during the answer"
    absolute = run(tmp_path / "tokens", **{**grid, "budget": ",".join(map(str, sorted(set(tokens))))}).samples
    columns = ["length", "policy", "sample_id", "response", "held_entries", "kv_bytes_live"]
    own = absolute.merge(fraction.assign(budget=tokens.astype(str))[["length", "policy", "sample_id", "budget"]])
    assert own[columns].sort_values(columns).values.tolist() == fraction[columns].sort_values(columns).values.tolist()


@pytest.mark.slow
def test_the_peak_at_decode_counts_the_buffer(tmp_path: Path) -> None:
    made = run(tmp_path, **{**GRIDS["decode"], "policy": "h2o:buffer=5,streaming_llm:buffer=0"})
    cells = made.cells[made.cells["policy"] != "full"]
    heads = kvbench_heads()
    for row in cells.itertuples():
        buffer = 5 if "buffer=5" in str(row.policy) else 1
        assert row.budget_entries == int(row.budget) * heads
        assert row.held_entries == (int(row.budget) + buffer) * heads
        # K, V in float32, and one accumulated sum a query head.
        assert row.kv_bytes_live > row.held_entries * 2 * 4


def kvbench_heads() -> int:
    model = load_model("reference", None, torch.device("cpu"), torch.float32)
    config: Any = model.config
    return int(config.num_hidden_layers * config.num_key_value_heads)


def test_chunks_end_exactly_at_the_budget(tmp_path: Path) -> None:
    made = run(tmp_path, policy="snapkv,h2o,knorm:allocate=global", budget="0.3,17", moment="chunked:90")
    kept = made.samples[made.samples["policy"] != "full"]
    heads = kvbench_heads()
    for row in kept.itertuples():
        tokens = row.context_tokens + row.question_tokens
        b = 17 if row.budget == "17" else (3 * tokens * 2 + 10) // 20
        assert row.held_entries == row.budget_entries == b * heads


@torch.no_grad()
def test_a_live_dialogue_with_the_full_cache_is_one_long_text(tmp_path: Path) -> None:
    """Every turn against `generate` on the whole history with the model's own answers."""
    made = run(tmp_path, policy="full", moment="turns", task="dialogue", samples=2, length=384)
    again = run(
        tmp_path / "b",
        policy="random",
        budget="1.0",
        moment="turns",
        task="dialogue",
        samples=2,
        length=384,
    )
    tokenizer = load_tokenizer("reference")
    model: Any = load_model("reference", None, torch.device("cpu"), torch.float32)
    from kvbench.runs.grid import Grid
    from kvbench.runs.planning import plan

    grid = Grid.from_dict({"policy": "full", "task": "dialogue", "samples": 2, "length": 384})
    (stage,) = plan(grid, print).stages
    history: list[int] = []
    closing = ""
    for prompt in stage.jobs[0].prompts:
        q = prompt.request
        if q.turn == 0:
            history = [*prompt.context_ids, *prompt.question_ids]
        else:
            text = closing + q.delta + q.question
            history += tokenizer(text, add_special_tokens=False)["input_ids"]
        closing = q.answer_end
        out: list[int] = []
        while len(out) < q.max_new_tokens:
            logits = model(torch.tensor([[*history, *out]]), logits_to_keep=1).logits
            out.append(int(logits[0, -1].argmax()))
            if any(u in tokenizer.decode(out) for u in q.until):
                break
        ended = any(u in tokenizer.decode(out) for u in q.until)
        history += out[:-1] if ended else out
        rows = made.samples
        row = rows[(rows["sample_id"] == q.sample_id) & (rows["question_id"] == q.turn)]
        text = tokenizer.decode(out, skip_special_tokens=True)
        cut = min([text.find(u) for u in q.until if u in text], default=len(text))
        assert row["response"].item() == text[:cut]
    assert list(again.samples["response"]) == list(made.samples["response"])
    assert made.samples["question_id"].max() >= 1


def test_turns_are_held_to_the_share_of_what_was_said(tmp_path: Path) -> None:
    made = run(tmp_path, **{**GRIDS["turns"], "length": 384})
    heads = kvbench_heads()
    kept = made.samples[(made.samples["policy"] != "full") & (made.samples["question_id"] > 0)]
    assert len(kept)
    for row in kept.itertuples():
        b = (2 * row.context_tokens * 2 + 5) // 10
        assert row.held_entries == row.budget_entries == b * heads
    panels = set(zip(made.cells["policy"], made.cells["moment"], strict=True))
    assert panels == {("full", "turns"), ("h2o", "turns"), ("sirllm", "turns")}
    assert made.cells["diff"].notna().all()


def test_a_history_is_closed_whatever_token_ended_the_answer(llama_folder: str, tmp_path: Path) -> None:
    """A byte-level tokenizer: the stop may share a token with the answer, or take several."""
    tokenizer = load_tokenizer(llama_folder)
    asked = SimpleNamespace(delta=" More.", delta_media=(), question=" And?", answer_end="\nUser:")
    executor: Any = SimpleNamespace(tokenizer=tokenizer, expanded=lambda text, media: text)
    turns: Any = [SimpleNamespace(request=asked)] * 2
    for answer, until in (("the letter is green.", "\n"), ("a b", "\nUser:"), ("x", ".")):
        stop = Stop(tokenizer, [], [until])
        row = DecodeRow(99, stop)
        for token in tokenizer(f"{answer}{until} tail", add_special_tokens=False)["input_ids"]:
            row.push(token)
        assert row.reason == "stop"
        fed = _next(executor, turns, 1, row)
        history = tokenizer.decode([*row.tokens[:-1], *fed])
        assert history == f"{stop.text(row.tokens)}\nUser: More. And?"


@pytest.mark.parametrize("moment", ["decode", "turns"])
def test_a_budget_that_fails_leaves_the_others(moment: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "def bad(v):\n"
        "    if v.moment != 'context' and int(v.budget.max()) < 30:\n"
        "        raise ValueError('too small')\n"
        "    return -v.age.float()\n"
    )
    task = "longgen_copy" if moment == "decode" else "dialogue"
    small = "8" if moment == "decode" else "9"
    policy = f"{bad}:bad:buffer=1"
    made = run(tmp_path / "o", policy=policy, budget=f"{small},60", moment=moment, task=task, samples=1)
    cells = made.cells[made.cells["policy"] != "full"].set_index("budget")["status"]
    assert cells.to_dict() == {small: "error", "60": "ok"}


def test_a_prompt_below_its_chunked_budget_is_counted_as_it_is_held(tmp_path: Path) -> None:
    made = run(tmp_path, policy="h2o", budget="300", moment="chunked:64", samples=1)
    (row,) = made.samples[made.samples["policy"] == "h2o"].itertuples()
    heads = kvbench_heads()
    assert row.held_entries == heads * (row.context_tokens + row.question_tokens)
    assert row.budget_entries == heads * min(300, row.context_tokens + row.question_tokens)
