"""The whole way, from a file of questions to rows, against eager attention in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import kvbench
from benchmarks.family_models import FAMILIES
from kvbench.analysis.common import analysis_runner, contexts, make_grid, stages
from kvbench.analysis.perturbation.probe import Perturbation, Probe, analyze
from kvbench.analysis.perturbation.rows import Rows
from kvbench.analysis.perturbation.stages import record_stage1
from kvbench.errors import UserError
from kvbench.parts import rank_entries
from kvbench.plugin import Allocator, Merger, View
from kvbench.progress import Silent
from kvbench.runs.worker import ModelRunner

from . import oracles

POLICIES = "snapkv:window=4,criticalkv:window=4:kernel=3,random"


def grid(folder: str, task: str, **changes: Any) -> Any:
    base = {"policies": POLICIES, "budgets": "0.3,9", "models": folder, "tasks": task, "samples": 4}
    return make_grid({**base, "chat_template": False, "device": "cpu", **changes})


def prompts_of(wanted: Any) -> dict[tuple[str, int], Any]:
    (stage,) = stages(wanted, print)
    return {(p.request.sample_id, p.request.question_id): p for job in stage.jobs for p in job.prompts}


@dataclass
class Case:
    """One question with one cell, from the oracle's side."""

    rows: pd.DataFrame
    layers: pd.DataFrame
    chunks: list[list[int]]
    kept: list[Tensor]
    compressed: int  # columns at the compression


def cases(found: Perturbation, wanted: Any, eager: oracles.Eager, folder: str) -> Iterator[Case]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = prompts_of(wanted)
    tokens: dict[str, int] = {}
    keys = ["sample_id", "question_id", "policy", "budget", "moment"]
    for values, rows in found.heads.groupby(keys, observed=True, sort=False):
        sample, number, policy, budget, moment = values
        prompt = prompts[sample, number]
        chunks = [list(prompt.context_ids), list(prompt.question_ids)]
        if rows["query"].iloc[0] == "answer":
            if str(chunks) not in tokens:
                tokens[str(chunks)] = int(eager.run(chunks)[0].logits[0, -1].argmax())
            chunks.append([tokens[str(chunks)]])
        before = chunks[0] if moment == "context" else chunks[0] + chunks[1]
        kept = [
            k[0] for k in kvbench.kept(model, torch.tensor([before]), policy, budget)
            if k is not None
        ]  # fmt: skip
        layers = found.layers
        for key, value in zip(keys, values, strict=True):
            layers = layers[layers[key] == value]
        yield Case(rows, layers, chunks, kept, len(before))


@pytest.mark.parametrize("query", ["answer", "question"])
def test_rows_are_those_of_eager_attention(folder: str, questions: str, query: Any) -> None:
    policies = "criticalkv:window=4:kernel=3,random"
    wanted = grid(folder, questions, policies=policies, moments="context,question", samples=3)
    found = analyze(wanted, Silent(), query=query)
    assert not found.failed
    eager = oracles.Eager(folder)
    count = 0
    whole: dict[str, Any] = {}  # the cells of a question share it
    for case in cases(found, wanted, eager, folder):
        count += 1
        last, cache, out = whole.setdefault(str(case.chunks), None) or eager.run(case.chunks)
        whole[str(case.chunks)] = last, cache, out
        size = sum(len(c) for c in case.chunks)
        for row in case.rows.itertuples():
            h = row.head // eager.group
            assert row.kv_head == h
            assert row.tokens == size
            held = case.kept[row.layer][h].tolist()
            inside = [i for i in range(size) if i >= case.compressed or held[i]]
            a = last.attentions[row.layer][0, row.head, -1].numpy()
            left = np.array([a[i] if i in set(inside) else 0.0 for i in range(size)])
            value = cache.layers[row.layer].values[0, h].numpy()
            weight = eager.weight(row.layer, row.head)
            want = oracles.one_head(a, left / left.sum(), value, weight, inside, inside[:1])
            for name in ("l1", "output", "entries", "mass", "bound1"):
                assert getattr(row, name) == pytest.approx(want[name], rel=2e-4, abs=1e-5), name
        for row in case.layers.itertuples():
            full = out[row.layer].numpy()
            assert row.output_forward == pytest.approx(np.abs(full).sum(), rel=2e-4)
            mine = case.rows[case.rows["layer"] == row.layer]
            assert row.l1 <= mine["l1"].sum() * (1 + 1e-9)
            if query == "question" and row.moment == "question":
                assert np.isnan(row.l1_forward)  # the question was read before anything was evicted
    assert count == 2 * 2 * 2 * 3


@pytest.mark.parametrize("query", ["answer", "question"])
def test_the_forward_is_that_of_eager_attention_with_entries_hidden(folder: str, questions: str, query: Any) -> None:
    wanted = grid(folder, questions, policies="criticalkv:window=4", moments="context,question", samples=3)
    found = analyze(wanted, Silent(), query=query)
    eager = oracles.Eager(folder)
    for case in cases(found, wanted, eager, folder):
        moment = case.layers["moment"].iloc[0]
        if query == "question" and moment == "question":
            continue
        _, _, full = eager.run(case.chunks)
        _, _, out = eager.run(case.chunks, case.kept, since=1 if moment == "context" else 2)
        for row in case.layers.itertuples():
            want = float((full[row.layer] - out[row.layer]).abs().sum())
            assert row.l1_forward == pytest.approx(want, rel=5e-4, abs=1e-4)


def test_in_the_first_layer_nothing_has_added_up_yet(grouped: str, questions: str) -> None:
    found = analyze(grid(grouped, questions), Silent()).layers
    first = found[found["layer"] == 0]
    np.testing.assert_allclose(first["l1"], first["l1_forward"], rtol=1e-3, atol=1e-4)
    later = found[found["layer"] == 2]
    assert (np.abs(later["l1"] - later["l1_forward"]) > 0.01 * later["l1"]).mean() > 0.5


def test_the_theorems_hold_on_every_row(grouped: str, questions: str) -> None:
    heads = analyze(grid(grouped, questions, budgets="0.1,0.3,0.6"), Silent()).heads
    slack = 1e-5 * heads["bound1"] + 1e-9
    assert (heads["l1"] <= heads["bound1"] + slack).all()
    assert (heads["bound1"] <= heads["bound2"] + slack).all()
    holds = heads["stage1_mass"] > 0.5
    assert 0 < holds.sum() < len(holds)
    assert (heads["bound2"] <= heads["bound3"] + slack)[holds].all()
    assert (heads["stage1_mass"] <= heads["mass"] + 1e-12).all()
    assert (heads["stage1_mass"] <= heads["top_mass"] + 1e-12).all()


def test_rows_are_tidy_and_the_same_every_time(grouped: str, questions: str) -> None:
    wanted = grid(grouped, questions)
    first, second = analyze(wanted, Silent()), analyze(wanted, Silent())
    pd.testing.assert_frame_equal(first.heads, second.heads)
    pd.testing.assert_frame_equal(first.layers, second.layers)
    both = analyze(grid(grouped, questions, moments="context,question", samples=1), Silent())
    assert list(dict.fromkeys(both.heads["moment"])) == ["context", "question"]  # as asked for
    assert list(dict.fromkeys(first.heads["budget"])) == ["0.3", "9"]
    keys = ["policy", "budget", "sample_id", "question_id", "layer", "head"]
    assert not first.heads.duplicated(keys).any()
    assert len(first.heads) == 3 * 2 * 4 * 3 * 4
    assert len(first.layers) == 3 * 2 * 4 * 3
    assert first.heads["context_id"].nunique() == 3


def test_a_budget_that_holds_everything_perturbs_nothing(grouped: str, questions: str) -> None:
    found = analyze(grid(grouped, questions, budgets="5000"), Silent())
    assert (found.heads["l1"] == 0).all()
    assert found.heads["stage1_mass"].isna().all()
    np.testing.assert_allclose(found.layers["l1_forward"], 0, atol=1e-2)


# --- stage 1 --------------------------------------------------------------------------------------


def spied(policy: Any, alpha: float, folder: str) -> tuple[Any, dict[int, Tensor], list[Any]]:
    """Compress once with a noting policy; give what its selector saw."""
    from transformers import AutoModelForCausalLM

    calls = []
    inner = policy.select

    @dataclasses.dataclass(frozen=True)
    class Spy(type(inner)):  # type: ignore[misc]
        def select(self, v: View, scores: Any, share: Tensor) -> Tensor:
            keep = super().select(v, scores, share)
            calls.append((v, scores, share, keep))
            return keep

    spy = dataclasses.replace(policy, select=Spy(**inner.parameters()))
    noted, stage1 = record_stage1(spy, alpha)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(5, 500, (1, 61), generator=torch.Generator().manual_seed(0))
    kept = kvbench.kept(model, ids, noted, 0.4)
    plain = kvbench.kept(model, ids, policy, 0.4)
    for a, b in zip(kept, plain, strict=True):
        assert a is not None and b is not None
        assert torch.equal(a, b)  # noting changes nothing
    return noted, stage1, calls


@pytest.mark.parametrize(
    ("spelling", "alpha", "share_of_stage1"),
    [
        ("snapkv:window=4", 0.5, 0.5),
        ("knorm", 0.25, 0.25),
        ("snapkv:window=16", 0.25, 0.25),  # the window alone is more than that
        ("critical_snapkv:window=4:first_stage=0.75", 0.5, 0.75),
        ("criticalkv:window=4", 0.3, 0.5),
    ],
)
def test_stage_1_is_what_the_score_ranks_first(
    spelling: str, alpha: float, share_of_stage1: float, grouped: str
) -> None:
    _, stage1, calls = spied(kvbench.policy(spelling), alpha, grouped)
    assert sorted(stage1) == [0, 1, 2]
    for v, scores, share, keep in calls:
        rank = rank_entries(scores, v.valid)
        for h in range(v.shape[1]):
            n = int(share[0, h])
            protected = int((scores.protect[0, h] > 0).sum())
            size = min(n, max(int(share_of_stage1 * n), protected))
            want = {i for i in range(v.shape[2]) if rank[0, h, i] < size}
            found = {i for i in range(v.shape[2]) if stage1[v.layer][0, h, i]}
            assert found == want
            assert found <= {i for i in range(v.shape[2]) if keep[0, h, i]}


def test_a_noting_policy_is_called_what_the_user_calls_it(grouped: str, questions: str) -> None:
    """An error that the engine words names the policy as it was written."""
    wanted = grid(grouped, questions, policies="snapkv:window=4")
    (stage,) = stages(wanted, print)
    policy, _ = record_stage1(kvbench.policy("snapkv:window=4"), 0.5)

    class Lost(Silent):
        said: list[str] = []  # noqa: RUF012

        def message(self, text: str) -> None:
            self.said.append(text)

    broken = dataclasses.replace(policy, allocate=Greedy())
    with analysis_runner(stage, wanted, Lost(), {}) as runner:
        prompt = stage.jobs[0].prompts[0]
        prefix, _ = runner.prefill(prompt.context_ids, broken.needs)
        assert runner.compress(prefix, stage.jobs[0].cells[0], prompt, policy=broken) is None
    (reason,) = runner.failed.values()
    assert "Noting" not in reason
    assert "snapkv" in Lost.said[0]


@dataclass(frozen=True)
class Greedy(Allocator):
    def allocate(self, layers: Any, total: Tensor) -> Tensor:
        heads = layers[0].view.model.kv_heads
        return (total // heads)[:, None, None].expand(-1, len(layers), heads) - 1


# --- merging --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doubling(Merger):
    def merge(self, v: View, keep: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        return v.key, 2 * v.value


def test_a_merger_is_measured_with_its_own_values(folder: str, questions: str) -> None:
    wanted = grid(folder, questions, policies="criticalkv:window=4", budgets="0.3", samples=2)
    (stage,) = stages(wanted, print)
    (job,) = stage.jobs
    cells = []
    for cell in job.cells:
        doubling = dataclasses.replace(cell.policy, merge=Doubling())
        object.__setattr__(doubling, "spelling", str(cell.policy))  # it keeps the same entries
        cells.append(cell.of(dataclasses.replace(cell.variant, policy=doubling), ""))
    eager = oracles.Eager(folder)
    rows = Rows()
    with analysis_runner(stage, wanted, Silent(), {}) as runner:
        probe = Probe(runner, cells, "answer", 0.5)
        measured = probe.context(contexts(job)[0], cells)
        rows.add("answer", probe.layer_ids, measured)
    heads = pd.DataFrame(rows.heads())
    found = Perturbation(heads, pd.DataFrame(rows.layers()), {})
    assert heads["bound1"].isna().all() and heads["stage1_mass"].isna().all()
    for case in cases(found, wanted, eager, folder):
        last, cache, _ = eager.run(case.chunks)
        for row in case.rows.itertuples():
            h = row.head // eager.group
            a = last.attentions[row.layer][0, row.head, -1].numpy()
            value = cache.layers[row.layer].values[0, h].numpy()
            held = case.kept[row.layer][h].numpy()
            merged = value.copy()
            merged[: case.compressed][held] *= 2
            left = a.copy()
            left[: case.compressed][~held] = 0
            weight = eager.weight(row.layer, row.head)
            change = oracles.projected(a, value, weight)
            change -= oracles.projected(left / left.sum(), merged, weight)
            assert row.l1 == pytest.approx(np.abs(change).sum(), rel=2e-4)


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_cell_that_fails_late_is_left_out_and_the_others_go_on(
    grouped: str, questions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = grid(grouped, questions, moments="context,question")
    whole = analyze(wanted, Silent())
    real, calls = ModelRunner.compress, []

    def compress(self: ModelRunner, prefix: Any, cell: Any, *args: Any, **options: Any) -> Any:
        calls.append(str(cell.policy))
        if str(cell.policy) == "random" and calls.count("random") > 3:
            prefix.cache.ragged[0].key.add_(1.0)  # it spoils what it was shown, too
            prefix.cache.modified_in_place = True
            self.failed[cell.cell] = "no luck"
            return None
        return real(self, prefix, cell, *args, **options)

    monkeypatch.setattr(ModelRunner, "compress", compress)
    found = analyze(wanted, Silent())
    lost = set(whole.heads.loc[whole.heads["policy"] == "random", "cell"])
    assert set(found.failed) == lost
    keep = ~whole.heads["cell"].isin(lost)
    assert set(found.heads["policy"]) == {"snapkv:window=4", "criticalkv:kernel=3:window=4"}
    np.testing.assert_array_equal(found.heads["l1"], whole.heads.loc[keep, "l1"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policies": "full"}, "evicts nothing"),
        ({"budgets": "full"}, "evicts nothing"),
        ({"policies": "snapvk"}, "snapkv"),
    ],
)
def test_what_cannot_be_analysed_is_said_at_once(
    changes: dict[str, str], says: str, grouped: str, questions: str
) -> None:
    with pytest.raises(UserError, match=says):
        grid(grouped, questions, **changes)


def test_parameters_are_checked(grouped: str, questions: str) -> None:
    wanted = grid(grouped, questions)
    with pytest.raises(UserError, match="did you mean answer"):
        analyze(wanted, Silent(), query="asnwer")
    with pytest.raises(UserError, match="share in"):
        analyze(wanted, Silent(), first_stage=1.5)


def test_sliding_layers_are_left_out_and_layers_have_the_models_own_index(
    bpe_tokenizer: Any, questions: str, tmp_path: Any
) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=len(bpe_tokenizer),
        hidden_size=64,
        head_dim=16,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.15,
        sliding_window=16,
        sliding_window_pattern=3,
        pad_token_id=bpe_tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Gemma3ForCausalLM(config).save_pretrained(str(tmp_path))
    bpe_tokenizer.save_pretrained(str(tmp_path))
    found = analyze(grid(str(tmp_path), questions, policies="snapkv:window=4"), Silent())
    assert set(found.heads["layer"]) == set(found.layers["layer"]) == {2, 5}
    first = found.layers[found.layers["layer"] == 2]  # nothing before it was evicted from
    np.testing.assert_allclose(first["l1"], first["l1_forward"], rtol=2e-3)


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2"])
def test_sinks_and_soft_caps_are_those_of_eager_attention(
    name: str, tmp_path: Path, questions: str, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    settings = {**family.settings, "vocab_size": len(bpe_tokenizer)}
    folder = str(tmp_path / "model")
    dataclasses.replace(family, settings=settings).build().save_pretrained(folder)
    bpe_tokenizer.save_pretrained(folder)
    wanted = grid(folder, questions, policies="criticalkv:window=4:kernel=3", samples=2)
    found = analyze(wanted, Silent())
    eager = oracles.Eager(folder)
    if name == "gpt_oss":
        eager.model.set_experts_implementation("eager")  # the usual one has no float64
    full_layers = sorted(set(found.heads["layer"]))
    sink_weights = []
    for case in cases(found, wanted, eager, folder):
        last, cache, _ = eager.run(case.chunks)
        size = sum(len(chunk) for chunk in case.chunks)
        for row in case.rows.itertuples():
            held = case.kept[full_layers.index(row.layer)][row.kv_head].tolist()
            inside = [i for i in range(size) if i >= case.compressed or held[i]]
            a = last.attentions[row.layer][0, row.head, -1].numpy()
            sink = 1 - a.sum()
            sink_weights.append(sink)
            left = np.array([a[i] if i in set(inside) else 0.0 for i in range(size)])
            value = cache.layers[row.layer].values[0, row.kv_head].numpy()
            weight = eager.weight(row.layer, row.head)
            want = oracles.one_head(a, left / (left.sum() + sink), value, weight, inside, inside[:1], sink)
            for column in ("l1", "output", "entries", "mass", "bound1"):
                assert getattr(row, column) == pytest.approx(want[column], rel=5e-4, abs=1e-5), column
    assert (max(sink_weights) > 0.01) == (name == "gpt_oss")
