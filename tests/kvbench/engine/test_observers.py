"""The last queries and the attention mass are exact, in however many chunks a prefill comes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kvbench.engine import observers as observe
from kvbench.engine.observers import MassObserver, QueryObserver

HEADS, DIM, SCALE = 2, 8, 0.35


class Stream:
    """Queries and keys of a padded batch, whose columns come in chunks."""

    def __init__(self, valid: Tensor, group: int = 2, dtype: torch.dtype = torch.float32) -> None:
        batch, columns = valid.shape
        g = torch.Generator().manual_seed(0)
        self.valid = valid
        self.q = torch.randn(batch, HEADS * group, columns, DIM, generator=g).to(dtype) * 2
        self.k = torch.randn(batch, HEADS, columns, DIM, generator=g).to(dtype)
        self.hidden = torch.zeros(batch, columns, 4)

    def feed(self, observer: QueryObserver | MassObserver, start: int, stop: int) -> None:
        k = self.k[:, :, :stop]
        observer.update(3, self.q[:, :, start:stop], k, k, self.hidden, self.valid[:, :stop], SCALE)

    def attention(self, row: int) -> Tensor:
        """Causal attention of a row's tokens, float64 `[H_q, t, t]`."""
        q = self.q[row][:, self.valid[row]].double()
        k = self.k[row][:, self.valid[row]].double().repeat_interleave(q.shape[0] // HEADS, 0)
        logits = q @ k.transpose(1, 2) * SCALE
        return logits.masked_fill(torch.ones_like(logits).triu(1).bool(), -torch.inf).softmax(-1)


def padded(*lengths: int) -> Tensor:
    columns = max(lengths)
    return torch.arange(columns) >= columns - torch.tensor(lengths)[:, None]


# Padding within a later chunk as well: a shorter question of one row of a batch.
BROKEN = padded(63, 40, 9).index_fill(1, torch.tensor([45, 46, 47]), True)
BROKEN[1, 45:48] = False
STREAMS = {"whole": padded(63), "padded": padded(63, 40, 3), "padded later": BROKEN}
CHUNKS = {"once": [0, 63], "chunks": [0, 20, 45, 60, 63], "single": [0, 45, *range(46, 64)]}
CASES = list(itertools.product(STREAMS, CHUNKS))


@pytest.mark.parametrize(("stream", "chunks"), CASES)
@pytest.mark.parametrize("window", [1, 8, 32, 63, 70])
def test_the_last_queries_stand_at_the_end(stream: str, chunks: str, window: int) -> None:
    data = Stream(STREAMS[stream])
    observer = QueryObserver(window)
    for start, stop in itertools.pairwise(CHUNKS[chunks]):
        data.feed(observer, start, stop)
    seen = observer.read(3)
    assert seen.shape == (len(data.valid), 4, window, DIM)
    for row, valid in enumerate(data.valid):
        mine = data.q[row][:, valid][:, -window:]
        missing = window - mine.shape[1]
        assert torch.equal(seen[row, :, missing:], mine)
        assert not bool(seen[row, :, :missing].any())


@pytest.mark.parametrize(("stream", "chunks"), CASES)
@pytest.mark.parametrize("last", [None, 1, 8, 50, 70])
def test_mass_is_the_column_sum_of_attention(stream: str, chunks: str, last: int | None) -> None:
    data = Stream(STREAMS[stream], group=1 + (last or 0) % 3)
    observer = MassObserver(last)
    for start, stop in itertools.pairwise(CHUNKS[chunks]):
        data.feed(observer, start, stop)
    mass = observer.read(3)
    assert mass.dtype == torch.float32
    for row, valid in enumerate(data.valid):
        attention = data.attention(row)
        expected = attention[:, -last if last else 0 :].sum(1)
        torch.testing.assert_close(mass[row][:, valid].double(), expected, rtol=1e-5, atol=1e-5)
        assert not bool(mass[row][:, ~valid].any())


def test_mass_does_not_depend_on_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Stream(padded(63, 40))
    masses = []
    for block in (1, 5 * 4 * 63, 1 << 22):  # one query, five, all
        monkeypatch.setattr(observe, "_CPU_BLOCK", block)
        observer = MassObserver(None)
        data.feed(observer, 0, 63)
        masses.append(observer.read(3))
    torch.testing.assert_close(masses[0], masses[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(masses[1], masses[2], rtol=1e-5, atol=1e-6)


def test_bfloat16_is_summed_in_float32() -> None:
    data = Stream(padded(63), dtype=torch.bfloat16)
    observer = MassObserver(None)
    data.feed(observer, 0, 63)
    expected = data.attention(0).sum(1)
    torch.testing.assert_close(observer.read(3)[0].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [lambda: QueryObserver(8), lambda: MassObserver(None), lambda: MassObserver(8)])
def test_a_fork_goes_on_alone(make: type) -> None:
    data = Stream(padded(63, 40))
    observer, alone = make(), make()
    data.feed(observer, 0, 45)
    data.feed(alone, 0, 45)
    before = observer.read(3).clone()
    fork = observer.fork()
    data.feed(fork, 45, 63)
    data.feed(alone, 45, 63)
    assert torch.equal(observer.read(3), before)
    assert torch.equal(fork.read(3), alone.read(3))
    assert not torch.equal(fork.read(3)[..., :8], before[..., :8])


def test_observing_keeps_no_graph() -> None:
    data = Stream(padded(20))
    data.q.requires_grad_()
    for observer in (QueryObserver(8), MassObserver(None), MassObserver(4)):
        data.feed(observer, 0, 20)
        assert not observer.read(3).requires_grad
