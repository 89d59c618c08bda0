"""Readers rate blocks as slow loops over their equations do."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import kvbench
from kvbench.engine.models import model_info
from kvbench.engine.reading import read_entries
from kvbench.errors import UserError
from kvbench.plugin import Blocks, ModelInfo
from kvbench_policies.gates import GateConfig, load, save
from kvbench_policies.gates.block_gates import BlockGates
from kvbench_policies.quest import PageBound
from kvbench_policies.seerattn_r import BlockGate

from .drawing import llama
from .views import rotary

HEADS, DIM = 2, 8


def shown(group: int, block: int, length: int, queries: int = 3) -> Blocks:
    """Random queries at the end of a sequence, and its complete blocks."""
    g = torch.Generator().manual_seed(100 * group + 10 * block + length)
    complete = length // block
    info = ModelInfo(
        "made/up",
        2,
        HEADS,
        HEADS * group,
        DIM,
        24,
        lambda layer: torch.empty(0),
        rotary=lambda layer, position: rotary(position, DIM),
    )
    return Blocks(
        layer=1,
        query=torch.randn(HEADS, group, queries, DIM, generator=g),
        query_position=torch.arange(length - queries, length),
        key=torch.randn(HEADS, complete, block, DIM, generator=g),
        position=torch.arange(complete * block).view(complete, block),
        model=info,
    )


def angle(position: int, pair: int, dim: int) -> float:
    return position * 10_000.0 ** (-2 * pair / dim)


def turned(x: list[float], position: int) -> list[float]:
    """One vector after RoPE; a negative position turns it back."""
    half, out = len(x) // 2, [0.0] * len(x)
    for i in range(half):
        c, s = math.cos(angle(position, i, len(x))), math.sin(angle(position, i, len(x)))
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return out


def mapped(x: list[float], weight: Tensor) -> list[float]:
    columns: list[list[float]] = weight.T.tolist()
    return [sum(a * w for a, w in zip(x, column, strict=True)) for column in columns]


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(("block", "length"), [(1, 7), (4, 21), (16, 16), (16, 53)])
def test_quest_bounds_the_products_with_a_page(group: int, block: int, length: int) -> None:
    v = shown(group, block, length)
    rating = PageBound(page=block).rate(v)
    assert rating.shape == (HEADS, 3, length // block)
    for h in range(HEADS):
        for n in range(3):
            for k in range(length // block):
                keys = v.key[h, k].tolist()
                bounds = []
                for g in range(group):
                    q = v.query[h, g, n].tolist()
                    channels = [[key[c] for key in keys] for c in range(DIM)]
                    bounds.append(sum(max(q[c] * min(x), q[c] * max(x)) for c, x in enumerate(channels)))
                assert float(rating[h, n, k]) == pytest.approx(max(bounds), abs=1e-5)
                product = (v.query[h, :, n] @ v.key[h, k].T).max()
                assert float(rating[h, n, k]) >= float(product) - 1e-5


@pytest.mark.parametrize(("page", "held"), [(4, 21), (4, 24), (16, 53)])
def test_quest_reads_the_newest_page_and_the_best_others_as_the_authors_kernels_do(page: int, held: int) -> None:
    v = shown(2, page, held)
    rating = PageBound(page=page).rate(v)
    newest, last = (held - 1) // page, (held - 1) % page + 1
    seen = torch.full((3,), held)
    for pages in range(1, newest + 2):
        entries = torch.full((3,), (pages - 1) * page + last)  # the newest page and `pages - 1`
        read = read_entries(rating, seen, page, entries, held)
        for h, n in np.ndindex(HEADS, 3):
            others = sorted(range(newest), key=lambda k: -float(rating[h, n, k]))[: pages - 1]
            expected = {i for i in range(held) if i // page in {newest, *others}}
            assert set(read[h, n].nonzero()[:, 0].tolist()) == expected
    docs = " ".join((PageBound.__doc__ or "").split())
    assert "always read, as in the authors' kernels" in docs


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("gate_dim", [2, 4, 8])
@pytest.mark.parametrize(("block", "length"), [(1, 5), (4, 21), (16, 35)])
def test_gates_rate_blocks_as_the_equations_say(group: int, gate_dim: int, block: int, length: int) -> None:
    v = shown(group, block, length)
    config = GateConfig.of("seerattn_r", v.model, gate_dim=gate_dim, block=block)
    torch.manual_seed(3)
    gates = BlockGates(config)
    with torch.no_grad():
        rating = gates.rate(v)
    layer = gates.layers[1]
    for h in range(HEADS):
        for n, position in enumerate(v.query_position.tolist()):
            flat = [x for g in range(group) for x in turned(v.query[h, g, n].tolist(), -position)]
            query = turned(mapped(flat, layer.query[h]), position)  # type: ignore[union-attr, index]
            for k in range(length // block):
                keys = [turned(v.key[h, k, e].tolist(), -(k * block + e)) for e in range(block)]
                columns = list(zip(*keys, strict=True))
                pooled = [*map(max, columns), *map(min, columns)]
                pooled += [sum(column) / block for column in columns]
                key = turned(mapped(pooled, layer.key[h]), k * block)  # type: ignore[union-attr, index]
                logit = sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(gate_dim)
                assert float(rating[h, n, k]) == pytest.approx(logit, abs=2e-4)


def test_ratings_do_not_depend_on_the_dtype_of_the_cache() -> None:
    v = shown(2, 4, 21)
    half = Blocks(v.layer, v.query.bfloat16(), v.query_position, v.key.bfloat16(), v.position, v.model)
    for rating in (
        PageBound(page=4).rate(half),
        BlockGates(GateConfig.of("seerattn_r", v.model, block=4)).rate(half),
    ):
        assert rating.dtype == torch.float32


@pytest.mark.usefixtures("seeded")
def test_gates_of_blocks_are_written_and_read_back(tmp_path: Path) -> None:
    info = shown(2, 4, 21).model
    config = GateConfig.of("seerattn_r", info, gate_dim=4, block=5, training={"steps": 2})
    gates = BlockGates(config)
    again = load(save(gates, tmp_path / "gates"), info)
    assert isinstance(again, BlockGates)
    assert again.config == config
    assert again.block == 5
    for name, tensor in gates.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


@pytest.mark.parametrize("width", [3, 5, 16])
def test_a_width_must_divide_the_head_dim(width: int) -> None:
    with pytest.raises(UserError, match=f"gate_dim={width} is invalid"):
        GateConfig.of("seerattn_r", shown(1, 1, 4).model, gate_dim=width)


def test_channels_that_rope_leaves_alone_need_a_fitting_width() -> None:
    v = shown(1, 4, 21)
    partial = ModelInfo("made/up", 2, 2, 2, 8, 24, v.model.output_weight, rotary=lambda _, p: rotary(p, 6))
    narrow = BlockGates(GateConfig.of("seerattn_r", partial, gate_dim=4, block=4))
    with pytest.raises(UserError, match="RoPE rotates 6 of 8 channels; use 8"):
        narrow.rate(Blocks(v.layer, v.query, v.query_position, v.key, v.position, partial))


@pytest.mark.usefixtures("cache")
def test_gates_of_another_kind_are_refused(tmp_path: Path) -> None:
    model = llama(2)
    stand_in = kvbench.policy("trimkv").stand_in(model_info(model), tmp_path)
    assert stand_in.score is not None
    wrong = BlockGate(gates=stand_in.score.parameters()["gates"])
    with pytest.raises(UserError, match="are for trimkv; use gates trained for seerattn_r"):
        wrong.block(model_info(model))


@pytest.mark.usefixtures("cache")
def test_a_model_without_gates_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"kvbench train gates --model .* --policy seerattn_r"):
        BlockGate().fingerprint(str(tmp_path))
