"""Attention dilution against sums over tokens, the corollary and the proposition of the paper."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvbench
from kvbench.analysis.dilution.options import DilutionOptions
from kvbench.analysis.dilution.write import write_dilution
from kvbench.analysis.perturbation.head_outputs import FullCacheQuery, value_norms
from kvbench.errors import UserError
from kvbench.progress import Silent


def test_one_query_against_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    query, weight = torch.randn(4, 8, generator=generator), torch.randn(4, 8, 12, generator=generator)
    key, value = torch.randn(2, 2, 15, 8, generator=generator)
    useful = torch.zeros(15, dtype=torch.bool)
    useful[[2, 3, 11]] = True
    kept = torch.rand(2, 15, generator=generator) < 0.6
    kept[:, 3] = True
    measured = FullCacheQuery(query, key, value, weight, 0.5, value_norms(value, weight), useful, gap=0.7)
    heads = measured.evict(kept, None).heads
    for head in range(4):
        logits = [0.5 * float(query[head].double() @ key[head // 2, i].double()) for i in range(15)]
        top = max(logits[i] for i in (2, 3, 11))
        mass = [math.exp(z) for z in logits]
        rate = [float(x) for x in kept[head // 2]]
        in_useful, in_others = sum(mass[i] for i in (2, 3, 11)), sum(mass[i] for i in range(15) if i not in (2, 3, 11))
        rho_useful = sum(mass[i] * rate[i] for i in (2, 3, 11)) / in_useful
        rho_others = sum(mass[i] * rate[i] for i in range(15) if i not in (2, 3, 11)) / in_others
        dilution = in_others / (in_others + in_useful)
        after = rho_others * dilution / (rho_useful * (1 - dilution) + rho_others * dilution)
        ties = sum(logits[i] >= top - 0.7 for i in range(15) if i not in (2, 3, 11)) / 3
        bound = math.exp(-0.7) * ties / (1 + math.exp(-0.7) * ties)
        expected = [dilution, after, bound, rho_useful, rho_others]
        names = ("dilution", "kept_dilution", "dilution_bound", "rho_useful", "rho_distractor")
        assert [float(heads[name][head]) for name in names] == pytest.approx(expected)
    assert (
        "dilution"
        not in FullCacheQuery(query, key, value, weight, 0.5, value_norms(value, weight)).evict(kept, None).heads
    )


def test_the_analysis_is_that_of_eager_attention(grouped: str, tmp_path: Path) -> None:
    """From a file of questions to rows; the answer occurs twice in one context and never in another."""
    words = "the green letter was read by Anna in the old house and then the red one by Otto before noon".split()
    rows = [
        {"context": " ".join([*words, "Anna", *words]), "question": " Who?", "answers": "Otto", "max_new_tokens": 2},
        {
            "context": " ".join([*words, "again", *words]),
            "question": " Who?",
            "answers": "Zeppelin",
            "max_new_tokens": 2,
        },
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    grid = {"policies": "snapkv:window=4,knorm", "budgets": "0.5", "models": grouped, "tasks": str(file), "samples": 2}
    options = DilutionOptions(query="question", gap=2.0)
    out = {"out": str(tmp_path / "out"), "chat_template": False, "device": "cpu", "moments": "question"}
    done = write_dilution({**grid, **out}, Silent(), options=options)
    heads = pd.read_parquet(tmp_path / "out" / "heads.parquet")
    assert heads["sample_id"].nunique() == 1, "the context without its answer is left out"
    assert (heads["dilution"] >= heads["dilution_bound"] - 1e-9).all() and heads["dilution_bound"].gt(0).any()
    formula = heads["rho_distractor"] * heads["dilution"]
    formula /= formula + heads["rho_useful"] * (1 - heads["dilution"])
    np.testing.assert_allclose(heads["kept_dilution"], formula, atol=1e-9)
    assert 0 < (heads["kept_dilution"] < heads["dilution"]).mean() < 1

    tokenizer = AutoTokenizer.from_pretrained(grouped)
    model = AutoModelForCausalLM.from_pretrained(grouped, attn_implementation="eager").eval()
    ids = tokenizer(rows[0]["context"] + rows[0]["question"], return_offsets_mapping=True)
    starts = [i for i in range(len(str(rows[0]["context"]))) if str(rows[0]["context"]).startswith("Otto", i)]
    assert len(starts) == 2
    useful = [any(begin < start + 4 and end > start for start in starts) for begin, end in ids["offset_mapping"]]
    token_ids = torch.tensor([ids["input_ids"]])
    with torch.no_grad():
        attentions = model(token_ids, output_attentions=True).attentions
    kept = kvbench.kept(AutoModelForCausalLM.from_pretrained(grouped).eval(), token_ids, "knorm", "0.5")
    others = ~torch.tensor(useful)
    for row in heads[heads["policy"] == "knorm"].itertuples():
        attention = attentions[row.layer][0, row.head, -1].double()
        mask = kept[row.layer][0, row.kv_head]  # type: ignore[index]
        assert row.dilution == pytest.approx(float(attention[others].sum()), abs=1e-5)
        expected = float((attention * mask)[others].sum() / (attention * mask).sum())
        assert row.kept_dilution == pytest.approx(expected, abs=1e-5)
    text = (tmp_path / "out" / "summary.md").read_text()
    assert "distractors kept" in text and [
        p for p in done.files if p.name.startswith("dilution-") and p.suffix == ".png"
    ]


def test_contexts_without_their_answers_are_refused(grouped: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"context": "a red letter", "question": " Who?", "answers": "Zeppelin"}))
    grid = {"policies": "knorm", "budgets": "0.5", "models": grouped, "tasks": str(file), "samples": 1}
    with pytest.raises(UserError, match="no context contains a reference answer"):
        write_dilution(
            {**grid, "out": str(tmp_path / "out"), "chat_template": False}, Silent(), options=DilutionOptions()
        )
