"""Fidelity equals what stock transformers and masks say, at every moment, and changes no answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

import kvbench
from kvbench.engine.decode import Stop
from kvbench.engine.driver import engine
from kvbench.engine.fidelity import FidelityRow, FullAnswer, fidelity_columns
from kvbench.errors import UserError
from kvbench.progress import Silent
from kvbench.runs.answers import Prompt
from kvbench.runs.executors.base import answer
from kvbench.runs.full_answers import answer_limit
from kvbench.runs.runner import execute
from kvbench.runs.schema import FIDELITY
from kvbench.runs.worker import Worker

from ..engine.conftest import build, masked_run
from .cells import make_cell
from .small import small_grid
from .test_sliding import Store, Tokenizer, greedy, ids, request

SIZES = ((40, 3, 9), (51, 12, 40), (33, 1, 1), (47, 5, 2))
"""Tokens of context, question and answer."""
POLICIES = ("snapkv:window=4", "adakv:window=4", "kvzip", "h2o", "random")


def prompts(sizes: Sequence[tuple[int, int, int]] = SIZES) -> list[Prompt]:
    return [
        Prompt(request(i, n), ids(context, i), ids(question, 50 + i)) for i, (context, question, n) in enumerate(sizes)
    ]


def responses(
    model: Any, asked: Sequence[Prompt], *cells: Any, compared: bool = True, fails: bool = False, **options: Any
) -> list[Any]:
    store: Any = Store()
    with engine(model):
        options |= {"tokenizer": Tokenizer(), "store": store, "fidelity": compared}
        worker: Any = Worker(model, Silent(), **options)
        answer(worker, asked, [make_cell(**{"length": 0, **cell}) for cell in cells])
    assert all(bool(response.error) == fails for response in store.held)
    return store.held


def wanted(full: Tensor, cell: Tensor, tokens: Sequence[int]) -> dict[str, Any]:
    """The columns by definition, from logits `[tokens, vocabulary]` of both."""
    p, q = full.double().log_softmax(-1), cell.double().log_softmax(-1)
    divergences = kl_div(q, p, log_target=True, reduction="none").sum(-1).tolist()
    nll = [float(p[i, t] - q[i, t]) for i, t in enumerate(tokens)]
    return fidelity_columns(divergences, [int(q[i].argmax()) == t for i, t in enumerate(tokens)], nll)


def agrees(response: Any, columns: dict[str, Any]) -> None:
    for name, value in columns.items():
        assert getattr(response, name) == pytest.approx(value, abs=1e-5), name


def plain(model: Any, prompt: Prompt) -> tuple[list[int], Tensor]:
    """The stock model's greedy answer, and its logits before every token of it."""
    tokens = greedy(model, [*prompt.ids], prompt.request.max_new_tokens)
    return tokens, model(torch.tensor([[*prompt.ids, *tokens[:-1]]])).logits[0, -len(tokens) :]


@pytest.mark.parametrize("moment", ["context", "question"])
@torch.no_grad()
def test_it_equals_stock_transformers_with_masks(moment: str) -> None:
    model, asked = build("llama"), prompts()
    cells = [{"policy": policy, "budget": "0.3", "moment": moment} for policy in POLICIES]
    found = responses(model, asked, *cells)
    assert len(found) == len(asked) * len(cells)
    largest = 0.0
    for cell, settings in zip((make_cell(length=0, **c) for c in cells), cells, strict=True):
        for prompt in asked:
            tokens, full = plain(model, prompt)
            seen = torch.tensor([prompt.context_ids if moment == "context" else prompt.ids])
            kept = kvbench.kept(model, seen, settings["policy"], 0.3)
            rest = [*(prompt.question_ids if moment == "context" else ()), *tokens[:-1]]
            mask = torch.ones(1, seen.shape[1] + len(rest), dtype=torch.long)
            chunks = [seen, torch.tensor([rest])] if rest else [seen]
            logits = torch.cat([step[0] for step in masked_run(model, chunks, mask, [None, kept][: len(chunks)])])
            (response,) = (r for r in found if (r.cell, r.sample_id) == (cell.cell, prompt.request.sample_id))
            agrees(response, wanted(full, logits[-len(tokens) :], tokens))
            largest = max(largest, response.kl)
    assert largest > 0.05


@torch.no_grad()
def test_a_mutation_is_noticed() -> None:
    """The other direction of the divergence, and logits one token late, are far from the definition."""
    model, (prompt,) = build("llama"), prompts(SIZES[:1])
    tokens, full = plain(model, prompt)
    cell = torch.randn(full.shape, generator=torch.Generator().manual_seed(0))
    row = FidelityRow.of(FullAnswer(tuple(tokens), full, "length"), Stop(Tokenizer(), [], []))
    row.measure(cell)
    agrees(replace_columns(row), wanted(full, cell, tokens))
    for wrong in (wanted(cell, full, tokens), wanted(full, cell.roll(1, 0), tokens)):
        with pytest.raises(AssertionError):
            agrees(replace_columns(row), wrong)


def replace_columns(row: FidelityRow) -> Any:
    return type("Columns", (), row.columns())


@torch.no_grad()
def test_a_policy_that_goes_on_evicts_while_the_answer_is_fed() -> None:
    model, asked, budget, sinks = build("llama"), prompts(), 12, 4
    policy = f"streaming_llm:sinks={sinks}:buffer=1"
    found = responses(model, asked, {"policy": policy, "budget": str(budget), "moment": "decode"})
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    for prompt, response in zip(asked, sorted(found, key=lambda r: r.sample_id), strict=True):
        tokens, full = plain(model, prompt)
        chunks = [torch.tensor([prompt.ids]), *(torch.tensor([[token]]) for token in tokens[:-1])]
        kept: list[Any] = [None]
        for seen in range(len(prompt.ids), len(prompt.ids) + len(tokens) - 1):
            held = torch.zeros(1, heads, seen, dtype=torch.bool)
            held[..., :sinks] = held[..., seen - (budget - sinks) :] = True
            kept.append([held] * layers)
        mask = torch.ones(1, len(prompt.ids) + len(tokens) - 1, dtype=torch.long)
        logits = torch.cat([step[0] for step in masked_run(model, chunks, mask, kept)])
        agrees(response, wanted(full, logits[-len(tokens) :], tokens))


@torch.no_grad()
def test_a_live_dialogue_gets_the_full_caches_answers() -> None:
    """The cache is cut before the second turn; both turns equal masked forwards over the full cache's dialogue."""
    model, budget, sinks, limit = build("llama"), 0.4, 4, 7
    turns, texts = [], [list(ids(6, 80)), list(ids(5, 81))]
    for turn, new in enumerate(texts):
        asked = request(0, limit, dialogue="d", turn=turn)
        turns.append(Prompt(replace(asked, delta="" if turn == 0 else Tokenizer().decode(new)), ids(40, 5), tuple(new)))
    cells = [
        {"policy": f"streaming_llm:sinks={sinks}", "budget": str(budget), "moment": "turns"},
        {"policy": "full", "moment": "turns"},
    ]
    found = {(r.cell, r.question_id): r for r in responses(model, turns, *cells)}
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    history = [*turns[0].context_ids, *texts[0]]
    answers = [greedy(model, history, limit)]
    answers.append(greedy(model, [*history, *answers[0], *texts[1]], limit))
    seen = len(history) + limit - 1
    held = torch.zeros(1, heads, seen, dtype=torch.bool)
    count = round(budget * seen)
    held[..., :sinks] = held[..., seen - (count - sinks) :] = True
    pieces = [history, *[[t] for t in answers[0][:-1]], [answers[0][-1], *texts[1]], *[[t] for t in answers[1][:-1]]]
    chunks, kept, columns = [torch.tensor([piece]) for piece in pieces], [], 0
    for piece in pieces:
        padded = torch.nn.functional.pad(held, (0, max(0, columns - seen)), value=True)
        kept.append([padded] * layers if columns >= seen else None)
        columns += len(piece)
    mask = torch.ones(1, columns, dtype=torch.long)
    evicted = torch.cat([step[0] for step in masked_run(model, chunks, mask, kept)])
    plain_logits = model(torch.tensor([[token for piece in pieces for token in piece]])).logits[0]
    ends = [(len(history) - 1, seen), (columns - limit, columns)]
    for turn, (start, end) in enumerate(ends):
        for settings, logits in zip(cells, (evicted, plain_logits), strict=True):
            columns_of_turn = wanted(plain_logits[start:end], logits[start:end], answers[turn])
            agrees(found[make_cell(length=0, **settings).cell, turn], columns_of_turn)
    assert found[make_cell(length=0, **cells[0]).cell, 1].kl > 0.01


KEEPS_ALL = [("full", "full", ""), *(("knorm", "900", m) for m in ("context", "question", "decode", "chunked:16"))]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_a_cache_that_keeps_everything_is_the_full_cache(family: str) -> None:
    cells = [dict(zip(("policy", "budget", "moment"), cell, strict=True)) for cell in KEEPS_ALL]
    found = responses(build(family), prompts(), *cells)
    assert len(found) == len(cells) * len(SIZES)
    for response in found:
        count = SIZES[response.doc_id][2]
        assert response.kl < 1e-9
        assert (response.agreement, response.first_difference, response.fidelity_tokens) == (1.0, count, count)
        assert (response.kl_middle is None) == (count < 3)


CELLS = [
    {"policy": "full"},
    *({"policy": "snapkv:window=4", "budget": b, "moment": m} for b in ("0.2", "0.5") for m in ("context", "question")),
    {"policy": "knorm:buffer=2", "budget": "16", "moment": "decode"},
    {"policy": "h2o:buffer=2", "budget": "16", "moment": "decode"},
    {"policy": "knorm", "budget": "0.3", "moment": "chunked:16"},
    {"policy": "quest:page=4", "budget": "0.5", "moment": "question"},
    {"policy": "quest:page=4", "budget": "0.5", "moment": "context"},
    {"policy": "full:bits=4", "moment": "context"},
    {"policy": "d2o:buffer=2", "budget": "16", "moment": "decode"},
]


@torch.no_grad()
def test_it_changes_no_answer_and_does_not_depend_on_the_batch() -> None:
    model, asked = build("llama"), prompts()
    together = responses(model, asked, *CELLS)
    apart = [r for cell in CELLS for prompt in asked for r in responses(model, [prompt], cell, batch_size=1)]
    without = responses(model, asked, *CELLS, compared=False)
    key = lambda r: (r.cell, r.sample_id)  # noqa: E731
    names = ("response", "generated_tokens", "held_entries", "kv_bytes_live")
    for one, alone, other in zip(*(sorted(group, key=key) for group in (together, apart, without)), strict=True):
        assert [getattr(one, n) for n in names] == [getattr(other, n) for n in names]
        assert other.kl is None
        assert one.kl == pytest.approx(alone.kl, rel=1e-4, abs=1e-7)
        assert one.fidelity_tokens == alone.fidelity_tokens == SIZES[one.doc_id][2]


@torch.no_grad()
def test_repeats_share_the_comparison() -> None:
    asked = [replace(prompt, repeat=repeat) for prompt in prompts(SIZES[:2]) for repeat in (0, 1)]
    found = responses(build("llama"), asked, {"policy": "knorm", "budget": "0.3"})
    assert [r.kl is None for r in sorted(found, key=lambda r: (r.repeat, r.sample_id))] == [False, False, True, True]


def test_short_references_make_the_answer_short() -> None:
    one = request(0, 64)
    assert answer_limit(one, Tokenizer()) == 64
    assert answer_limit(replace(one, target=("1 2 3",)), Tokenizer()) == 24
    assert answer_limit(replace(one, target=("1 2 3", "1 " * 25)), Tokenizer()) == 64
    assert answer_limit(replace(one, target=("1 2 3",) * 9), Tokenizer()) == 64, "a list of short items is long"
    assert answer_limit(replace(one, max_new_tokens=9, target=("1",)), Tokenizer()) == 9


@pytest.mark.parametrize("full", [True, False])
def test_a_run_without_it_is_completed_and_then_left_alone(tmp_path: Path, full: bool) -> None:
    settings: Any = {"task": "niah_single_1", "samples": 2, "full": full, "cache_memory": "64MB"}
    first = execute(small_grid(tmp_path, **settings))
    assert first.cells["kl"].isna().all()
    second = execute(small_grid(tmp_path, **settings, fidelity=True))
    assert second.samples["response"].tolist() == first.samples["response"].tolist()
    assert second.cells["cell"].tolist() == first.cells["cell"].tolist()
    assert (second.samples["kl"] >= 0).all()
    written = (tmp_path / "responses.jsonl").read_bytes()
    third = execute(small_grid(tmp_path, **settings, fidelity=True))
    execute(small_grid(tmp_path, **settings))
    assert (tmp_path / "responses.jsonl").read_bytes() == written
    by_policy = third.cells.set_index("policy")
    for metric in FIDELITY:
        cells, samples = kvbench.load(tmp_path, metric=metric)
        means = samples.groupby("policy")["score"].mean()
        assert cells.set_index("policy")["score"].to_dict() == pytest.approx(means.to_dict(), rel=1e-6)
        assert cells["diff"].isna().all() != full
    assert kvbench.load(tmp_path, metric="kl")[0].set_index("policy")["score"].to_dict() == by_policy["kl"].to_dict()


def test_a_metric_of_fidelity_needs_a_run_with_it(undisturbed: Any) -> None:
    with pytest.raises(UserError, match="no task has the metric 'kl'"):
        kvbench.load(undisturbed.path, metric="kl")
