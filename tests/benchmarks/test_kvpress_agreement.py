"""Rows of the comparison with kvpress, and the verdict on a cell, without kvpress."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvbench
from benchmarks import kvpress_agreement
from benchmarks.kvpress_agreement import Places, markdown, report, verdict
from benchmarks.kvpress_cases import LENGTHS, WINDOWS, artifacts
from benchmarks.kvpress_compare import Cell, Side, compare, swapped
from benchmarks.kvpress_rows import (
    NOT_RUN,
    ROWS,
    SINKS,
    Case,
    Row,
    budgets,
    compared,
    forwards,
    presses_in,
    spelled,
    spread,
)
from kvbench.plugin import Scores

PAGE = Path(__file__).parents[2] / "docs" / "from-kvpress.md"
KNORM = Row("KnormPress", "knorm")
MOMENTS = ("question", "decode", "chunked", "turns")


def case_of(length: int = 63) -> Case:
    window, kernel = WINDOWS[length]
    case: Case = {"ids": list(range(length)), "window": window, "kernel": kernel, "sinks": SINKS}
    more = {"layers": 2, "kv_heads": 2, "model": "tiny", "folder": "tiny"}
    return case | more | {"recent": length - spread(case) - SINKS}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=80, initializer_range=0.2, **shape, **heads))
    return made.eval()


@pytest.fixture(scope="module")
def case(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("artifacts")
    model.save_pretrained(folder / "tiny")
    path = str(folder / "tiny")
    return case_of() | artifacts({"tiny": path}, folder)["tiny"] | {"folder": path}


# --- the rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_every_row_runs_within_its_budgets(name: str, case: Case, model: LlamaForCausalLM) -> None:
    row = ROWS[name]
    tokens = len(case["ids"])
    budget = budgets(row, case)[0]
    side = Side(row, case, budget, model, {"kept": np.zeros((2, 2, tokens), bool)})
    held = side.held(side.policy)
    seen = forwards(row, case, budget)[-1][1]
    assert held.shape == (2, 2, seen)
    limit = kvbench.Budget.parse(budget).per_head(seen) * 4
    assert 0 < held.sum() <= limit + (case["window"] * 4 if "decode" in row.moment else 0)


@pytest.mark.parametrize("length", LENGTHS)
def test_forwards_cover_the_tokens_without_a_gap(length: int) -> None:
    case = case_of(length)
    for row, budget in ((r, b) for r in ROWS.values() for b in budgets(r, case)):
        steps = forwards(row, case, budget)
        assert steps[0][0] == 0
        assert all(a[1] == b[0] for a, b in itertools.pairwise(steps))
        assert steps[-1][1] <= length
        if row.moment == "chunked":  # a token alone would be decoded, not prefilled
            assert min(end - start for start, end in steps) > 1


@pytest.mark.parametrize("length", LENGTHS)
def test_shares_of_a_dialogue_are_rounded_alike_on_both_sides(length: int) -> None:
    case = case_of(length)
    row = ROWS["ratio_decoding"]
    window = case["window"]
    for share in budgets(row, case):
        for total in (length - 2 * window, length - window, length):
            ours = kvbench.Budget.parse(share).per_head(total)
            assert ours == int(total * (1 - (1 - share)))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["duo_attention", "simlayerkv"])
def test_whole_heads_and_layers_are_budgets_without_remainder(name: str, length: int) -> None:
    case = case_of(length)
    for budget in budgets(ROWS[name], case):
        assert budget == int(budget)
        extra = (budget - case["recent"] - SINKS) * case["layers"] * case["kv_heads"]
        assert extra % spread(case) == 0


def test_the_page_names_every_press_and_no_other() -> None:
    page = PAGE.read_text()
    written = page.split("<!-- begin: kvpress_agreement.py -->")[0]
    assert presses_in(written) == compared()


def test_the_spellings_of_the_page_are_policies() -> None:
    written = PAGE.read_text().split("## What both keep")[0]
    columns = re.findall(r"^\| `.+?` \| (.*?) \|", written, re.M)
    spellings = [text for column in columns for text in re.findall(r"`([a-z_0-9=:.]+)`", column)]
    policies = [text for text in spellings if text not in MOMENTS]
    assert len(policies) > 30
    for text in policies:
        part = "=" in text.split(":")[0]
        kvbench.policy(f"snapkv:{text}" if part else text)


def test_the_table_of_the_page_is_that_of_the_rows() -> None:
    table = PAGE.read_text().split("<!-- begin: kvpress_agreement.py -->\n")[1]
    lines = re.findall(r"^\| `(.+?)`.*? \| (?:`(.+?)`.*?)? ?\| \d* ?\| (.+) \|$", table, re.M)
    expected = [(row.press, row.spelling.format_map(Places())) for row in ROWS.values()]
    assert [(press, spelling) for press, spelling, _ in lines] == [
        *expected,
        *((press, "") for press in NOT_RUN),
    ]
    said = " ".join(text for *_, text in lines)
    assert all(row.reason in said for row in ROWS.values())
    assert "no reason that is known" not in said


# --- the verdict on a cell ------------------------------------------------------------------------


def ours(row: Row, case: Case, model: Any, budget: int = 13) -> np.ndarray:
    side = Side(row, case, budget, model, {"kept": np.zeros(1)})
    return side.held(side.policy)


def exchanged(kept: np.ndarray, layer: int = 0) -> np.ndarray:
    """The kept set with one entry of a head exchanged for another."""
    other = kept.copy()
    head = other[layer, 0]
    head[[head.argmax(), head.argmin()]] = False, True
    return other


def test_equal_sets_and_a_real_difference(case: Case, model: LlamaForCausalLM) -> None:
    kept = ours(KNORM, case, model)
    assert compare(Side(KNORM, case, 13, model, {"kept": kept}), kept) == Cell(52, 0, "", 0.0)
    other = exchanged(kept)
    cell = compare(Side(KNORM, case, 13, model, {"kept": other}), other)
    assert (cell.other, cell.kind) == (1, "real")


def test_entries_that_kvpress_does_not_keep_are_a_difference(case: Case, model: LlamaForCausalLM) -> None:
    kept = ours(KNORM, case, model)
    fewer = kept.copy()
    fewer[0, 0, kept[0, 0].argmax()] = False
    assert compare(Side(KNORM, case, 13, model, {"kept": fewer}), fewer).kind == "real"


def test_a_reason_excuses_nothing_but_what_the_mended_press_does_otherwise(case: Case, model: LlamaForCausalLM) -> None:
    row = Row("KnormPress", "knorm", reason="why not")
    kept = ours(row, case, model)
    other = exchanged(kept)
    for mended, as_is, kind in ((kept, kept, ""), (kept, other, "design"), (other, other, "real")):
        assert compare(Side(row, case, 13, model, {"kept": mended}), as_is).kind == kind


def test_scores_that_are_the_same_make_a_tie_and_others_do_not(case: Case, model: LlamaForCausalLM) -> None:
    kept = ours(KNORM, case, model)
    key = torch.stack([x.keys[0] for x in model(torch.tensor([case["ids"]])).past_key_values.layers])
    scores = (-key.norm(dim=-1)).detach().numpy()
    other = exchanged(kept)
    first, second = kept[0, 0].argmax(), kept[0, 0].argmin()
    found = {"kept": other, "scores": scores}
    assert compare(Side(KNORM, case, 13, model, found), other).kind == "real"
    equal = scores.copy()
    equal[0, 0, second] = equal[0, 0, first]
    cell = compare(Side(KNORM, case, 13, model, {"kept": other, "norms": -equal}), other)
    assert cell.kind == "tie"


def test_counts_of_kvpress_are_filled_by_our_scores(case: Case, model: LlamaForCausalLM) -> None:
    row = Row("LUKVPress(KnormPress)", "knorm", counts=True)
    fewer, more = ours(KNORM, case, model, 9), ours(KNORM, case, model, 20)
    kept = np.stack([fewer[0], more[1]])
    assert compare(Side(row, case, 13, model, {"kept": kept}), kept).kind == ""


def test_moved_keys_are_compared_with_ours_moved_alike(case: Case, model: LlamaForCausalLM) -> None:
    row = Row("KeyRerotationPress(KnormPress)", "knorm", match="rotated")
    kept = ours(row, case, model)
    keys = np.zeros((2, 2, 13, 8), np.float32)
    frequency = model.model.rotary_emb.inv_freq.tolist()
    caches = model(torch.tensor([case["ids"]])).past_key_values.layers
    for layer, head in np.ndindex(2, 2):
        for new, old in enumerate(kept[layer, head].nonzero()[0]):
            key = caches[layer].keys[0, head, old].tolist()
            for pair, f in enumerate(frequency):
                turned = complex(key[pair], key[pair + 4]) * np.exp(1j * (new - int(old)) * f)
                keys[layer, head, new, [pair, pair + 4]] = turned.real, turned.imag
    moved = compare(Side(row, case, 13, model, {"kept": kept, "keys": keys}), kept).moved
    assert moved is not None
    assert moved < 1e-6
    wrong = compare(Side(row, case, 13, model, {"kept": kept, "keys": keys + 1}), kept)
    assert wrong.moved is not None
    assert wrong.moved > 0.1
    assert wrong.kind == "real"


def test_swapped_sees_heads_layers_the_cache_and_supersets() -> None:
    kept = np.zeros((2, 2, 4), bool)
    kept[..., 0] = True
    scores = np.arange(16.0).reshape(2, 2, 4)
    other = exchanged(kept)
    assert not swapped(kept, other, scores)
    scores[0, 0, :2] = 1
    assert swapped(kept, other, scores)
    across = kept.copy()
    across[0, 0, 0], across[1, 1, 1] = False, True
    scores[1, 1, 1] = 1
    assert swapped(kept, across, scores)
    more = kept.copy()
    more[0, 0, 1] = True
    assert swapped(kept, more, scores)
    scores[0, 0, 1] = 2
    assert not swapped(kept, more, scores)


# --- mutations ------------------------------------------------------------------------------------


def stand_in(name: str, case: Case, model: Any, folder: Path) -> None:
    """Write what kvpress would have written, had it kept and merged what kvbench does."""
    row = ROWS[name]
    out: dict[str, Any] = {"versions": np.array(["kvpress"]), "exported": np.array([], str)}
    tokens = len(case["ids"])
    for budget in budgets(row, case):
        prefix = f"0/{name}/{budget}/"
        theirs = {"kept": np.zeros((2, 2, tokens), bool)}
        if row.merges:
            theirs["merged"] = np.zeros((2, 2, tokens, 16), np.float32)
        side = Side(row, case, budget, model, theirs)
        kept = out[prefix + "kept"] = side.held(side.policy)
        if row.counts:  # heads that keep differently many
            theirs["kept"] = kept
            kept = out[prefix + "kept"] = Side(row, case, budget, model, theirs).kept()
        if row.merges:
            side.kept()
            merged = np.stack([side.stored[layer].numpy() for layer in (0, 1)])
            out[prefix + "mended/merged"] = merged[:, :, : kept.shape[-1]]
        if row.reason:
            out[prefix + "mended/kept"] = kept
            out[prefix + "kept"] = exchanged(kept)
    np.savez(folder / "kvpress.npz", **out)
    (folder / "cases.json").write_text(json.dumps([case | {"presses": [name]}]))


def inverted(part: Any) -> Any:
    """A score whose values are turned over, and whose protection is of the newest instead."""
    original = type(part).score

    def score(self: Any, v: Any) -> Scores:
        found = original(self, v)
        found = found if isinstance(found, Scores) else Scores(found, torch.zeros_like(v.col))
        turned = torch.where(found.protect > 0, Scores.WINDOW - found.protect, found.protect)
        return Scores(found.value.max() - found.value, turned.clamp(min=0).to(torch.int8))

    return score


@pytest.mark.parametrize("name", ROWS)
def test_every_row_fails_when_its_policy_is_mutated(
    name: str,
    case: Case,
    model: LlamaForCausalLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    policy = kvbench.policy(spelled(ROWS[name], case))
    stand_in(name, case, model, tmp_path)
    assert report(tmp_path, None) == 0, capsys.readouterr().out
    if ROWS[name].unit == "entries":
        monkeypatch.setattr(type(policy.score), "score", inverted(policy.score))
    else:  # all heads and layers score alike: turn their order over
        order = "laziness" if name == "simlayerkv" else "_worth"
        original = getattr(type(policy.allocate), order)
        monkeypatch.setattr(type(policy.allocate), order, lambda *x: -original(*x))
    assert report(tmp_path, None) == 1
    assert re.search(r"[1-9]\d* for real", capsys.readouterr().out)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.merges])
def test_a_merge_that_writes_something_else_fails(
    name: str, case: Case, model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merger = kvbench.policy(spelled(ROWS[name], case)).merge
    stand_in(name, case, model, tmp_path)
    assert report(tmp_path, None) == 0
    monkeypatch.setattr(
        type(merger),
        "merge",
        lambda self, v, keep, state: (v.key, torch.full_like(v.value, 7.0)),
    )
    assert report(tmp_path, None) == 1


def test_every_row_with_a_reason_has_a_mended_press() -> None:
    presses = (PAGE.parents[1] / "benchmarks" / "kvpress_presses.py").read_text()
    repairs = presses.split("repairs: dict")[1].split("return (repairs")[0]
    named = set(re.findall(r'^        "([a-z_ ]+)": lambda', repairs, re.M))
    assert named == {name for name, row in ROWS.items() if row.reason}


# --- the tables -----------------------------------------------------------------------------------


def test_the_verdict_counts_and_gives_the_reason() -> None:
    reason = Row("XPress", "x", reason="because")
    assert verdict(KNORM, [Cell(10, 0, "", 0.0)]) == "0 of 10"
    assert verdict(reason, [Cell(10, 0, "", 0.0)]) == "0 of 10, although because"
    assert verdict(reason, [Cell(10, 0, "", 0.0), Cell(10, 1, "design", 0.0)]) == (
        "1 of 20 (5.0%): because; with that mended, kvpress keeps the same"
    )
    assert verdict(KNORM, [Cell(10000, 1, "tie", 0.0)]) == "1 of 10000 (less than 0.1%): ties"
    assert "2e-07" in verdict(KNORM, [Cell(10, 0, "", 0.0, 2e-7)])
    assert "differ by 3e-07" in verdict(KNORM, [Cell(10, 0, "", 0.0, merged=3e-7)])


def test_the_markdown_has_a_line_for_every_press() -> None:
    table = markdown({name: [Cell(10, 0, "", 0.0)] for name in ROWS}, "versions")
    assert table.startswith(f"{len(ROWS)} cells, versions:")
    assert presses_in(table) == compared()
    assert "{" not in table


def test_a_press_without_a_row_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cells(folder: Path, theirs: Any) -> Iterator[tuple[str, Case, list[tuple[float, Cell]]]]:
        yield "knorm", case_of(), [(13, Cell(10, 0, "", 0.0))]

    monkeypatch.setattr(kvpress_agreement, "cells_of", cells)
    for exported, status in (("KnormPress", 0), ("NewPress", 1)):
        np.savez(tmp_path / "kvpress.npz", exported=np.array([exported]), versions=np.array(["kvpress"]))
        assert report(tmp_path, None) == status
    assert "presses without a row: NewPress" in capsys.readouterr().out


def test_the_table_goes_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"a\n{kvpress_agreement.BEGIN}old\n{kvpress_agreement.END}b\n")
    kvpress_agreement.write("new\n", page)
    assert page.read_text() == f"a\n{kvpress_agreement.BEGIN}new\n{kvpress_agreement.END}b\n"


def test_spellings_have_the_settings_of_the_case() -> None:
    case = case_of(100)
    assert spelled(ROWS["snapkv"], case) == "snapkv:window=8:kernel=7:pool=avg"
    assert spelled(ROWS["kvzip"], case) == "kvzip:replay=64"
