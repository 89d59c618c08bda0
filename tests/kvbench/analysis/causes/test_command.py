"""`kvbench analyze causes` on the reference model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import kvbench
from kvbench import cli
from kvbench.analysis.causes import study, write
from kvbench.analysis.causes.diagnosis import RIGHT, VALUES
from kvbench.analysis.causes.figures import draw_causes
from kvbench.analysis.causes.frames import head_rows, pair_rows, sample_rows
from kvbench.analysis.causes.lost import RunAnswers
from kvbench.analysis.causes.options import CausesOptions
from kvbench.analysis.causes.page import write_pages
from kvbench.analysis.causes.tables import cause_tables, sentences
from kvbench.engine.driver import forward
from kvbench.engine.loading import load_model
from kvbench.engine.masks import masked_copies
from kvbench.errors import UserError
from kvbench.profiles.files import read
from kvbench.progress import Silent
from kvbench.report.figure_flags import FigureFlags
from kvbench.report.figure_options import figure_options
from kvbench.runs.grid import Grid
from kvbench.runs.runner import execute
from kvbench.tables.outputs import markdown
from tests.kvbench.runs.test_fidelity import plain

BASE = {"models": "reference", "tasks": "niah_single_2", "lengths": 160, "samples": 2, "dtype": "float32"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that loses samples before and after the question, by eviction and by merging."""
    folder = tmp_path_factory.mktemp("run")
    policies = ["streaming_llm", "snapkv", "d2o"]
    values = {**BASE, "policies": policies, "budgets": "0.2", "moments": "context,question", "out": str(folder)}
    execute(Grid.from_dict(values))
    return folder


def examined(run: Path, options: CausesOptions, **changes: Any) -> study.CausesResult:
    grid = write._run_grid(changes, options, str(run))
    return study.examine_run(grid, RunAnswers(run), options, Silent())


def command(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app.app, ["analyze", "causes", *arguments])


def test_everything_given_back_is_the_full_answer_and_masks_answer_as_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept set of every cell, as a mask over one prefill, gives the response that the run has recorded."""
    compared = []
    original: Any = study._Examiner._cell

    def checking(self: Any, prefix: Any, extended: Any, prompt: Any, *more: Any) -> Any:
        found = original(self, prefix, extended, prompt, *more)
        sample = found[0]
        if sample.cell.policy.merge is None:
            source = extended if sample.cell.moment == "question" else prefix
            cache = masked_copies(source.cache, [mask[None] for mask in sample.kept], 64)
            fed = [] if sample.cell.moment == "question" else [*prompt.question_ids]
            ids, text = [], ""
            if not fed:
                ids = [more[0].ids[0]]  # the first token comes from the full prefill
                fed = ids[:]
            while len(ids) < prompt.limit and not text:
                logits = forward(self.runner.model, cache, torch.tensor([fed]))
                fed = [int(logits.argmax())]
                if fed[0] in self.ends:
                    break
                ids += fed
            response = self.tokenizer.decode(ids, skip_special_tokens=True)
            compared.append((response.strip(), sample.own.response.strip(), sample.verdict))
        return found

    monkeypatch.setattr(study._Examiner, "_cell", checking)
    result = examined(run, CausesOptions(units="layers"))
    assert len(compared) == 8 and any(verdict != RIGHT for *_, verdict in compared)
    for response, recorded, _ in compared:
        assert response.startswith(recorded) or recorded.startswith(response)
        assert response and recorded
    lost = [sample for sample in result.samples if sample.diagnosis is not None]
    assert lost and all(sample.diagnosis.outcomes["full"].right for sample in lost if sample.diagnosis)
    assert {sample.cell.moment for sample in lost} == {"context", "question"}
    merged = [sample for sample in lost if str(sample.cell.policy) == "d2o"]
    assert merged and all("own" in sample.diagnosis.outcomes for sample in merged if sample.diagnosis)
    assert result.differing == 0


def test_it_writes_tables_figures_and_pages(run: Path, tmp_path: Path) -> None:
    done = command(str(run), "--against", "snapkv", "--moment", "question", "--evidence", "search",
                   "--out", str(tmp_path))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "why samples are lost" in " ".join(done.output.split())
    frames = {path.stem: pd.read_parquet(path) for path in tmp_path.glob("*.parquet")}
    assert set(frames) == {"samples", "interventions", "heads", "pairs"}
    samples, interventions = frames["samples"], frames["interventions"]
    lost = samples[samples["verdict"] != RIGHT]
    assert len(samples) == 6 and len(lost) and set(lost["source"]) <= {"search", ""}
    found = lost[lost["give_right"].fillna(False).astype(bool)]
    assert (found["n_heads"] > 0).all() and len(found)
    assert not lost["give_random_right"].fillna(False).any()
    single = interventions[(interventions["intervention"] == "give heads") & (interventions["kv_head"] >= 0)]
    assert (single["layer"] >= 0).all() and (single["entries"] > 0).all()
    assert set(interventions.loc[interventions["policy"] == "full", "intervention"]) == {"take from full"}
    heads = frames["heads"]
    assert len(heads) == 4 * 2 * heads[["policy", "budget"]].drop_duplicates().shape[0]
    assert heads["needed"].sum() == lost["n_heads"].sum()
    assert set(frames["pairs"]["policy"]) <= {"streaming_llm", "d2o"} and len(frames["pairs"])
    (profile_path,) = tmp_path.glob("*.causes.json")
    profile = read(profile_path)
    sets = [names.split() for names in lost["heads"] if names]
    for layer, row in enumerate(profile.scores):
        for head, score in enumerate(row):
            counts = [1 / len(names) for names in sets if f"{layer}.{head}" in names]
            assert score == pytest.approx(sum(counts) / len(sets), abs=1e-8)
    assert (profile.samples, profile.task) == (2, "niah_single_2") and profile.revision
    assert f"allocate=head_profile:pool_share=0.2:profile={profile_path}" in (tmp_path / "summary.md").read_text()
    names = {path.name.partition("-")[0] for path in (tmp_path / "figures").iterdir()}
    assert names == {"verdicts", "held", "heads"}
    pages = list((tmp_path / "samples").glob("*.html"))
    assert len(pages) == lost["sample_id"].nunique() and "<script" not in pages[0].read_text()
    summary = (tmp_path / "summary.md").read_text()
    assert "questions that the full cache answers" in summary and "that bring the answer back are" in summary
    assert json.loads((tmp_path / "settings.json").read_text())["against"] == "snapkv"


def test_decode_examines_the_step_where_the_answer_departs(tmp_path: Path) -> None:
    values = {**BASE, "samples": 2, "policies": ["streaming_llm"], "budgets": "24", "moments": "decode"}
    execute(Grid.from_dict({**values, "out": str(tmp_path)}))
    result = examined(tmp_path, CausesOptions(evidence="search"))
    lost = [sample for sample in result.samples if sample.diagnosis is not None]
    assert lost
    for sample in lost:
        assert sample.diagnosis is not None
        assert sample.kept.shape[-1] == len(sample.prompt.ids) + sample.step
        assert not sample.diagnosis.outcomes["own"].right and sample.diagnosis.outcomes["full"].right


def test_pages_and_sentences_escape_what_a_model_wrote(run: Path, tmp_path: Path) -> None:
    result = examined(run, CausesOptions(units="layers"), policies="streaming_llm", moments="question")
    for sample in result.samples:
        object.__setattr__(sample.own, "response", "<script>alert(1)</script>")
    (page, *_) = write_pages(result, tmp_path)
    assert "<script" not in page.read_text() and "&lt;script&gt;" in page.read_text()
    for sample in result.samples:
        sample.diagnosis = None
    with pytest.raises(UserError, match="of 2 answers, none is lost"):
        write._require_lost(result)


def test_a_sample_under_several_moments_names_them_in_its_sections(run: Path, tmp_path: Path) -> None:
    result = examined(run, CausesOptions(units="layers"), policies="streaming_llm")
    assert {sample.cell.moment for sample in result.samples if sample.verdict != RIGHT} == {"context", "question"}
    pages = [path.read_text() for path in write_pages(result, tmp_path)]
    heading = "<h2><code>streaming_llm</code> at 0.2, moment"
    assert any(f"{heading} context: " in page and f"{heading} question: " in page for page in pages)
    assert not any("moment" in line for page in pages for line in page.splitlines() if "tokens</p>" in line)


def test_spellings_labels_and_missing_samples_are_heeded(run: Path, tmp_path: Path) -> None:
    done = command(str(run), "--against", "snapkv:window=32", "--samples", "3", "--units", "layers", "--moment",
                   "question", "--label", "snapkv=Snap", "--out", str(tmp_path))  # fmt: skip
    assert done.exit_code == 0, done.output
    summary = (tmp_path / "summary.md").read_text()
    assert "- Snap at 0.2 (niah" in summary and "loses and Snap answers" in summary
    assert "no answer to 1 sample of those" in summary
    assert "try --evidence search" in summary  # the reference model reads the word after the needle
    assert json.loads((tmp_path / "settings.json").read_text())["against"] == "snapkv"


def test_a_full_cache_of_codes_is_examined_without_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Listening(Silent):
        def message(self, text: str) -> None:
            messages.append(text)

    messages: list[str] = []
    monkeypatch.setattr(study, "search_evidence", lambda *_: pytest.fail("the verdict needs no evidence"))
    policies = ["full:key_channels=0.05", "quest"]
    execute(Grid.from_dict({**BASE, "policies": policies, "moments": "question", "out": str(tmp_path)}))
    options = CausesOptions(evidence="search")
    grid = write._run_grid({}, options, str(tmp_path))
    result = study.examine_run(grid, RunAnswers(tmp_path), options, Listening())
    assert "quest evicts nothing and is left out" in messages
    assert {sample.verdict for sample in result.samples} - {RIGHT} == {VALUES}
    assert {str(sample.cell.policy) for sample in result.samples} == {"full:key_channels=0.05"}
    assert sample_rows(result)["target_held"].eq(1).all()
    assert {"policy", "explained", "take_others_evidence_right"} <= {*pair_rows(result)}


def test_what_is_held_of_an_answer_is_left_out_where_contexts_lack_it(run: Path, tmp_path: Path) -> None:
    result = examined(run, CausesOptions(units="layers"), policies="streaming_llm", moments="question")
    for sample in result.samples:
        sample.evidence = replace(sample.evidence, target_spans=())
    samples, heads = sample_rows(result), head_rows(result)
    assert samples[["target_held", "best_head", "whole_heads"]].isna().all(axis=None)
    assert samples["evidence_held"].notna().all() and heads[["target_held", "agreement"]].isna().all(axis=None)
    drawn = draw_causes(result, samples, heads, tmp_path, figure_options(FigureFlags(), []))
    assert {path.name.partition("-")[0] for path in drawn} == {"verdicts", "heads"}
    headings = [
        column.title for table in cause_tables(samples, heads, pair_rows(result), None) for column in table.columns
    ]
    assert "evidence" in headings and "answer" not in headings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda run, tmp: [str(tmp)], "is not a run"),
        (lambda run, tmp: [str(run), "--policy", "keydiff"], "it has full, streaming_llm, snapkv, d2o"),
        (lambda run, tmp: [str(run), "--against", "keydiff"], "the run has no such policy"),
        (lambda run, tmp: [str(run), "--policy", "snapkv", "--against", "snapkv:window=32"], "is the only policy"),
        (lambda run, tmp: [str(run), "--seed", "1"], "--seed 1: the run has 0"),
        (lambda run, tmp: [str(run), "--no-chat-template"], "--chat-template no: the run has the default"),
        (lambda run, tmp: [str(run), "--length", "160,256"], "--length 160, 256: the run has 160"),
        (lambda run, tmp: [str(run), "--out", str(run)], "holds a run; choose another folder"),
        (lambda run, tmp: [str(run), "--budget", "0.9"], "no answers of streaming_llm at 0.9"),
        (lambda run, tmp: [str(run), "--moment", "decode", "--budget", "9", "--against", "d2o"], "leave it out"),
        (lambda run, tmp: [str(run), "--moment", "turns"], "compresses at context or question or decode only"),
        (lambda run, tmp: [str(run), "--evidence", "("], "neither sentence, target or search"),
        (lambda run, tmp: [str(run), "--evidence", "[0-9]{9}"], "matches nothing in the context"),
        (lambda run, tmp: ["--units", "tokens", str(run)], "units"),
        (lambda run, tmp: ["--task", "niah_single_2", "--policy", "quest"], "the policy quest evicts nothing"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: Callable[[Path, Path], list[str]], message: str, run: Path, tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    done = command("--out", str(tmp_path / "out"), *arguments(run, tmp_path))
    assert done.exit_code != 0 and not (tmp_path / "out").exists()
    assert before == {path: path.stat().st_mtime_ns for path in run.iterdir()}
    shown = str(done.exception) if isinstance(done.exception, UserError) else " ".join(done.output.split())
    assert message in shown and "Traceback" not in shown


def test_a_run_without_the_full_cache_is_refused(tmp_path: Path) -> None:
    values = {**BASE, "samples": 1, "policies": ["snapkv"], "full": False, "out": str(tmp_path / "no_full")}
    execute(Grid.from_dict(values))
    with pytest.raises(UserError, match="no full cache"):
        RunAnswers(tmp_path / "no_full")


def test_a_judged_index_counts_from_the_first_token_that_the_cache_decides() -> None:
    assert study._later([0, 1, 4], 1) == [0, 3]


def test_a_policy_that_sees_the_answer_is_examined_beside_others(tmp_path: Path) -> None:
    """Its kept entries are those of the run, and it does not disturb another policy with a replay."""
    values = {**BASE, "policies": ["oracle", "kvzip"], "budgets": "0.1", "moments": "context,question"}
    execute(Grid.from_dict({**values, "out": str(tmp_path)}))
    result = examined(tmp_path, CausesOptions(units="layers", against="oracle"))
    assert result.failed == {}
    cells = {(sample.cell.policy.name, sample.cell.moment) for sample in result.samples}
    assert cells == {(name, moment) for name in ("oracle", "kvzip") for moment in ("context", "question")}
    assert any(sample.swap is not None for sample in result.samples)
    model = load_model("reference", None, torch.device("cpu"), torch.float32)
    for sample in result.samples:
        if sample.cell.policy.name == "oracle":
            sees_question = sample.cell.moment == "question"
            seen = sample.prompt.ids if sees_question else sample.prompt.context_ids
            question = () if sees_question else sample.prompt.question_ids
            following = torch.tensor([[*question, *plain(model, sample.prompt)[0][:-1]]])
            kept = kvbench.kept(model, torch.tensor([seen]), "oracle", 0.1, following=following)
            assert torch.equal(sample.kept, torch.cat([mask for mask in kept if mask is not None]))
    samples, heads, pairs = sample_rows(result), head_rows(result), pair_rows(result)
    for frame in (samples, heads, pairs):
        assert (frame["informed"] == frame["policy"].str.startswith("oracle")).all()
    oracle = str(next(sample.cell.policy for sample in result.samples if sample.cell.policy.name == "oracle"))
    texts = [*sentences(samples, pairs, oracle), *map(markdown, cause_tables(samples, heads, pairs, oracle))]
    assert any("oracle" in text for text in texts)
    for text in texts:  # a name or a code span
        assert text.count(oracle) == text.count(f"{oracle} (informed)") + text.count(f"{oracle}` (informed)")
        assert "kvzip (informed)" not in text and "kvzip` (informed)" not in text
