"""Native code agrees with loops in float64, or with torch to the bit where it only compares integers."""

from __future__ import annotations

import multiprocessing
import platform
import shutil
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench import native, parts
from kvbench.engine.kernels.ragged_attention import ref
from kvbench.engine.shared import shared_entries
from kvbench.plugin import Scores
from tests.kernels import default_dtype, scaled

HEADS, PREFILLED, SCALE = 2, 61, 0.3
needs_compiler = pytest.mark.skipif(native.library() is None, reason="no C compiler, or native code is turned off")
pytestmark = needs_compiler


class Segments:
    """New queries over segments, part of whose entries are in a prefill.

    Args:
        before, own: Shared and own entries of every segment, `B * HEADS` each; own ones begin before the queries.
        group: Query heads of a KV head.
        n: New queries, whose own entries are the last of every segment.
        dims: Channels of keys and of values.
    """

    def __init__(
        self,
        before: list[int],
        own: list[int],
        group: int = 2,
        n: int = 1,
        dims: tuple[int, int] = (32, 32),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(sum(before) + 3 * sum(own) + 7 * n + group + sum(dims))
        self.batch, self.first = len(own) // HEADS, PREFILLED + max(own) + 5
        self.dense = [torch.randn(1, HEADS, PREFILLED, dim).to(dtype) for dim in dims]
        self.mask = torch.zeros(len(own), PREFILLED, dtype=torch.bool)
        for segment, count in enumerate(before):
            self.mask[segment, torch.randperm(PREFILLED)[:count]] = True
        self.before, self.lengths = before, [count + n for count in own]
        self.starts = [0, *accumulate(length + 2 for length in self.lengths)][:-1]
        rows = sum(self.lengths) + 2 * len(own)
        self.own = [torch.full((rows, dim), torch.nan).to(dtype) for dim in dims]  # nobody reads the free rows
        self.columns = torch.full((rows,), -1, dtype=torch.int32)
        for start, length, count in zip(self.starts, self.lengths, own, strict=True):
            for numbers in self.own:
                numbers[start : start + length] = torch.randn(length, numbers.shape[1]).to(dtype)
            old = PREFILLED + torch.arange(count)
            self.columns[start : start + length] = torch.cat([old, self.first + torch.arange(n)]).int()
        self.query = torch.randn(self.batch, n, HEADS * group, dims[0]).to(dtype).transpose(1, 2)

    def shared(self) -> Tensor:
        """Read the prefill in place."""
        entries = shared_entries(*self.dense, self.mask.view(self.batch, HEADS, -1))
        self.keeps = entries
        addresses = torch.cat([one.addresses for one in entries])
        return self._attend(*self.own, self.columns, self.starts, self.lengths, addresses)

    def materialised(self) -> Tensor:
        """Read copies of all entries."""
        return self._attend(*self.joined(), None)

    def _attend(
        self,
        key: Tensor,
        value: Tensor,
        columns: Tensor,
        starts: list[int],
        lengths: list[int],
        addresses: Tensor | None,
    ) -> Tensor:
        bounds = torch.tensor(starts), torch.tensor(lengths)
        return native.ragged_attention(self.query, key, value, columns, *bounds, addresses, self.first, SCALE)[0]

    def sums(self, powers: tuple[int, ...], valid: Tensor | None) -> tuple[Tensor, dict[int, Tensor]]:
        """Attention, and the sums of powers of its weights, over copies of all entries."""
        key, value, columns, starts, lengths = self.joined()
        bounds = torch.tensor(starts), torch.tensor(lengths)
        rows = (key, value, columns, *bounds, None)
        return native.ragged_attention(self.query, *rows, self.first, SCALE, powers, valid)

    def joined(self) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
        """Copy the shared entries in front of the own ones."""
        keys, values, columns, lengths = [], [], [], []
        for segment, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            chosen, rows = self.mask[segment].nonzero()[:, 0], slice(start, start + length)
            for parts_, dense, own in zip((keys, values), self.dense, self.own, strict=True):
                parts_.append(torch.cat([dense[0, segment % HEADS, chosen], own[rows]]))
            columns.append(torch.cat([chosen.int(), self.columns[rows]]))
            lengths.append(len(columns[-1]))
        starts = [0, *accumulate(lengths)][:-1]
        return torch.cat(keys), torch.cat(values), torch.cat(columns), starts, lengths

    def oracle(self) -> Tensor:
        """The definition's output in float64."""
        return self.definition()[0]

    def definition(self, powers: tuple[int, ...] = (), valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The definition in float64, with values as wide as keys (the definition takes no others)."""
        key, value, columns, starts, lengths = self.joined()
        bounds = (torch.tensor(x).view(self.batch, HEADS, 1) for x in (starts, lengths))
        width = max(key.shape[1], value.shape[1])
        query, key, value = (
            torch.nn.functional.pad(x.double(), (0, width - x.shape[-1])) for x in (self.query, key, value)
        )
        rows = (key, value, columns, *bounds)
        output, sums = ref.ragged_attention(query, *rows, self.first, SCALE, powers, valid)
        return output[..., : self.dense[1].shape[-1]], sums


CASES = [
    Segments([7, 61], [0, 3]),
    Segments([60, 1, 0, 0, 33, 61], [0, 5, 1, 0, 9, 30], 1, 1),
    Segments([60, 1, 0, 0, 33, 61], [0, 5, 1, 0, 9, 30], 2, 3, (64, 64)),
    Segments([5, 0, 17, 2, 61, 0], [1, 0, 2, 8, 0, 4], 4, 5, (80, 80)),
    Segments([61, 30], [4, 0], 4, 16, (128, 128)),
    Segments([61, 30], [4, 0], 3, 7, (48, 40)),
    Segments([0, 0], [40, 1], 7, 2, (6, 10)),
    Segments([9, 0, 4, 61, 0, 1], [0] * 6, 1, 16, (24, 64)),
    Segments([61, 30], [4, 70], 3, 38, (64, 64)),
    Segments([61, 0], [4, 0], 40, 3, (20, 12)),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_attention_is_that_of_the_loop_wherever_entries_are(case: Segments) -> None:
    shared, expected = case.shared(), case.oracle()
    assert shared.shape == expected.shape
    assert scaled(shared, expected) < 2e-6
    assert torch.equal(shared, case.materialised())


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("powers", [(1,), (2,), (2, 1)])
def test_what_entries_receive_is_that_of_the_loop(case: Segments, powers: tuple[int, ...]) -> None:
    queries = case.query.shape[2]
    for valid in (None, torch.arange(case.batch * queries).view(case.batch, queries) % 3 != 1):
        output, sums = case.sums(powers, valid)
        expected = case.definition(powers, valid)[1]
        assert torch.equal(output, case.materialised()) and list(sums) == [*powers]
        for power, wanted in zip(powers, expected, strict=True):
            assert sums[power].dtype == torch.float32 and sums[power].shape == wanted.shape
            assert (sums[power] - wanted).abs().max() < 2e-6 * queries


def test_what_entries_receive_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[2]
    _, alone = case.sums((1, 2), None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(native, "_WORK", 1)
    _, together = case.sums((1, 2), None)
    assert all(torch.equal(alone[power], together[power]) for power in (1, 2))


@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (128, 128), (80, 80), (24, 40)])
@pytest.mark.parametrize("n", [1, 3, 17])
def test_attention_in_bfloat16_rounds_once(dims: tuple[int, int], n: int) -> None:
    case = Segments([60, 1, 0, 31], [0, 5, 1, 60], 2, n, dims, torch.bfloat16)
    output = case.shared()
    assert output.dtype == torch.bfloat16
    assert scaled(output, case.oracle()) < 2**-8
    assert torch.equal(output, case.materialised())


def test_the_comparison_notices_a_wrong_base() -> None:
    case = Segments([7, 61], [0, 3])
    expected, entries = case.oracle(), shared_entries(*case.dense, case.mask.view(1, HEADS, -1))
    for column in range(3):  # keys, values, columns
        addresses = entries[0].addresses.clone()
        addresses[0, column] += 4
        wrong = case._attend(*case.own, case.columns, case.starts, case.lengths, addresses)
        assert scaled(wrong, expected) > 1e-3, column


@pytest.mark.parametrize("dtype", native.DTYPES)
@pytest.mark.parametrize("n", [1, 3, 17])
def test_a_sequence_does_not_depend_on_its_batch_or_on_threads(
    n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Segments([60, 1, 0, 0, 33, 61], [0, 5, 1, 0, 9, 30], 2, n, dtype=dtype)
    together = case.shared()
    for sequence in range(case.batch):
        segments = slice(sequence * HEADS, (sequence + 1) * HEADS)
        addresses = case.keeps[sequence].addresses
        bounds = torch.tensor(case.starts[segments]), torch.tensor(case.lengths[segments])
        query = case.query[sequence : sequence + 1]
        alone, _ = native.ragged_attention(query, *case.own, case.columns, *bounds, addresses, case.first, SCALE)
        assert torch.equal(alone[0], together[sequence])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(native, "_WORK", 1)
    assert torch.equal(case.shared(), together)


@pytest.mark.parametrize("n", [1, 3, 17])
def test_weights_that_vanish_are_zero(n: int) -> None:
    case = Segments([60, 1, 0, 31], [0, 5, 1, 60], 2, n)
    case.query *= 1e4  # logits are hundreds to thousands apart
    assert scaled(case.shared(), case.oracle()) < 1e-3


def test_numbers_that_are_not_finite_stay_so() -> None:
    for numbers, value in ((0, torch.nan), (0, torch.inf), (1, torch.nan)):
        case = Segments([7, 61], [0, 3])
        before = case.shared()
        case.own[numbers][case.starts[1]] = value
        after = case.shared()
        assert after[:, 2:].isnan().all()
        assert torch.equal(after[:, :2], before[:, :2]), "the other segment"


# --- prompts -------------------------------------------------------------------------------------


class Prompts:
    """Queries, keys and values of whole prompts without padding."""

    def __init__(
        self,
        tokens: int,
        batch: int = 1,
        group: int = 2,
        dim: int = 32,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        torch.manual_seed(tokens + 7 * batch + group + dim)
        self.query = torch.randn(batch, tokens, HEADS * group, dim).to(dtype).transpose(1, 2)  # as models hand it over
        self.key = torch.randn(batch, HEADS, tokens, dim).to(dtype)
        self.value = torch.randn(batch, HEADS, tokens, value_dim or dim).to(dtype)

    def attend(self, *powers: int) -> tuple[Tensor, dict[int, Tensor]]:
        return native.causal_attention(self.query, self.key, self.value, SCALE, powers)[:2]

    def window_sums(self, *powers: int) -> Tensor | None:
        return native.causal_attention(self.query, self.key, self.value, SCALE, powers)[2]

    def definition(self) -> tuple[Tensor, Tensor]:
        """Output, and what every key receives from each query head, in float64."""
        value, weights = self._repeated(self.value), self.weights()
        return weights @ value, torch.stack([weights.sum(2), weights.square().sum(2)])

    def weights(self) -> Tensor:
        """Attention weights in float64."""
        logits = self.query.double() @ self._repeated(self.key).transpose(-1, -2) * SCALE
        return logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)

    def _repeated(self, numbers: Tensor) -> Tensor:
        return numbers.double().repeat_interleave(self.query.shape[1] // HEADS, 1)


@pytest.mark.parametrize(
    "case",
    [
        Prompts(1),
        Prompts(3, group=1),
        Prompts(61, batch=3, group=4, dim=64),
        Prompts(130, batch=3, group=3, dim=128),
        Prompts(301, group=7),
        Prompts(75, group=33, dim=24, value_dim=10),
    ],
    ids=["1", "3", "61", "130", "301", "75"],
)
def test_prompts_attend_to_what_comes_before(case: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.can_attend_causally(case.query, case.key, case.value)
    (output, sums), (expected, received) = case.attend(2, 1), case.definition()
    assert scaled(output, expected) < 2e-6 and list(sums) == [2, 1]
    for power in (1, 2):
        assert sums[power].dtype == torch.float32 and sums[power].shape == received[power - 1].shape
        assert scaled(sums[power], received[power - 1]) < 5e-6
    assert torch.equal(case.attend()[0], output), "summing changes no output"
    assert list(case.attend(1)[1]) == [1] and torch.equal(case.attend(1)[1][1], sums[1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(native, "_WORK", 0)
    shared, shared_sums = case.attend(1, 2)
    assert torch.equal(shared, output) and all(torch.equal(shared_sums[power], sums[power]) for power in (1, 2))


@pytest.mark.parametrize("tokens", [32, 33, 160, 161, 301])
@pytest.mark.parametrize(
    ("batch", "group", "dim", "dtype"),
    [(1, 1, 32, torch.float32), (3, 3, 64, torch.float32), (1, 8, 24, torch.float32), (2, 4, 128, torch.bfloat16)],
)
def test_sums_of_the_last_queries_come_with_those_of_all(
    tokens: int, batch: int, group: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Prompts(tokens, batch, group, dim, dtype=dtype)
    alone = native.window_attention_sum(case.query[:, :, -native.WINDOW :], case.key, SCALE)
    assert scaled(alone, case.weights()[:, :, -32:].sum(2)) < 5e-6
    sums = case.window_sums(2, 1)
    assert sums is not None and torch.equal(sums, alone)
    assert sums.untyped_storage().nbytes() == sums.nbytes, "nothing else is kept alive"
    assert case.window_sums() is None and case.window_sums(2) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(native, "_WORK", 0)
    in_threads = case.window_sums(1)
    assert in_threads is not None and torch.equal(in_threads, alone)


def test_sums_of_the_last_queries_that_need_a_call_of_their_own() -> None:
    """Queries that are not computed side by side round in another way than where there are no values."""
    assert Prompts(31).window_sums(1) is None and Prompts(5, group=1, dim=64).window_sums(1) is None
    assert Prompts(70, group=9).window_sums(1) is None and Prompts(70, group=33, dim=64).window_sums(1) is None


def test_prompts_in_bfloat16_round_once() -> None:
    case = Prompts(150, batch=2, dtype=torch.bfloat16)
    assert scaled(case.attend()[0], case.definition()[0]) < 2**-8


def test_prompts_that_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Prompts(9)
    query, key, value = case.query, case.key, case.value
    assert native.can_attend_causally(query, key, value)
    assert not native.can_attend_causally(query[:, :, 1:], key, value), "a part of the queries"
    assert not native.can_attend_causally(query, key.transpose(1, 2).contiguous().transpose(1, 2), value)
    assert not native.can_attend_causally(query.double(), key.double(), value.double())
    assert not native.can_attend_causally(query.clone().requires_grad_(), key, value)
    assert not native.can_attend_causally(query, key.clone().requires_grad_(), value)
    assert not native.can_attend_causally(query, key, value.clone().requires_grad_())
    short = [x.bfloat16() for x in (query, key, value)]
    monkeypatch.setattr(native, "has_matrix_code", native.has_matrix_code.__wrapped__)  # not from its cache
    for features, is_native in (("avx512_bf16", True), ("avx512_bf16 amx_bf16", False)):
        monkeypatch.setattr(native, "_cpu_features", lambda features=features: features)
        assert native.can_attend_causally(*short) is is_native


@pytest.mark.parametrize("window", [1, 5, 32])
@pytest.mark.parametrize(
    "case",
    [
        Prompts(3, group=1),
        Prompts(61, 3, group=4, dim=64),
        Prompts(130, group=3, dim=80),
        Prompts(40, group=33, dim=24),
    ],
    ids=["3", "61", "130", "40"],
)
def test_the_last_queries_are_summed_without_values(case: Prompts, window: int) -> None:
    query = case.query[:, :, -window:]
    missing = torch.full(
        (*query.shape[:2], window - query.shape[2], query.shape[3]), torch.nan
    )  # before the first token
    received = native.window_attention_sum(torch.cat([missing, query], 2), case.key, SCALE)
    expected = case.weights()[:, :, -window:].sum(2)
    assert received.dtype == torch.float32 and received.shape == expected.shape
    assert scaled(received, expected) < 5e-6


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_sums_are_in_float32_whatever_torch_makes_by_default(default: torch.dtype) -> None:
    case, segments = Prompts(150), CASES[2]
    expected, expected_sums = case.attend(1, 2), segments.sums((1, 2), None)
    with default_dtype(default):
        found, found_sums = case.attend(1, 2), segments.sums((1, 2), None)
    for one, other in ((found, expected), (found_sums, expected_sums)):
        assert torch.equal(one[0], other[0]) and all(torch.equal(one[1][power], other[1][power]) for power in (1, 2))


# --- selection -----------------------------------------------------------------------------------


def scores(batch: int, entries: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values with ties, signed zeros and infinities; all protection classes; gaps."""
    torch.manual_seed(seed)
    value = (4 * torch.randn(batch, HEADS, entries)).round() / 4
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-42, -1e-42])
    at = torch.rand(value.shape) < 0.2
    value = torch.where(at, special[torch.randint(len(special), value.shape)], value)
    protect = torch.randint(0, Scores.NEWEST + 1, value.shape, dtype=torch.int8)
    protect = torch.where(torch.rand(value.shape) < 0.6, 0, protect).to(torch.int8)
    position = torch.arange(entries).expand(1, HEADS, entries)
    return value, protect, position, torch.rand(1, HEADS, entries) < 0.9


@pytest.mark.parametrize("entries", [1, 2, 63, 257])
def test_rank_keys_and_marks_are_those_of_torch(entries: int) -> None:
    for batch, distinct in ((1, 1), (3, 3), (5, 1)):
        value, protect, position, valid = scores(distinct, entries, entries + batch)
        keys = native.entry_keys(value, protect, position, valid)
        assert keys is not None
        expected = parts._entry_keys(value, protect, position, valid.expand(distinct, -1, -1))
        assert torch.equal(keys, expected)
        keys = keys.expand(batch, -1, -1)
        held = valid.sum(-1).expand(batch, -1)
        for fraction in (0.0, 0.3, 0.8, 1.0):
            share = (held * fraction).long()
            marks = native.mark_largest(keys, share)
            assert marks is not None and torch.equal(marks.sum(-1), share)
            assert torch.equal(marks, parts._best(keys, share, True))


def test_the_first_of_equal_keys_are_marked() -> None:
    torch.manual_seed(0)
    keys = torch.randint(-2, 6, (4, 50))
    for count in (0, 1, 7, 20):
        share = torch.full((4,), count)
        marks = native.mark_largest(keys, share)
        assert marks is not None and torch.equal(marks, parts._best(keys, share, False))
        assert int(marks.sum()) == 4 * count


@pytest.mark.parametrize("order", ["ascending", "descending", "equal", "organ pipe"])
def test_any_order_of_keys_is_selected_from(order: str) -> None:
    keys = torch.arange(20_000)
    orders = {"descending": keys.flip(0), "equal": keys * 0, "organ pipe": (keys - 10_000).abs()}
    keys = orders.get(order, keys)
    share = torch.tensor([1234])
    marks = native.mark_largest(keys[None], share)
    assert marks is not None and torch.equal(marks, parts._best(keys[None], share, False))


def test_marked_columns_are_in_order() -> None:
    torch.manual_seed(1)
    marks = torch.rand(5, 40) < torch.tensor([0.0, 0.3, 1.0, 0.5, 0.02])[:, None]
    columns, lengths = native.marked_columns(marks)
    assert torch.equal(columns.long(), marks.nonzero()[:, 1])
    assert torch.equal(lengths, marks.sum(1))


# --- compilation ---------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder without a library, and a source that compiles in a moment."""
    source = tmp_path / "kernels.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in native._SIGNATURES))
    monkeypatch.setattr(native, "_SOURCE", source)
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    native.load.cache_clear()
    yield tmp_path / "cache" / "native"
    native.load.cache_clear()


def _implementation(_: int) -> str:
    native.load.cache_clear()
    return native.implementation()


def test_processes_that_compile_at_once_leave_one_library(elsewhere: Path) -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_implementation, range(2), chunksize=1) == ["native", "native"]
    assert [path.suffix for path in elsewhere.iterdir()] == [".so"]


def test_without_a_compiler_or_if_turned_off_torch_computes(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert native.implementation() == "torch"
    monkeypatch.undo()
    native.load.cache_clear()
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.implementation() == "torch"
    assert not native.can_attend(*[torch.zeros(1, 1, 1, 8)] * 3)
    assert not elsewhere.exists()


def compiler(file: Path, body: str) -> str:
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return str(file)


def test_a_compiler_that_fails_is_no_error(elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = compiler(tmp_path / "cc", "exit 1")
    monkeypatch.setattr(shutil, "which", lambda name: broken)
    assert native.implementation() == "torch"
    assert native.problem() == f"{broken} cannot compile it"
    assert not list(elsewhere.iterdir())


def test_another_compiler_is_tried_if_the_first_one_fails(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"cc": compiler(tmp_path / "cc", "exit 1"), "gcc": shutil.which("cc")}
    monkeypatch.setattr(shutil, "which", found.get)
    assert (native.implementation(), native.problem()) == ("native", "")


def test_a_compiler_that_does_not_know_this_cpu_compiles_for_any(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f'case "$*" in *{native._FOR_THIS_CPU}*) exit 1;; esac; exec {shutil.which("cc")} "$@"'
    old = compiler(tmp_path / "cc", body)
    monkeypatch.setattr(shutil, "which", lambda name: old)
    assert native.implementation() == "native"


@pytest.mark.parametrize("damage", [lambda code: code[:-9], lambda code: b"", lambda code: b"garbage" + code[7:]])
def test_a_damaged_library_is_compiled_again(elsewhere: Path, damage: Callable[[bytes], bytes]) -> None:
    compiled = _implementation(0)
    (library,) = elsewhere.iterdir()
    whole = library.read_bytes()
    library.unlink()  # not written to: this process has it loaded
    library.write_bytes(damage(whole))
    assert compiled == _implementation(0) == "native"
    assert native._is_whole(library)


@pytest.mark.parametrize("changed", ["source", "flags", "compiler", "machine", "cpu"])
def test_code_for_another_machine_is_not_loaded(
    changed: str, elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_compiler = f'exec {shutil.which("cc")} "$@"'
    here = compiler(tmp_path / "cc", run_compiler)
    monkeypatch.setattr(shutil, "which", lambda name: here)
    assert _implementation(0) == "native"
    if changed == "source":
        native._SOURCE.write_text(native._SOURCE.read_text() + "\n")
    elif changed == "flags":
        monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-g"))
    elif changed == "compiler":
        compiler(tmp_path / "cc", f"{run_compiler} -O0")
    elif changed == "machine":
        monkeypatch.setattr(platform, "machine", lambda: "another")
    else:
        monkeypatch.setattr(native, "_cpu_features", lambda: "flags : none")
    assert _implementation(0) == "native"
    assert len(list(elsewhere.iterdir())) == 2
