"""What a training step of gates costs, in forward passes of the same model.

    python -m benchmarks.gate_training [--model smollm2] [--tokens 440] [--dtype bfloat16]

First, loss and gradients of a short sequence are compared with the equations, written out with
every logit in memory; nothing is timed if they differ. Then a step on one sequence (teacher,
student, loss and backward pass, without the optimizer) and a plain forward pass of the same tokens
take turns, and the table has the ratio of their medians, in CPU time.

`fresh` gates retain nearly everything; `forgetful` gates (bias -1) nearly nothing, as after
training. Learned tokens are those of an answer, or all.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.wrong_input import refused
from kvbench.engine.loading import load_model
from kvbench.engine.models import decoder_of, model_info
from kvbench.registry import TRAINERS, get
from kvbench.training import losses
from kvbench.training.settings import complete
from kvbench.training.student import Student
from kvbench_policies.kernels.capacity_loss import ref as capacity_ref
from kvbench_policies.kernels.retention_attention import ref as attention_ref

AGREE_AT = 97
ANSWER = 16
WIDTH = 96


def student_of(network: nn.Module, policy: str, model: str, tokens: int, bias: float) -> Student:
    """A student with random gates of a policy."""
    method = get(TRAINERS, policy)
    given: dict[str, Any] = {"length": tokens, "hidden_dim": WIDTH, "accumulate": 1}
    if method.objective == "distil":
        given |= {"capacity": tokens // 5, "bias": bias}
    settings = complete(method, model, 0, given)
    torch.manual_seed(0)
    gates = method.build(model_info(network), decoder_of(network).config, settings)
    return Student(network, gates, method, settings)


def batch(tokens: int, learned: int) -> tuple[Tensor, Tensor]:
    """Random tokens; the last ones are learned."""
    ids = torch.randint(5, 5000, (1, tokens), generator=torch.Generator().manual_seed(1))
    supervised = torch.zeros(1, tokens, dtype=torch.bool)
    supervised[:, max(0, tokens - 1 - learned) : -1] = True
    return ids, supervised


def textbook(
    student: Tensor,
    teacher: Tensor,
    target: Tensor,
    head: Callable[[Tensor], Tensor],
    terms: losses.Terms,
) -> tuple[Tensor, Tensor, Tensor]:
    """`losses.quality` (its defaults), differentiated by torch."""
    q, p = (F.log_softmax(head(x).float(), -1) for x in (student, teacher))
    kl = (p.exp() * (p - q)).sum(-1).mean()
    ntp = F.nll_loss(q, target)
    return kl + ntp, kl.detach(), ntp.detach()


def gradients(student: Student) -> tuple[Tensor, Tensor]:
    """The loss of a short sequence, and the gradients of all gates in one vector."""
    student.gates.zero_grad()
    loss = student(*batch(AGREE_AT, ANSWER))["loss"]
    loss.backward()
    grads = [p.grad.flatten() for p in student.gates.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(grads)


def disagreement(student: Student) -> float:
    """Distance of loss and gradients from the equations, relative to their lengths; the larger."""
    fast = gradients(student)
    slow_method = dataclasses.replace(
        student.method,
        attention=attention_ref.retention_attention,
        capacity=capacity_ref.capacity_loss,
    )
    with (
        mock.patch.object(student, "method", slow_method),
        mock.patch.object(losses, "quality", textbook),
    ):
        slow = gradients(student)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(fast, slow, strict=True))


def measure(student: Student, data: tuple[Tensor, Tensor], repeats: int) -> tuple[float, float]:
    """Median CPU seconds of a plain forward pass and of a step, which take turns."""
    forward, step = [], []
    for _ in range(repeats + 1):
        student.eval()
        start = time.process_time()
        with torch.no_grad():
            student.base(data[0], use_cache=False)
        forward.append(time.process_time() - start)
        student.train()
        start = time.process_time()
        student(*data)["loss"].backward()
        step.append(time.process_time() - start)
    return statistics.median(forward[1:]), statistics.median(step[1:])  # the first warms up


@refused()
def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=440)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policy", nargs="+", default=["trimkv", "dbtrimkv", "locret"])
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    if args.dtype == "float32":
        for policy in sorted({"trimkv", "dbtrimkv"} & set(args.policy)):
            for bias in (2.0, -1.0):
                network = load_model(args.model, None, torch.device("cpu"), dtype)
                off = disagreement(student_of(network, policy, args.model, AGREE_AT, bias))
                print(f"{policy}, bias {bias:g}: within {off:.1e} of the equations")
                if off > 1e-3:
                    return 1
    print(f"\n{args.model}, {args.tokens} tokens, {args.dtype}, {torch.get_num_threads()} threads\n")
    print("| policy | gates | learned | forward, s | step, s | forwards a step |")
    print("| --- | --- | --: | --: | --: | --: |")
    for policy in args.policy:
        for state, bias in (("fresh", 8.0), ("forgetful", -1.0)):
            if policy == "locret" and state == "forgetful":
                continue
            network = load_model(args.model, None, torch.device("cpu"), dtype)
            student = student_of(network, policy, args.model, args.tokens, bias)
            for learned in (ANSWER, args.tokens - 1):
                data = batch(args.tokens, learned)
                forward, step = measure(student, data, args.repeats)
                ratio = step / forward
                row = (
                    f"`{policy}`",
                    state,
                    learned,
                    f"{forward:.2f}",
                    f"{step:.2f}",
                    f"{ratio:.1f}",
                )
                print("| " + " | ".join(map(str, row)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
