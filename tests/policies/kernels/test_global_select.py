"""The best entries of a whole cache are those that sorting finds."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench import native
from kvbench.errors import UserError
from kvbench.parts import best
from kvbench.plugin import Scored, Scores
from kvbench.spelling import policy
from kvbench_policies.joint import Global
from kvbench_policies.kernels.global_select import op, ref
from kvbench_policies.kernels.global_select.op import global_select, select_largest
from tests.kernels import DEVICES, INTERPRETED, padding, torch_path

from ..views import random_case

HEADS = 5


def entries(batch: int, length: int, *, levels: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (of so many different values), positions and validity, `[B, K, T]`."""
    torch.manual_seed(1000 * seed + length)
    score = torch.randn(batch, HEADS, length) * 10.0 ** torch.arange(-3, 2)[:, None]
    if levels:
        score = torch.randint(levels, score.shape) / levels - 0.5
    valid = padding(batch, length)
    mask = torch.ones(batch, length, dtype=torch.bool) if valid is None else valid
    score = score.masked_fill(~mask[:, None], 1e9)
    position = (mask.long().cumsum(-1) - 1)[:, None].expand(score.shape)
    return score, position, mask[:, None].expand(score.shape)


def classes(score: Tensor) -> Tensor:
    """Protection: most entries none, some of every class."""
    drawn = torch.randint(0, 40, score.shape)
    return torch.where(drawn <= Scores.NEWEST, drawn, 0).to(torch.int8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("protected", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [63, 100, 257])
def test_selection_is_the_sorted_ones(length: int, batch: int, protected: bool, device: str) -> None:
    for seed, levels in enumerate((None, 3)):  # few levels: the threshold falls into a tie
        score, position, valid = entries(batch, length, levels=levels, seed=seed)
        protect = classes(score) if protected else None
        held = valid.sum((1, 2))
        shares = torch.tensor([0.2, 0.57, 0.9])[:batch]
        count = (held * shares).long()
        on = [None if x is None else x.to(device) for x in (score, position, valid, count, protect)]
        got = global_select(*on)  # type: ignore[arg-type]
        assert got.dtype == torch.bool
        assert torch.equal(got.sum((1, 2)).cpu(), count)
        assert torch.equal(got.cpu(), ref.global_select(score, position, valid, count, protect))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", ["none", "one", "all but one", "all"])
def test_extreme_counts(share: str, device: str) -> None:
    score, position, valid = entries(3, 63)
    held = valid.sum((1, 2))
    count = {"none": held * 0, "one": held * 0 + 1, "all but one": held - 1, "all": held}[share]
    got = global_select(*(x.to(device) for x in (score, position, valid, count))).cpu()
    assert torch.equal(got, ref.global_select(score, position, valid, count))


@pytest.mark.parametrize("device", DEVICES)
def test_equal_scores_go_to_the_recent_then_to_the_lower_head(device: str) -> None:
    score, position, valid = entries(1, 100)
    score = torch.zeros_like(score)
    score[0, 1, ::2] = -0.0  # which is 0
    count = torch.tensor([2 * HEADS + 3])
    got = global_select(*(x.to(device) for x in (score, position, valid, count))).cpu()
    assert got[0].sum(-1).tolist() == [3, 3, 3, 2, 2]
    assert got[0, 0].nonzero()[:, 0].tolist() == [97, 98, 99]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
def test_extreme_scores_keep_their_order(is_native: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_native:
        monkeypatch.setattr(native, "library", lambda: None)
    big, tiny = torch.finfo(torch.float32).max, torch.finfo(torch.float32).smallest_normal
    row = [-big, -1.0, -tiny, -tiny / 4, 0.0, tiny / 4, tiny, 1.0, 1.0000001, big]
    score = torch.tensor([row, row[::-1]])[None]
    score = score.expand(20, -1, -1)
    position = torch.arange(10).expand(score.shape)
    valid = torch.ones_like(score, dtype=torch.bool)
    count = torch.arange(1, 21)
    got = global_select(*(x.to(device) for x in (score, position, valid, count))).cpu()
    assert torch.equal(got, ref.global_select(score, position, valid, count))


@pytest.mark.parametrize("device", DEVICES)
def test_equal_keys_are_taken_from_the_first_on(device: str) -> None:
    torch.manual_seed(0)
    key = torch.randint(-1, 3, (3, 4, 100))  # hundreds of each, over several blocks and heads
    key[1] = (1 << 62) + (1 << 61)
    for count in ([0, 17, 300], [1, 399, 200], [90, 400, 90]):
        wanted = torch.tensor(count)
        got = select_largest(key.to(device), wanted.to(device)).cpu()
        assert torch.equal(got, best(key.flatten(1), wanted).view(key.shape))


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_the_kernels_write_their_output_and_nothing_beside() -> None:
    from kvbench_policies.kernels.global_select.triton import launch

    key = torch.randint(0, 1 << 62, (3, HEADS, 63))
    room = torch.full((3 * HEADS * 63 + 200,), 77, dtype=torch.int8)
    out = room[100:-100].view(key.shape)
    launch(key, torch.tensor([5, 50, 200]), out)
    assert ((out == 0) | (out == 1)).all()
    assert out.sum((1, 2)).tolist() == [5, 50, 200]
    assert (room[:100] == 77).all()
    assert (room[-100:] == 77).all()


def test_layers_that_hold_different_numbers_of_entries() -> None:
    v = random_case((63, 40), layers=3).views(policy("snapkv"), [9, 9])
    held = [7, 63, 30]
    layers = []
    for view, n in zip(v, held, strict=True):
        cut = copy.copy(view)
        for name in ("col", "position", "valid"):
            setattr(cut, name, getattr(view, name)[..., -n:])
        value = torch.randint(4, cut.shape).float()
        layers.append(Scored(cut, Scores(value, classes(value))))
    total = torch.tensor([50, 31])

    def joined(of_layer: list[Tensor]) -> Tensor:
        return torch.cat([pad(x, (0, max(held) - x.shape[-1])) for x in of_layer], 1)

    keep = ref.global_select(
        joined([scores.value for _, scores in layers]),
        joined([view.position for view, _ in layers]),
        joined([view.valid for view, _ in layers]),
        total,
        joined([scores.protect for _, scores in layers]),
    )
    assert torch.equal(Global().allocate(layers, total), keep.sum(-1).view(2, 3, 2))


@torch_path
@pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning")
def test_opcheck() -> None:
    torch.use_deterministic_algorithms(False)
    key = torch.randint(-1, 9, (3, HEADS, 63))
    torch.library.opcheck(op.largest, (key, torch.tensor([5, 50, 200])))


@torch_path
def test_what_is_wrong_is_said() -> None:
    score, position, valid = entries(1, 63)
    count = torch.tensor([3])
    with pytest.raises(UserError, match="position"):
        global_select(score, position[..., 1:], valid, count)
    with pytest.raises(UserError, match="protect"):
        global_select(score, position, valid, count, torch.zeros(1, 1, 63))
    with pytest.raises(UserError, match="float32"):
        select_largest(score, count)
    with pytest.raises(UserError, match="count"):
        select_largest(position, count[0])
