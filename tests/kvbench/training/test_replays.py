"""Gates that learn what a replay measures: labels, order, memory and agreement."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kvbench
from kvbench.cli import call
from kvbench.engine.models import attention_modules, decoder_of, model_info
from kvbench.errors import UserError
from kvbench.registry import TRAINERS, get
from kvbench.training import replays
from kvbench.training.data import TOGETHER, Sequences, SequenceStream, different
from kvbench.training.replays import ReplayStudent, ReplayTargets, agreement


def student_of(model: nn.Module, **changes: Any) -> ReplayStudent:
    method = get(TRAINERS, "kvzap")
    network = copy.deepcopy(model)
    settings = {**method.defaults, "hidden_dim": 16, **changes}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        gates = method.build(model_info(network), decoder_of(network).config, settings)
    return ReplayStudent(network, gates, method)


def batch(rows: int = 1, length: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 500, (rows, length), generator=generator)
    return ids, torch.zeros(rows, length, dtype=torch.bool)


def test_only_gates_take_a_gradient(tiny_llama: nn.Module) -> None:
    student = student_of(tiny_llama)
    before = {k: v.clone() for k, v in student.base.state_dict().items()}
    student(*batch())["loss"].backward()
    assert all(p.grad is None for p in student.base.parameters())
    grads = [p.grad for p in student.gates.parameters()]
    assert all(g is not None and bool(g.isfinite().all()) and bool(g.ne(0).any()) for g in grads)
    assert all(torch.equal(v, before[k]) for k, v in student.base.state_dict().items())


@torch.no_grad()
def test_labels_follow_the_equation(tiny_llama: Any) -> None:
    """A loop over a plain forward of the text and the text again, in float64."""
    ids = batch(length=24)[0][0]
    student = student_of(tiny_llama)
    measured = student.measure(ids)
    network = copy.deepcopy(tiny_llama)
    network.set_attn_implementation("eager")
    entering: list[Tensor] = []
    for _, module in attention_modules(network):
        module.register_forward_pre_hook(
            lambda _, args, kwargs: entering.append(kwargs["hidden_states"][0]), with_kwargs=True
        )
    length, info = len(ids), model_info(network)
    out = network(torch.cat([ids, ids])[None], output_attentions=True, use_cache=True)
    for i, (attention, hidden) in enumerate(zip(out.attentions, entering, strict=True)):
        torch.testing.assert_close(measured.hidden[i][0], hidden[:length], rtol=1e-4, atol=1e-5)
        value = out.past_key_values.layers[i].values[0].double()
        for h in range(info.kv_heads):
            for t in range(length):
                best = 0.0
                for g in range(h * info.group, (h + 1) * info.group):
                    norm = float((value[h, t] @ info.output_weight(i)[g].double()).norm())
                    for q in range(length, 2 * length):
                        weight = float(attention[0, g, q, t])
                        best = max(best, weight * norm / float(hidden[q].double().norm()))
                assert float(measured.label[i, h, t]) == pytest.approx(np.log(best), abs=1e-3)


def test_the_loss_is_the_squared_error_of_the_logs(tiny_llama: nn.Module) -> None:
    student = student_of(tiny_llama)
    ids, supervised = batch(rows=2)
    errors = []
    for row in ids:
        measured = student.measure(row)
        for i, hidden in enumerate(measured.hidden):
            said = student.gates.layers[i](hidden[0].float()).T  # type: ignore[union-attr,index]
            errors += [float(x) ** 2 for x in (said.detach() - measured.label[i]).flatten()]
    assert float(student(ids, supervised)["fit"]) == pytest.approx(np.mean(errors), rel=1e-4)


def test_left_padding_changes_nothing(tiny_llama: nn.Module) -> None:
    student = student_of(tiny_llama)
    ids, supervised = batch()
    alone = student(ids, supervised)
    pad = torch.zeros(1, 7, dtype=torch.int64)
    valid = torch.arange(47)[None] >= 7
    padded = student(torch.cat([pad, ids], 1), torch.zeros(1, 47, dtype=torch.bool), valid)
    torch.testing.assert_close(padded["loss"], alone["loss"])


def test_a_sequence_that_comes_again_soon_is_not_replayed_again(
    tiny_llama: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = student_of(tiny_llama)
    ran: list[int] = []
    replay = ReplayStudent._replay

    def counted(self: ReplayStudent, ids: Tensor) -> ReplayTargets:
        ran.append(int(ids[0, 0]))
        return replay(self, ids)

    monkeypatch.setattr(ReplayStudent, "_replay", counted)
    rows = [torch.full((5,), n) for n in range(TOGETHER + 1)]
    for n in (0, 1, 0):
        student.measure(rows[n])
    assert ran == [0, 1]
    for row in rows:
        student.measure(row)
    assert len(ran) == TOGETHER + 1
    student.measure(rows[0])  # the first of TOGETHER + 1 is forgotten
    assert len(ran) == TOGETHER + 2


def test_images_are_refused(tiny_llama: nn.Module) -> None:
    with pytest.raises(UserError, match="kvzap is trained on text only"):
        student_of(tiny_llama)(*batch(), pixel_values=torch.zeros(1))


def test_agreement_is_that_of_scipy(tiny_llama: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.stats import spearmanr

    student = student_of(tiny_llama)
    generator = torch.Generator().manual_seed(2)
    labels = [torch.randn(2, 2, n, generator=generator) for n in (30, 21)]
    said = [x + torch.randn(x.shape, generator=generator) for x in labels]
    labels[0][1, 0, 3] = float("-inf")  # an entry that received nothing
    answers = iter(said)
    measured = iter(ReplayTargets((), x) for x in labels)
    monkeypatch.setattr(student, "measure", lambda ids: next(measured))
    monkeypatch.setattr(student, "predict", lambda of: next(answers))
    got = agreement(student, [{"input_ids": torch.arange(3)}] * 2)
    label, predicted = (torch.cat(x, -1).flatten(0, 1).double().numpy() for x in (labels, said))
    known = np.isfinite(label)
    r2, rank = [], []
    for y, p, own in zip(label, predicted, known, strict=True):
        y, p = y[own], p[own]
        r2.append(1 - ((p - y) ** 2).sum() / ((y - y.mean()) ** 2).sum())
        rank.append(spearmanr(p, y).statistic)
    assert got["sequences"] == 2
    assert got["tokens"] == 51
    assert got["r2"] == pytest.approx(np.mean(r2), abs=1e-4)
    assert got["spearman"] == pytest.approx(np.mean(rank), abs=1e-4)
    together = spearmanr(predicted[known], label[known]).statistic
    assert got["spearman_model"] == pytest.approx(together, abs=1e-4)


# --- the order of sequences -----------------------------------------------------------------------


def numbered(size: int | None = None) -> SequenceStream:
    return SequenceStream(lambda i: {"input_ids": torch.tensor([i])}, False, {}, size)


def order(sequences: Sequences) -> list[int]:
    return [int(sequences[i]["input_ids"]) for i in range(len(sequences))]


def test_one_pass_is_the_plain_order() -> None:
    assert order(Sequences([numbered()], 40)) == list(range(40))
    assert different(40, 1) == 40


def test_sequences_come_together_in_every_pass() -> None:
    count = 2 * 3 * TOGETHER
    got = order(Sequences([numbered()], count, 3, seed=4))
    groups = [got[i : i + TOGETHER] for i in range(0, count, TOGETHER)]
    for n, group in enumerate(groups):
        assert sorted(group) == list(range(n // 3 * TOGETHER, (n // 3 + 1) * TOGETHER))
    assert groups[0] == sorted(groups[0])
    assert groups[1] != groups[2]
    assert order(Sequences([numbered()], count, 3, seed=5)) != got
    assert different(count, 3) == 2 * TOGETHER
    assert different(count + 1, 3) == 3 * TOGETHER


def test_held_out_sequences_are_not_those_of_the_training() -> None:
    count = 3 * TOGETHER + 1
    endless = Sequences([numbered()], count, 3)
    held = [int(x["input_ids"]) for x in endless.held_out(4)]
    assert not set(held) & set(order(endless))
    assert len(held) == 4
    short = Sequences([numbered(2 * TOGETHER + 3)], count, 3)
    assert [int(x["input_ids"]) for x in short.held_out(9)] == [2 * TOGETHER + n for n in range(3)]
    assert Sequences([numbered(20)], count, 3).held_out(9) == []


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "mine.jsonl"
    texts = [" ".join(f"word{n * i % 7}" for i in range(12)) for n in range(20)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.mark.parametrize("gate", ["mlp", "linear"])
def test_trained_gates_are_read_by_the_policy(
    gate: str, llama_folder: str, rows: str, tmp_path: Path, tiny_llama: Any
) -> None:
    pytest.importorskip("accelerate")
    out = tmp_path / "gates"
    flags = f"--policy kvzap --gate {gate} --steps 32 --passes 2 --hidden-dim 16 --length 24"
    command = ["train", "gates", "--model", llama_folder, "--data", rows, "--out", str(out)]
    assert call([*command, "--device", "cpu", *flags.split()]) == 0
    config = json.loads((out / "gates.json").read_text())
    assert (config["kind"], config["gate"], config["input"]) == ("kvzap", gate, "hidden")
    assert config["activation"] == "gelu"
    held_out = config["training"]["held_out"]
    assert held_out["sequences"] == 4, "20 rows, of which 16 were trained on"
    log = [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]
    assert log[-1]["fit"] < log[0]["fit"]
    kept = kvbench.kept(tiny_llama, torch.arange(5, 45)[None], f"kvzap:window=4:gates={out}", 8)
    assert sum(int(x.sum()) for x in kept if x is not None) == 8 * sum(x.shape[1] for x in kept if x is not None)


@pytest.mark.slow
def test_a_training_that_stopped_continues_to_the_same_weights(
    llama_folder: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops in the middle of a pass, so what was remembered has to be measured again."""
    pytest.importorskip("accelerate")
    flags = "--policy kvzap --steps 40 --passes 2 --hidden-dim 16 --length 24 --save-steps 20"
    outs = [tmp_path / "whole", tmp_path / "broken"]
    start = ["train", "gates", "--model", llama_folder, "--data", rows, "--device", "cpu"]
    commands = [[*start, "--out", str(out), *flags.split()] for out in outs]
    assert call(commands[0]) == 0
    plain, steps = ReplayStudent.forward, []

    def stops(self: ReplayStudent, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        steps.append(1)
        if len(steps) == 27:
            raise UserError("stopped")
        return plain(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(replays.ReplayStudent, "forward", stops)
        assert call(commands[1]) == 2
    assert (outs[1] / "checkpoints" / "checkpoint-20" / "complete").is_file()
    assert call(commands[1]) == 0
    one, other = ((out / "gates.safetensors").read_bytes() for out in outs)
    assert one == other


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--policy kvzap --no-kl", "--no-kl does not apply to kvzap"),
        ("--policy kvzap --input kv", "--input does not apply to kvzap"),
        ("--policy trimkv --passes 2", "--passes does not apply to trimkv"),
        ("--policy kvzap --passes 0", "--passes 0 is too small; use 1 or more"),
    ],
)
def test_wrong_settings_are_one_line(
    llama_folder: str, rows: str, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "gates", "--model", llama_folder, "--data", rows, "--dry-run"]
    assert call([*command, "--device", "cpu", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
