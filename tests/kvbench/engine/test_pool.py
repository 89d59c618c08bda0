"""The pool gives every response what it would get alone, whatever else is decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvbench
import kvbench.engine.pool
from kvbench import native
from kvbench.budget import Budget
from kvbench.decoding import Sampling
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decode import DecodeRow, Stop
from kvbench.engine.draw import Draw
from kvbench.engine.driver import engine, forward
from kvbench.engine.pool import Pool, Pooled
from kvbench.engine.prefix import Compression, Prefix
from kvbench.engine.steady import LEAST, Steady
from kvbench.plugin import Policy
from tests.sweeps import slow, slow_but

from .conftest import SIZE, batch, build

CELLS = [("snapkv:window=8", "0.5"), ("adakv:window=8", "0.2"), ("h2o", "1"), ("full", "full")]
FIXED, LADDER, COARSE = ([5], [2]), ([8, 9, 12], [4, 6]), ([8, 16], [4, 8])
"""Rows that a batch and a forward of questions may have; with the last, 12 rows are used as well."""
DEEP = ([2, 4, 9, 12], [4, 6])
"""A batch that shrinks so far that its entries move; with fewer than 8 rows, the last bits differ."""


class Words:
    """A tokenizer that writes a token as its number."""

    eos_token_id = None

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))


@pytest.fixture(scope="module", params=["llama", slow("qwen3")])
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = build(request.param)
    with torch.no_grad(), engine(made):
        yield made


def prefilled(model: Any, tokens: int, policy: Policy, seed: int) -> Prefix:
    ids, _ = batch(1, tokens, [0], seed=seed)
    prefix = Prefix(model, policy.needs)
    prefix.extend(ids)
    return prefix


def items(model: Any, asked: bool, drawn: bool = False) -> list[Pooled[int]]:
    """Responses of many lengths, on contexts of many lengths and caches of all sizes."""
    made = []
    for i in range(13):
        name, budget = CELLS[i % len(CELLS)]
        policy, limit = kvbench.policy(name), Budget.parse(budget)
        prefix = prefilled(model, 20 + 7 * (i % 3), policy, i % 3)
        (cache,) = prefix.compress([Compression(policy, limit, "context", 0)], reserve=30)
        row = DecodeRow(1 + (5 * i) % 11, Stop(Words(), [3 * i], []))
        if drawn:
            row.draw = Draw(Sampling(), (0, i))
        question = [10 + i, *range(1, 1 + i % 4)]
        logits = None
        if asked:
            logits = forward(model, cache, torch.tensor([question]))
        cache.detach_state()
        made.append(Pooled(row, cache, question, logits, i))
    return made


def pool(model: Any, room: int = 12, rows: tuple[list[int], list[int]] = FIXED) -> Pool[int]:
    return Pool(model, *rows, 5, lambda count, _: count <= room, allows_rows=lambda count: count >= 8)


def answers(made: Pool[int], waiting: list[Pooled[int]]) -> dict[int, list[int]]:
    ended = [done for item in waiting for done in made.add(item)]
    ended += made.drain()
    assert not made.active and not made.waiting
    assert all(item.seconds > 0 or len(item.row.tokens) == 1 for item in ended)
    return {item.owner: item.row.tokens for item in ended}


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("room", slow_but([1, 3, 12], 3))
@pytest.mark.parametrize("rows", [FIXED, LADDER, COARSE])
def test_a_response_does_not_depend_on_its_neighbours(
    model: Any, asked: bool, room: int, rows: tuple[list[int], list[int]]
) -> None:
    together = answers(pool(model, room, rows), items(model, asked))
    alone: dict[int, list[int]] = {}
    for item in items(model, asked):
        alone |= answers(pool(model, rows=rows), [item])
    assert together == alone
    assert len({len(tokens) for tokens in together.values()}) > 5  # rows were refilled


def test_a_drawn_response_does_not_depend_on_its_neighbours(model: Any) -> None:
    together = answers(pool(model), items(model, False, drawn=True))
    last = items(model, False, drawn=True)[-1]
    assert together[last.owner] == answers(pool(model), [last])[last.owner]
    assert together != answers(pool(model), items(model, False))


@pytest.mark.parametrize("rows", [FIXED, DEEP])
def test_the_responses_are_those_of_a_plain_loop(model: Any, rows: tuple[list[int], list[int]]) -> None:
    found = answers(pool(model, rows=rows), items(model, False))
    for item in items(model, False):
        assert item.cache is not None
        given = [*item.question]
        while not item.row.reason:
            logits = forward(model, item.cache, torch.tensor([given]))
            given = [int(logits[0].argmax())]
            item.row.push(given[0])
        assert found[item.owner] == item.row.tokens


def test_memory_is_used_again(model: Any) -> None:
    made = pool(model)
    answers(made, items(model, False))
    assert isinstance(made.cache, RaggedCache)
    before = made.cache.allocated_bytes()
    assert made.cache.live_entries() == 0
    answers(made, items(model, False))
    assert made.cache.allocated_bytes() == before
    for layer in made.cache.ragged:
        assert all(a <= b for a, b in pairwise(layer.start))


def emptied(made: Pool[int], queue: list[Pooled[int]]) -> list[tuple[int, int, int]]:
    """Rows, bytes and the address of the keys, whenever a response of an emptying batch ends."""
    for item in queue:
        list(made.add(item))
    states: list[tuple[int, int, int]] = []
    for _ in made.drain():
        assert made.cache is not None
        key = made.cache.ragged[0].key
        assert key is not None
        states.append((made.cache.batch, made.cache.allocated_bytes(), key.data_ptr()))
    return states


def test_a_batch_that_empties_frees_its_rows(model: Any) -> None:
    states = emptied(pool(model, rows=DEEP), items(model, False))
    addresses = dict.fromkeys((rows, address) for rows, _, address in states)
    sizes = {rows: size for rows, size, _ in states}
    assert [*sizes] == [12, 9, 8, 4, 2]
    assert [address for rows, address in addresses if rows >= 9] == [states[0][2]] * 2, "most rows need not move"
    assert sizes[9] == sizes[12] and 2 * sizes[2] < sizes[12]


def test_a_batch_that_empties_has_rows_that_are_allowed(model: Any) -> None:
    def seen(allowed: set[int]) -> list[int]:
        made = Pool[int](model, [8, 24], [4, 6], 5, lambda count, _: count <= 24, allows_rows=allowed.__contains__)
        return [*dict.fromkeys(rows for rows, _, _ in emptied(made, items(model, False) + items(model, False)[:9]))]

    assert seen(set()) == [24, 8]
    assert seen({4, 12, 20}) == [20, 12, 8], "no fewer than the fewest"


def test_a_forward_of_questions_has_rows_that_are_allowed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []

    def recording_forward(model: Any, cache: Any, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shapes.append((ids.shape[0], ids.shape[1]))
        return forward(model, cache, ids, *args, **kwargs)

    monkeypatch.setattr(kvbench.engine.pool, "forward", recording_forward)
    answers(pool(model, rows=([4, 5, 6, 8], [4, 8])), items(model, False)[1:6])
    assert [rows for rows, columns in shapes if columns == 5] == [8], "five questions, with three vacant rows"
    assert {rows for rows, columns in shapes if columns == 1} == {4, 5}


class RecordingPool(Pool[int]):
    """A pool that keeps all logits of every response, and the columns of its forwards."""

    logits: dict[int, list[Tensor]]
    widths: set[int]

    def _choose(self, slots: Sequence[int], logits: Tensor, rows: Sequence[int] | None = None) -> Iterator[Pooled[int]]:
        for slot, row in zip(slots, range(len(slots)) if rows is None else rows, strict=True):
            self.logits.setdefault(self.active[slot].owner, []).append(logits[row])
        return super()._choose(slots, logits, rows)

    def _column_count(self, questions: Sequence[Sequence[int]]) -> int:
        column_count = super()._column_count(questions)
        self.widths.add(column_count)
        return column_count


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 4), (4, 1), (16, 1)])
def test_questions_take_fewer_columns_where_bits_are_the_same(query_heads: int, kv_heads: int) -> None:
    """Whatever group a question is in, its logits are those after a forward as wide as the longest one."""
    heads = {"num_attention_heads": query_heads, "num_key_value_heads": kv_heads, "head_dim": 64}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZE | heads)).eval()
    with torch.no_grad(), engine(model):
        _check_fewer_columns(model, can_narrow=query_heads <= 8 * kv_heads)


def _check_fewer_columns(model: Any, can_narrow: bool) -> None:
    lengths = [13, 3, 22, 2, 1, 4, 19, 2, 3, 17, 4, 1, 14]  # with so few, attention can use other code
    steady = Steady(model)
    agreeing = [least for least in LEAST if steady.at(8 * 29, least) and steady.at(16 * 29, least)]
    if not agreeing:
        pytest.skip("bits depend on the size of a batch here")
    least = agreeing[0]

    def decoded(group: int, gives_same_bits: Callable[[int], bool]) -> RecordingPool:
        made = RecordingPool(model, [16], [group], 29, lambda count, _: count <= 16, gives_same_bits)
        made.logits, made.widths = {}, set()
        waiting = items(model, False)
        for item, length in zip(waiting, lengths, strict=True):
            item.question = [(item.owner + 3 * i) % 40 for i in range(length)]
        answers(made, sorted(waiting, key=lambda item: len(item.question)))
        return made

    expected = decoded(8, lambda token_count: False)
    assert expected.widths == {29}
    for group in (8, 16):
        found = decoded(group, lambda token_count: steady.at(token_count, least))
        assert found.logits.keys() == expected.logits.keys()
        for owner, logits in found.logits.items():
            assert torch.equal(torch.stack(logits), torch.stack(expected.logits[owner]))
        if steady.at(8 * 12, least) and steady.at(group * 22, least):
            narrow = {12, 22} if group == 8 else {22}
            assert found.widths == (narrow if can_narrow and native.implementation() == "native" else {29})


def test_columns_do_not_pile_up(model: Any) -> None:
    made = pool(model)
    for _ in range(4):
        answers(made, items(model, False))
    assert made.cache is not None
    assert made.cache.get_seq_length() < 34 + 5 + 2 * 11


def test_a_row_whose_logits_are_not_finite_fails_alone(model: Any) -> None:
    expected = answers(pool(model), items(model, asked=False))
    waiting = items(model, asked=False)
    bad = {2, 7}
    for i in bad:
        cache = waiting[i].cache
        assert cache is not None and cache.ragged[1].value is not None
        cache.ragged[1].value[:] = torch.nan
    found = answers(pool(model), waiting)
    assert {i: x for i, x in found.items() if i not in bad} == {i: x for i, x in expected.items() if i not in bad}
    for i, item in enumerate(waiting):
        assert item.row.error.startswith("logits are not finite") == (i in bad)
        assert bool(item.row.tokens) == (i not in bad)
