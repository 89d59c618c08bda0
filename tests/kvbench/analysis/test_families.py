"""Analyses, profiles, quantised caches and all moments on families of models: each works, or says why in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

import kvbench
from benchmarks.family_models import FAMILIES
from kvbench.analysis import allocation
from kvbench.analysis.common import make_grid
from kvbench.analysis.perturbation import probe
from kvbench.analysis.retention import survival
from kvbench.analysis.retention.options import RetentionOptions
from kvbench.errors import UserError
from kvbench.profiles.command import measure_profile, profile_queries
from kvbench.profiles.summaries import FILTERS, STATISTICS
from kvbench.progress import Silent
from kvbench.runs.runner import run

BY_NAME = {family.name: family for family in FAMILIES}
TRIED = ("gpt_oss", "gemma4_text", "qwen3_5_text", "deepseek_v3", "granitemoehybrid", "opt")
OUTPUT_GATES = {"qwen3_5_text"}
"""Families whose attention multiplies its output by a gate of the query."""
LENGTHS = {"length": "160", "samples": 3, "chat_template": False}


@dataclass(frozen=True)
class Saved:
    """A tiny random model in a folder, and a file with two questions."""

    name: str
    folder: str
    task: str

    def grid(self, **settings: Any) -> dict[str, Any]:
        """Return the flags of a grid on the model and the questions."""
        flags = {"models": self.folder, "tasks": self.task, "samples": 2, "chat_template": False}
        return {**flags, **settings}


@pytest.fixture(scope="module", params=TRIED)
def saved(
    request: pytest.FixtureRequest, bpe_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Saved:
    family = BY_NAME[request.param]
    if not family.exists:
        pytest.skip(f"this transformers has no {family.name}")
    sizes: dict[str, Any] = {"vocab_size": len(bpe_tokenizer)}
    sizes |= {f"{token}_token_id": getattr(bpe_tokenizer, f"{token}_token_id") for token in ("bos", "eos", "pad")}
    folder = tmp_path_factory.mktemp(family.name)
    replace(family, settings={**family.settings, **sizes}).build().save_pretrained(folder / "model")
    bpe_tokenizer.save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(0)
    lines = []
    for answer in ("x", "y"):
        words = [f"w{number}" for number in torch.randint(0, 90, (45,), generator=generator).tolist()]
        row = {"context": " ".join(words[:40]), "question": " ".join(words[40:]), "answers": answer}
        lines.append(json.dumps({**row, "max_new_tokens": 6}))
    (folder / "mine.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return Saved(family.name, str(folder / "model"), str(folder / "mine.jsonl"))


def perturbation(saved: Saved) -> dict[str, str]:
    found = probe.analyze(
        make_grid(saved.grid(policies="snapkv:window=4,criticalkv:window=4", budgets="0.5")), Silent()
    )
    assert (found.heads["l1"] <= found.heads["bound1"] * 1.001 + 1e-6).all()
    in_the_first = found.layers[found.layers["layer"] == found.layers["layer"].min()]
    error = (in_the_first["l1"] - in_the_first["l1_forward"]).abs() / in_the_first["output"]
    # Nothing before the first layer was evicted, so both agree, unless only the second has a gate on the output.
    assert (float(error.max()) < 2e-3) == (saved.name not in OUTPUT_GATES)
    return found.failed


def allocated(saved: Saved) -> dict[str, str]:
    found = allocation.analyze(make_grid(saved.grid(policies="snapkv,adakv,pyramidkv", budgets="0.5")), Silent())
    return found.failed


def retained(saved: Saved) -> dict[str, str]:
    grid = make_grid(saved.grid(policies="h2o:buffer=2", budgets="16"))
    return survival.analyze(grid, RetentionOptions(), Silent()).failed


def query_summaries(saved: Saved) -> dict[str, str]:
    for summary in (FILTERS, STATISTICS):
        profile_queries(summary, saved.folder, LENGTHS, None, Silent())
    return {}


def ablation(saved: Saved) -> dict[str, str]:
    measure_profile(saved.folder, "ablation", LENGTHS, Silent())
    return {}


def cells(policies: str, budget: str, moment: str, **settings: Any) -> Callable[[Saved], dict[str, str]]:
    """Run cells, each of which holds exactly its budget (while decoding, up to a buffer of 2) or says why it fails."""

    def answer(saved: Saved) -> dict[str, str]:
        out = Path(saved.folder).parent / f"run-{policies.partition(':')[0]}-{moment}"
        grid = {"model": saved.folder, "task": saved.task, "policy": policies, "budget": budget, "moment": moment}
        flags = {"max_new_tokens": 6, "chat_template": False, "samples": 2, "out": str(out)}
        run({**grid, **flags, **settings}, progress=False)
        table, _ = kvbench.load(out)
        answered = table[(table["status"] == "ok") & (table["policy"] != "full")]
        buffer_share = 2 / int(budget) if moment == "decode" else 0.0
        assert (answered["held_entries"] >= answered["budget_entries"]).all()
        assert (answered["held_entries"] <= answered["budget_entries"] * (1 + buffer_share)).all()
        return {row["policy"]: row["error"] for row in table.to_dict("records") if row["status"] != "ok"}

    return answer


STORED = ("full:bits=4", "snapkv:bits=8:window=4", "snapkv:key_channels=0.6:window=4")
SCORES = ("expected_attention", "kvzip", "compactor", "curdkv", "lagkv", "cake", "d2o", "cam", "pyramidinfer")
FEATURES: dict[str, Callable[[Saved], dict[str, str]]] = {
    "perturbation": perturbation,
    "allocation": allocated,
    "retention": retained,
    "query summaries": query_summaries,
    "ablation": ablation,
    "context": cells(",".join((*STORED, *SCORES)), "0.5", "context"),
    "chunked": cells("snapkv:window=4,h2o", "0.5", "chunked"),
    "turns": cells("snapkv:window=4,h2o", "0.5", "turns", task="dialogue", length="320"),
    "decode": cells("h2o:buffer=2,rkv:buffer=2:window=2,snapkv:window=4:buffer=2", "16", "decode"),
}

FORMAT = "stores entries in another format, which needs keys and values of the same size; this model's differ"
LATENT = "has no rotary embedding of whole keys, which the policy reads"
NO_ROTARY = "has no rotary embedding, which the policy reads"
ROTARY = ("expected_attention", "compactor")
REFUSED = {
    ("deepseek_v3", "query summaries"): {"": LATENT},
    ("deepseek_v3", "context"): dict.fromkeys(STORED, FORMAT) | dict.fromkeys(ROTARY, LATENT),
    ("granitemoehybrid", "query summaries"): {"": NO_ROTARY},
    ("granitemoehybrid", "context"): dict.fromkeys(ROTARY, NO_ROTARY),
    ("opt", "query summaries"): {"": NO_ROTARY},
    ("opt", "context"): dict.fromkeys(ROTARY, NO_ROTARY),
}
"""By family and feature: what is refused, and the reason; everything else works."""
GUESSES = {"": "answers 0 of 3 samples correctly, too few to profile its heads"}
"""Random models know no answer, of which a profile of heads needs some."""


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_works_or_is_refused_in_one_line(
    saved: Saved, feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    try:
        refusals = FEATURES[feature](saved)
    except UserError as error:
        refusals = {"": str(error)}
    expected = GUESSES if feature == "ablation" else REFUSED.get((saved.name, feature), {})
    assert refusals.keys() == expected.keys(), refusals
    for what, reason in expected.items():
        assert reason in refusals[what] and "\n" not in refusals[what]
