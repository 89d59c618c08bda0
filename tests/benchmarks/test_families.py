"""The oracle of model families: kvbench is right for each kind, and a wrong engine is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import families
from benchmarks.families import BEGIN, END, main, page
from benchmarks.family_checks import COLUMNS, Checks, FamilyResult, Outcome, examine, outcome_of
from benchmarks.family_models import FAMILIES, unknown_types
from kvbench.engine import models
from kvbench.engine.cache import RaggedCache
from kvbench.errors import UserError
from kvbench.view import View
from kvbench.view.softmax import LogitScale

BY_NAME = {family.name: family for family in FAMILIES}
SAMPLE = (
    "llama",
    "mixtral",
    "gemma3_text",
    "gpt_oss",
    "gemma2",
    "mimo_v2_flash",
    "gpt2",
    "qwen3_5_text",
    "deepseek_v3",
    "gemma4_text+shared",
)
"""One family of every kind; `make families` examines the others."""


@pytest.mark.parametrize("name", SAMPLE)
def test_a_family_of_every_kind_is_right(name: str) -> None:
    if not BY_NAME[name].exists:
        pytest.skip("this transformers is too old for the family")
    result = examine(BY_NAME[name])
    assert result.status == "right", families.line(result)
    compared = {column for column, outcome in result.outcomes.items() if outcome.error is not None}
    if "has no SDPA attention" in result.run.refusal:  # by the loader
        compared.add("run")
    assert compared >= {*COLUMNS}


@pytest.mark.parametrize(
    ("name", "message"),
    [("falcon", "attention interface"), ("doge", "mask or bias of its own"), ("minimax", "cache class of its own")],
)
def test_attention_of_its_own_is_refused_in_one_line(name: str, message: str) -> None:
    result = examine(BY_NAME[name])
    assert result.status == "refused" and message in result.prefill.refusal
    assert {*result.outcomes.values()} == {result.prefill}


# --- a wrong engine is noticed --------------------------------------------------------------------

Mutation = Callable[[pytest.MonkeyPatch], None]


def drops(addition: str) -> Mutation:
    """A softmax without the sinks or the soft cap of the model."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        original = LogitScale.__new__

        def plain(cls: Any, scale: float, cap: float | None = None, sinks: Tensor | None = None) -> LogitScale:
            return original(cls, scale, **{"cap": cap, "sinks": sinks, addition: None})  # type: ignore[arg-type]

        monkeypatch.setattr(LogitScale, "__new__", plain)

    return mutate


def reports(change: Callable[[Tensor], Tensor | None]) -> Mutation:
    """A cache that reports other kept entries than those that it holds."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        original = RaggedCache.kept
        monkeypatch.setattr(
            RaggedCache,
            "kept",
            lambda cache: [None if kept is None else change(kept) for kept in original(cache)],
        )

    return mutate


def shifts_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies that see the attention of each query where that of the next one belongs."""
    original = View.window_attention
    monkeypatch.setattr(View, "window_attention", lambda *arguments: original(*arguments).roll(1, 2))


def ignores_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits without the factor of the family."""
    monkeypatch.setattr(models, "_logit_factor", lambda config: 1.0)


def ignores_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that counts as tokens."""
    original = Checks.attached
    monkeypatch.setattr(Checks, "attached", lambda checks, name, chunks, mask=None: original(checks, name, chunks))


@pytest.mark.parametrize(
    ("name", "mutation", "columns"),
    [
        ("gpt_oss", drops("sinks"), "prefill decode evicted padded chunked decoding observed gates"),
        ("gemma2", drops("cap"), "prefill decode evicted padded chunked decoding observed gates"),
        ("llama", reports(lambda kept: kept.roll(1, -1)), "evicted padded chunked run decoding"),
        ("deepseek_v3", reports(lambda kept: kept.roll(1, -1)), "evicted padded chunked run decoding"),
        ("gemma4_text+shared", reports(lambda kept: kept.roll(1, -1)), "evicted padded chunked run decoding"),
        ("llama", reports(lambda kept: torch.ones_like(kept)), "evicted padded chunked run decoding"),
        ("qwen3_5_text", reports(lambda kept: None), "evicted padded chunked run decoding"),
        ("llama", shifts_queries, "observed"),
        ("cohere", ignores_factors, "observed gates"),
        ("qwen3", ignores_padding, "padded"),
    ],
)
def test_the_oracle_notices_a_wrong_engine(
    name: str, mutation: Mutation, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    checks = Checks(BY_NAME[name])
    unnoticed = [column for column in columns.split() if not outcome_of(getattr(checks, column)).is_wrong]
    assert not unnoticed


def refuse() -> float:
    raise UserError("too much\nin two lines")


@pytest.mark.parametrize("check", [lambda: float("nan"), lambda: 0.01, lambda: 1 / 0, refuse])
def test_neither_right_nor_refused_in_one_line_is_wrong(check: Callable[[], float]) -> None:
    assert outcome_of(check).is_wrong


# --- the families, the page and the command -------------------------------------------------------


def test_every_decoder_of_transformers_has_a_row_or_a_reason() -> None:
    assert unknown_types() == []
    assert len(BY_NAME) == len(FAMILIES)


@pytest.mark.parametrize(("name", "parameter"), [("gpt_oss", "sinks"), ("doge", ".A"), ("qwen2", "q_proj.bias")])
def test_what_transformers_starts_at_zero_is_not_zero(name: str, parameter: str) -> None:
    parameters = [tensor for key, tensor in BY_NAME[name].build().named_parameters() if key.endswith(parameter)]
    assert parameters and all(float(tensor.std()) > 0.05 for tensor in parameters)


RIGHT = FamilyResult("llama", "plain", 1.0, *[Outcome(error=1e-6)] * len(COLUMNS))
REFUSED = FamilyResult("falcon", "other", 0.1, *[Outcome(refusal="not yet")] * len(COLUMNS))
PARTLY = replace(RIGHT, family="gpt_oss", gates=Outcome(refusal="no gates"), padded=Outcome(note="stock differs"))
WRONG = replace(RIGHT, family="doge", evicted=Outcome(error=0.9))


def test_the_page_has_a_row_per_family_and_every_reason() -> None:
    text = page(f"before\n{BEGIN}old\n{END}after\n", [RIGHT, REFUSED, PARTLY, WRONG])
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert f"| `llama` | plain |{' yes |' * len(COLUMNS)}\n" in text
    assert "| `falcon` | not yet |" in text
    assert "- `gpt_oss`: gates: no gates\n" in text and "- `gpt_oss`: padded: stock differs\n" in text
    assert "Of 4 families" in text and "2 right, 1 refused, 1 wrong." in text
    assert text.count("**wrong**") == 1
    with pytest.raises(SystemExit, match="lacks a line"):
        page("no marks", [RIGHT])


def test_the_command_writes_and_checks_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = RIGHT
    monkeypatch.setattr(families, "examine", lambda family: result)
    monkeypatch.setattr(families, "FAMILIES", (BY_NAME["llama"],))
    target, report = tmp_path / "models.md", tmp_path / "report.json"
    target.write_text(BEGIN + END)
    assert main(["--check", str(target)]) == 1
    assert main(["--out", str(target), "--json", str(report)]) == 0
    assert main(["--check", str(target)]) == 0
    assert "[1/1] llama (1.0 s) right: prefill 1e-06" in capsys.readouterr().out
    assert json.loads(report.read_text())[0]["evicted"]["error"] == 1e-6
    result = WRONG
    assert main(["llama"]) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["lama"])
    assert capsys.readouterr().err == "unknown family 'lama'; did you mean llama?\n"
