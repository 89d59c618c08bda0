"""A model whose layers lie on several devices answers and keeps as on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvbench
from kvbench.runs import worker
from tests.devices import Devices, spread
from tests.sweeps import slow

from .conftest import batch, build

ONE = ["xpu:0"]
THREE = ["xpu:0", "xpu:1", "xpu:2"]


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Other tests share the models: none of them may get one that was spread."""
    yield
    build.cache_clear()


def on(name: str, devices: list[str]) -> Any:
    """A model of a family over devices."""
    build.cache_clear()
    model = build(name)
    spread(model, devices)
    return model


def test_the_play_notices_what_is_on_two_devices() -> None:
    with Devices():
        a, b = torch.ones(2, device="xpu:0"), torch.ones(2).to("xpu:1")
        assert (str(a.device), str(b.device), str((b + 1).device)) == ("xpu:0", "xpu:1", "xpu:1")
        with pytest.raises(RuntimeError, match="tensors on xpu:0, xpu:1"):
            a + b
        assert str((a + b.to(a.device)).device) == "xpu:0"
        assert str((a * torch.tensor(2.0)).device) == "xpu:0"
        a[torch.tensor([0])] = 1.0
        with pytest.raises(RuntimeError, match="tensors on xpu:0, cpu"):
            a[:] = torch.ones(2)
        with pytest.raises(TypeError, match="numpy: a tensor on xpu:0"):
            a.numpy()
        with pytest.raises(TypeError, match="a tensor on xpu:0"):
            np.asarray(a)
        assert a.cpu().numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("policy", "family"),
    [
        ("criticalkv:window=4", "llama"),
        ("adakv:window=4", "gemma3"),
        ("criticalkv:window=4", "phi3"),
        ("layer_defensivekv:window=4", "llama"),
        ("d2o", "llama"),
        ("sirllm", "qwen2"),
        ("pyramidkv:window=4", "qwen3"),
        ("lagkv:lag=4:sinks=2", "llama"),
        ("curdkv:local=8", "qwen2"),
        ("compactor:chunk=8", "qwen3"),
        ("expected_attention:norm=output", "gemma3"),
        ("cake:window=4", "llama"),
        ("zigzagkv:window=4", "llama"),
        ("simlayerkv:recent=4", "llama"),
        ("keydiff:allocate=global:key_channels=0.5:residual=4", "llama"),
    ],
)
def test_the_same_entries_are_kept(policy: str, family: str) -> None:
    ids, mask = batch(2, 40, (0, 7))
    kept = []
    for devices in (ONE, THREE):
        model = on(family, devices)
        with Devices():
            given = ids.to(devices[0]), mask.to(devices[0])
            kept.append(kvbench.kept(model, given[0], policy, 0.4, given[1]))
    for one, three in zip(*kept, strict=True):
        assert (one is None) == (three is None)
        assert one is None or torch.equal(one, three)


@pytest.mark.parametrize(
    ("moment", "budget", "task", "policies"),
    [
        slow("context", "0.3", "vt", "snapkv,criticalkv,trimkv,duo_attention"),
        slow("decode", "24", "longgen_list", "h2o:buffer=4,cam:buffer=4,sirllm:buffer=4"),
        slow("turns", "0.5", "dialogue", "dbtrimkv"),
    ],
)
def test_a_run_gives_the_same_answers(
    moment: str,
    budget: str,
    task: str,
    policies: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = worker.load_model
    answers = []
    for devices in (ONE, THREE):

        def load(*args: Any, devices: list[str] = devices, **options: Any) -> Any:
            model = whole(*args, **options)
            spread(model, devices)
            return model

        monkeypatch.setattr(worker, "load_model", load)
        with Devices():
            run = kvbench.run(
                {
                    "policy": policies,
                    "budget": budget,
                    "task": task,
                    "length": 192,
                    "samples": 2,
                    "max_new_tokens": 24,
                    "moment": moment,
                    "batch_size": 4,
                    "out": str(tmp_path / str(len(devices))),
                }
            )
        assert run.cells["status"].eq("ok").all(), run.cells["error"].tolist()
        columns = ["policy", "sample_id", "question_id", "response", "held_entries"]
        answers.append(run.samples[columns].sort_values(columns[:3]).reset_index(drop=True))
    assert answers[0].equals(answers[1])
