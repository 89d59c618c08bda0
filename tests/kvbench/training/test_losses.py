"""The losses against slow loops in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvbench.training import losses
from kvbench.view.softmax import LogitScale


def _draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("block", [3, 100])
def test_quality_equals_sums_over_the_vocabulary(reverse: bool, block: int) -> None:
    student, teacher = _draw(7, 5), _draw(7, 5, seed=1)
    weight = _draw(11, 5, seed=2)
    target = torch.tensor([0, 3, 10, 5, 5, 1, 2])
    student.requires_grad_()
    loss, kl, ntp = losses.quality(
        student,
        teacher,
        target,
        lambda x: x @ weight.T,
        losses.Terms(reverse=reverse),
        block,
    )
    expected_kl = expected_ntp = 0.0
    for row in range(7):
        q = [math.exp(float(x)) for x in weight.double() @ student[row].detach().double()]
        p = [math.exp(float(x)) for x in weight.double() @ teacher[row].double()]
        q, p = [x / sum(q) for x in q], [x / sum(p) for x in p]
        first, second = (q, p) if reverse else (p, q)
        expected_kl += sum(a * math.log(a / b) for a, b in zip(first, second, strict=True)) / 7
        expected_ntp -= math.log(q[int(target[row])]) / 7
    assert float(kl.detach()) == pytest.approx(expected_kl, rel=1e-5)
    assert float(ntp.detach()) == pytest.approx(expected_ntp, rel=1e-5)
    assert float(loss.detach()) == pytest.approx(expected_kl + expected_ntp, rel=1e-5)


@pytest.mark.parametrize(
    "terms",
    [losses.Terms(), losses.Terms(reverse=True), losses.Terms(kl=False), losses.Terms(ntp=False)],
)
@pytest.mark.parametrize("block", [3, 100])
def test_gradient_of_quality_equals_differentiation(terms: losses.Terms, block: int) -> None:
    """Differentiate the textbook form in float64, through a head that is not linear."""
    weight, target = _draw(11, 5, seed=2), torch.tensor([0, 3, 10, 5, 5, 1, 2])
    teacher = _draw(7, 5, seed=1)

    def head(x: Tensor) -> Tensor:
        return (x @ weight.to(x).T).tanh() * 4

    student = _draw(7, 5).requires_grad_()
    loss, *_ = losses.quality(student, teacher, target, head, terms, block)
    (3 * loss).backward()
    slow = _draw(7, 5).double().requires_grad_()
    q, p = head(slow).log_softmax(-1), head(teacher.double()).log_softmax(-1)
    expected = slow.new_zeros(())
    if terms.kl:
        first, second = (q, p) if terms.reverse else (p, q)
        expected = expected + (first.exp() * (first - second)).sum() / 7
    if terms.ntp:
        expected = expected - q[torch.arange(7), target].mean()
    (3 * expected).backward()
    assert student.grad is not None
    assert slow.grad is not None
    torch.testing.assert_close(student.grad, slow.grad.float(), rtol=1e-4, atol=1e-6)


def test_a_term_that_is_off_is_zero() -> None:
    arguments = _draw(3, 4), _draw(3, 4, seed=1), torch.tensor([0, 1, 2]), lambda x: x
    _, kl, ntp = losses.quality(*arguments, losses.Terms(kl=False))
    assert float(kl) == 0
    assert float(ntp) > 0
    _, kl, ntp = losses.quality(*arguments, losses.Terms(ntp=False))
    assert float(kl) > 0
    assert float(ntp) == 0


def test_retained_is_the_mean_share_at_the_end() -> None:
    log_beta = -_draw(2, 3, 2, 13).abs() / 5
    valid = torch.arange(13) >= torch.tensor([0, 4])[:, None]
    expected = 0.0
    for b, first in ((0, 0), (1, 4)):
        for layer in range(3):
            for h in range(2):
                kept = sum(math.exp(float(log_beta[b, layer, h, i].double()) * (12 - i)) for i in range(first, 13))
                expected += kept / (13 - first) / 12
    assert float(losses.retained(log_beta, valid)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("block", "cap"), [(2, None), (256, None), (256, 0.7)])
def test_labels_are_the_largest_logit_from_later_answer_queries(block: int, cap: float | None) -> None:
    query, key = _draw(2, 4, 9, 8), _draw(2, 2, 9, 8, seed=1)
    supervised = torch.zeros(2, 9, dtype=torch.bool)
    supervised[0, [5, 7, 8]] = True
    supervised[1, 4] = True
    labels = losses.answer_logits(query, key, supervised, LogitScale(0.3, cap), block)
    for b in range(2):
        for h in range(2):
            for i in range(9):
                logits = [
                    0.3 * float(query[b, g, p].double() @ key[b, h, i].double())
                    for g in (2 * h, 2 * h + 1)
                    for p in range(i + 1, 9)
                    if supervised[b, p]
                ]
                expected = max(logits, default=-math.inf)
                if cap is not None and logits:
                    expected = cap * math.tanh(expected / cap)
                assert float(labels[b, h, i]) == pytest.approx(expected, rel=1e-5)


def _slow_shares(
    query: Tensor, key: Tensor, block: int, t: int, cap: float = math.inf, sinks: Sequence[float] = ()
) -> list[float]:
    """Shares of the complete blocks before one query, `query` `[G, d]` and `key` `[T, d]`; `sinks` of its heads."""
    weights = []
    for g, q in enumerate(query.double()):
        logits = [0.3 * float(q @ key[i].double()) for i in range(t + 1)]
        if cap < math.inf:
            logits = [cap * math.tanh(x / cap) for x in logits]
        top = sum(math.exp(x) for x in [*logits, *sinks[g : g + 1]])
        weights.append([math.exp(x) / top for x in logits])
    largest = [max(w[i] for w in weights for i in range(k * block, (k + 1) * block)) for k in range(t // block)]
    return [x / sum(largest) for x in largest]


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(("block", "length"), [(1, 5), (3, 11), (4, 8)])
def test_blocks_share_the_largest_attention(group: int, block: int, length: int) -> None:
    query, key = _draw(2, group, length, 8), _draw(2, length, 8, seed=1)
    share, earlier = losses.block_shares(query, key, block, 0.3)
    logits = _draw(2, length, length // block, seed=2)
    expected_sum = 0.0
    for h in range(2):
        for t in range(length):
            expected = _slow_shares(query[h, :, t], key[h], block, t)
            assert earlier[t].tolist() == [k < len(expected) for k in range(length // block)]
            assert share[h, t, : len(expected)].tolist() == pytest.approx(expected, rel=1e-4)
            assert not share[h, t, len(expected) :].any()
            if expected:
                own = [math.exp(float(x)) for x in logits[h, t, : len(expected)]]
                expected_sum += sum(p * math.log(p / (x / sum(own))) for p, x in zip(expected, own, strict=True))
    found = losses.divergence(logits, share, earlier)
    assert float(found) == pytest.approx(expected_sum / 2, rel=1e-3)


def test_blocks_share_attention_with_sinks_and_a_soft_cap() -> None:
    query, key, sinks = 3 * _draw(2, 2, 11, 8), _draw(2, 11, 8, seed=1), torch.tensor([-2.0, 3.0, 1.0, -40.0])
    share, _ = losses.block_shares(query, key, 3, LogitScale(0.3, 1.2, sinks))
    plain, _ = losses.block_shares(query, key, 3, 0.3)
    for h in range(2):
        for t in range(3, 11):
            expected = _slow_shares(query[h, :, t], key[h], 3, t, 1.2, sinks.view(2, 2)[h].tolist())
            assert share[h, t, : len(expected)].tolist() == pytest.approx(expected, rel=1e-4)
    assert float((share - plain).abs().max()) > 0.01


def test_regression_is_smooth_l1_and_the_square_between_neighbours_summed_over_layers() -> None:
    predicted, label = 2 * _draw(2, 3, 2, 8), 2 * _draw(2, 3, 2, 8, seed=1)
    label[..., 6:] = -math.inf
    label[0, 0, 1, 2] = -math.inf
    fit, step = losses.regression(predicted, label, label.isfinite())
    errors, smooth = [], 0.0
    for at in range(3):
        jumps = []
        for row, truth in zip(predicted[:, at].flatten(0, 1), label[:, at].flatten(0, 1), strict=True):
            for i in range(8):
                if math.isfinite(truth[i]):
                    error = abs(float(row[i].double() - truth[i].double()))
                    errors.append(error**2 / 2 if error < 1 else error - 0.5)
                    if i and math.isfinite(truth[i - 1]):
                        jumps.append(float(row[i].double() - row[i - 1].double()) ** 2)
        smooth += sum(jumps) / len(jumps)
    assert float(fit) == pytest.approx(sum(errors) / len(errors), rel=1e-5)
    assert float(step) == pytest.approx(smooth, rel=1e-5)
