"""What a reader gets: the terminal's table, the Markdown summary and the files."""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvbench.errors import UserError
from kvbench.judge.base import LocalJudge
from kvbench.progress import Late, Silent
from kvbench.report import render, run_table
from kvbench.report.frames import prepare
from kvbench.report.page import write_page
from kvbench.report.rendering import write_report
from kvbench.tables.numbers import NumberFormat, interval, number, size
from kvbench.tables.text import code, md, plain, short, slug, span

from .conftest import reading_few

NASTY = "a|b<script>alert(1)</script>[red]*_`x`"


def shown(cells, samples=None, width=120):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(run_table(cells, samples))
    return console.file.getvalue()


@pytest.fixture(scope="module")
def report(run_frames, tmp_path_factory):
    cells, samples = run_frames(
        ["random", "snapkv", "criticalkv"], tasks=["vt", "cwe", "qa_1"],
        failed=[("random", "0.2", "cwe")], error=f"RuntimeError: {NASTY}\nsecond line",
    )  # fmt: skip
    out = tmp_path_factory.mktemp("report")
    return cells, samples, out, render(cells, samples, out / "deep" / "er")


def test_files_are_the_ones_returned(report):
    _, _, out, paths = report
    names = {"mean-ruler", "overview-ruler", "pareto-vt", "pareto-cwe", "pareto-qa_1"}
    want = {f"figures/{n}.{e}" for n in names for e in ("png", "svg")} | {"summary.md"}
    want |= {f"tables/{n}.{e}" for n in ("mean-ruler", "tasks-ruler") for e in ("csv", "tex")}
    assert {p.relative_to(out / "deep" / "er").as_posix() for p in paths} == want
    record = out / "deep" / "er" / "figures" / ".drawn.json"
    assert {p for p in out.rglob("*") if p.is_file()} == {*paths, record}
    assert paths[0].name == "summary.md"


def test_figures_have_the_resolution_and_width_of_a_paper(report):
    png = next(p for p in report[3] if p.name == "mean-ruler.png").read_bytes()
    width, _ = struct.unpack(">II", png[16:24])
    assert width == 700  # 3.5 inches at 200 dpi
    svg = next(p for p in report[3] if p.name == "mean-ruler.svg").read_text()
    assert 'width="252pt"' in svg
    assert "dc:date" not in svg


def test_the_same_frames_give_the_same_bytes(report, run_frames, tmp_path):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"])
    first = render(cells, samples, tmp_path / "a")
    again = render(cells, samples, tmp_path / "b")
    digests = [[hashlib.sha256(p.read_bytes()).hexdigest() for p in ps] for ps in (first, again)]
    assert digests[0] == digests[1]


def test_summary_says_what_was_run_and_what_failed(report):
    cells, _, _, paths = report
    text = paths[0].read_text()
    for part in ("`reference`", "`vt`, `cwe`, `qa_1`", "`snapkv`", "1024 tokens", "cpu, float32"):
        assert part in text
    assert "say nothing about real models" in text
    assert f"Cells: {len(cells)}; **1 failed**" in text
    assert "- kvbench `0.1.0`, torch `2.13.0`\n" in text
    assert "The full cache is not above chance on `qa_1` (marked °), so differences" in text
    assert "**Differences from full are paired:**" in text
    assert "| `random` | `0.2` | 20.4% | – | incomplete | – |" in text


def test_summary_links_exist(report):
    _, _, _, paths = report
    links = re.findall(r"\]\((.+?)\)", paths[0].read_text())
    assert len(links) == 10
    assert all((paths[0].parent / link).is_file() for link in links)


def test_summary_tables_hold_the_numbers(report):
    cells, samples, _, paths = report
    text = paths[0].read_text()
    overall = prepare(cells, samples).overall
    row = overall[(overall["policy"] == "criticalkv") & (overall["budget"] == "0.4")].iloc[0]
    line = next(x for x in text.splitlines() if x.startswith("| `criticalkv` | `0.4` | 40.4%"))
    assert f"{100 * row['score']:.1f}" in line
    assert interval(row["diff_lo"], row["diff_hi"], NumberFormat.POINTS, signed=True) in line
    assert "★" in line
    tables = [x for x in text.splitlines() if x.startswith("|")]
    blocks = "\n".join(text.splitlines()).split("\n\n")
    for block in blocks:
        widths = {x.count("|") for x in block.splitlines() if x.startswith("|")}
        assert len(widths) <= 1, block
    assert any("failed" in x for x in tables)


def test_what_a_model_or_user_wrote_cannot_be_markup(report):
    text = report[3][0].read_text()
    assert "<script>" not in text
    assert "second line" in text
    line = next(x for x in text.splitlines() if "second line" in x)
    assert line.count("|") == 7
    assert "&#60;script&#62;" in line


def test_statements_leave_out_tasks_that_do_not_discriminate(report):
    text = report[3][0].read_text()
    statements = text.split("## Scores")[0].split("## Cheapest")[1]
    assert "- `vt`:" in statements
    assert "`qa_1`" not in statements


def test_table_shows_means_differences_failures_and_marks(report):
    text = shown(report[0], report[1])
    flat = " ".join(text.split())
    assert "reference · ruler" in text
    assert "failed" in text
    assert re.search(r"failed: random 0\.2 context on cwe at 1024 tokens: RuntimeError", flat)
    assert "qa_1°" in text
    assert "[red]" in flat
    assert "say nothing about real models" in flat
    best = report[0]
    score = best[(best["policy"] == "criticalkv") & (best["budget"] == "0.4")]
    assert f"{100 * score[score['task'] == 'vt']['score'].iloc[0]:.1f}" in text


@pytest.mark.parametrize("width", [80, 200])
def test_table_fits_the_terminal(run_frames, width):
    tasks = [f"niah_multikey_{i}" for i in range(13)]
    policy = "criticalkv:allocate=global:select=two_stage:window=64"
    cells, _ = run_frames([policy], ("0.2",), tasks, samples=8)
    text = shown(cells, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text.replace("…:", "")
    for i in range(13):
        assert f"multikey_{i}" in text
    heads = [line for line in text.splitlines() if "┃" in line]
    assert max(line.count("multikey_") for line in heads) <= 8


def test_control_characters_do_not_reach_the_terminal(run_frames):
    policy, task = "x\x1b[31m\n[bold]y", "t\x07|"
    cells, _ = run_frames([policy], ("0.2",), [task], failed=[(policy, "0.2", task)], error="\x1b]0;title\x07")
    text = shown(cells)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert "[bold]y" in text


def test_real_models_get_no_reference_note(run_frames):
    cells, _ = run_frames(model="org/Model-8B")
    assert "reference model" not in shown(cells)


def test_lengths_and_moments_are_told_apart(run_frames, tmp_path):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"], lengths=(512, 1024), moments=("context", "question"))
    text = shown(cells)
    for label in ("512 tokens, context", "1024 tokens, question"):
        assert label in text
    paths = render(cells, samples, tmp_path)
    assert "### `ruler`, 1024 tokens, question" in paths[0].read_text()
    assert {p.name for p in paths if p.suffix not in (".csv", ".tex")} == {
        "summary.md", "pareto-vt.png", "pareto-vt.svg",
    }  # fmt: skip
    assert sum(p.suffix == ".csv" for p in paths) == 4


def test_the_judge_is_read_from_the_versions_and_not_from_the_metric(run_frames, tmp_path):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["quiz"], samples=10)
    named = cells.assign(metric="accuracy (judge gpt-4o)")
    assert "judge" not in render(named, samples, tmp_path)[0].read_text().replace("(judge", "")
    for origin, told in {
        "gpt-4o at host.example": "`quiz`: scored by the judge gpt-4o at host.example.",
        LocalJudge.origin: "`quiz`: scored by the local judge, which only counts shared words: do",
    }.items():
        judged = cells.assign(versions=json.dumps({"judge": origin, "rubric": "correct 1"}))
        assert told in render(judged, samples, tmp_path)[0].read_text()
        assert told.replace("`", "") in " ".join(shown(judged).split())


def test_a_report_imports_nothing_heavy():
    code = (
        "import sys; from kvbench.report import group_means, render, run_table; "
        "import kvbench.report.against, kvbench.runs.store; "
        "print({'torch', 'transformers', 'lm_eval', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_table_for_a_command_needs_neither_pandas_nor_matplotlib():
    code = (
        "import sys; import kvbench.tables.outputs, kvbench.cli.listing; "
        "print({'torch', 'pandas', 'numpy', 'matplotlib'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_cell_of_several_runs_counts_once(run_frames):
    few, many = run_frames(samples=20), run_frames(samples=50)
    cells = pd.concat([many[0], few[0]])
    samples = pd.concat([many[1], few[1]])
    results = prepare(cells, samples)
    assert len(results.cells) == len(few[0])
    assert (results.cells["samples"] == 50).all()
    assert len(results.samples) == len(many[1])


def test_runs_that_differ_in_dtype_only_stay_apart(run_frames):
    one, two = run_frames(), run_frames()
    other = two[0].assign(cell=two[0]["cell"] + "x", dtype="bfloat16")
    results = prepare(pd.concat([one[0], other]))
    assert results.models == ["reference (float32)", "reference (bfloat16)"]


def test_reports_of_odd_runs_are_written(run_frames, tmp_path):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"], with_full=False)
    text = render(cells, samples, tmp_path / "nofull")[0].read_text()
    assert "There is no full cache to compare with: it was not run" in text
    assert "- `vt`: no statement, because there is no full cache to compare with." in text
    assert "not above chance on" not in text
    assert "There is no full cache to compare with: it was not run" in shown(cells)
    assert "There is no full cache" not in shown(cells.assign(metric="kl")), "a distance from it is known"
    assert "above chance" not in shown(cells)
    every = [(p, b, t) for p in ("snapkv", "full") for b in ("0.2", "full") for t in ("vt", "cwe")]
    cells, samples = run_frames(["snapkv"], ("0.2",), failed=every)
    paths = render(cells, samples, tmp_path / "failed")
    assert [p.name for p in paths] == ["summary.md", "tasks-ruler.csv", "tasks-ruler.tex"]
    assert "None: no compressed cache has a score." in paths[0].read_text()
    assert "failed" in shown(cells)
    cells, samples = run_frames([], (), ["vt"])
    paths = render(cells, samples, tmp_path / "onlyfull")
    assert [p.name for p in paths] == ["summary.md", "scores-vt.csv", "scores-vt.tex"]
    assert "nothing has been run" in shown(cells.iloc[:0])


def test_a_place_that_cannot_be_written_is_one_line(run_frames, tmp_path):
    frames = run_frames(["snapkv"], ("0.2",), ["vt"], samples=5)
    file = tmp_path / "file"
    file.write_text("mine")
    inside = tmp_path / "inside"
    (inside / "figures").mkdir(parents=True)
    (inside / "summary.md").mkdir()
    for place, says in [
        (file, f"cannot write {file}: it is a file, not a folder"),
        (file / "below", f"cannot write {file / 'below'}"),
        (Path("/proc/x"), "cannot write /proc/x"),
        (inside, f"cannot write {inside / 'summary.md'}: Is a directory"),
    ]:
        with pytest.raises(UserError, match=re.escape(says)) as caught:
            render(*frames, place)
        assert "\n" not in str(caught.value)
    assert file.read_text() == "mine"


def test_no_mean_is_shown_where_every_task_is_left_out(run_frames, tmp_path):
    cells, samples = run_frames(chance=0.999)
    for text in (shown(cells), shown(cells, samples)):
        rows = [line.split("│") for line in text.splitlines() if line.startswith("│")]
        assert len(rows) == len(cells) // 2
        assert {(row[4].strip(), row[5].strip()) for row in rows} == {("–", "–")}
    paths = render(cells, samples, tmp_path)
    text = paths[0].read_text()
    assert "- **Mean:** none, because the full cache is not above chance on any task." in text
    assert "Mean of" not in text
    assert not any(p.name.startswith("mean-") for p in paths)
    alone, _ = run_frames(tasks=["vt"], chance=0.999)
    full = alone.loc[alone["policy"] == "full", "score"].iloc[0]
    assert f"{100 * full:.1f}" in shown(alone)
    assert "score°" in shown(alone)


def test_versions_are_told_once_and_as_they_are(run_frames, tmp_path):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"], samples=5)
    odd = "a`b ``c` <b>x</b>\n# h"
    known = {"chat_template": "", "none": None, "torch": "2.13.0+cpu", "x_": odd, "flag": False}
    turned = dict(reversed(list(known.items())))
    texts = [json.dumps(v) for v in (known, turned, {**known, "torch": "2"})]
    cells = pd.concat([cells.assign(cell=cells["cell"] + str(i), versions=t) for i, t in enumerate(texts)])
    samples = pd.concat([samples.assign(cell=samples["cell"] + str(i)) for i in range(len(texts))])
    cells = cells.assign(task_version="1+generated-prose", attention="flash_attention_2")
    text = render(cells, samples, tmp_path)[0].read_text()
    lines = text.split("## Versions\n\n")[1].splitlines()
    tail = "```a`b ``c` <b>x</b>\\n# h```"
    assert lines == [
        f"- flag `false`, torch `2.13.0+cpu`, `x_` {tail}",
        f"- flag `false`, torch `2`, `x_` {tail}",
        "- Tasks: `vt` `1+generated-prose` (data `abababababab`)",
    ]
    assert "cpu, float32, flash_attention_2 attention" in text


def test_data_that_is_not_sized_has_no_length(run_frames, tmp_path):
    own, sized = run_frames(["snapkv"], ("0.2",), ["mine"], group="own"), run_frames(["snapkv"])
    bare = [own[0].assign(length=0, status="error", error="x"), own[1].assign(length=0)]
    text = render(*bare, tmp_path / "own")[0].read_text()
    assert "- Prompt length: natural length\n" in text
    assert "| `mine` | natural length | x |" in text
    assert "failed: snapkv 0.2 context on mine: x" in shown(bare[0])
    both = pd.concat([sized[0], bare[0]])
    text = render(both, pd.concat([sized[1], bare[1]]), tmp_path / "both")[0].read_text()
    assert "- Prompt length: 1024 tokens, natural length\n" in text
    assert "### `own`, natural length" in text
    assert "0 tokens" not in text.replace("1024 tokens", "")


@given(st.text(st.sampled_from("` a\\<*|"), min_size=1, max_size=8))
def test_nothing_breaks_out_of_a_code_span(text):
    shown_as = span(text)
    fence = re.match("`+", shown_as)[0]
    inner = shown_as[len(fence) : -len(fence)]
    # CommonMark: the next run of as many backticks ends the span, wherever it stands.
    assert fence not in re.findall("`+", inner)
    assert inner[:1] != "`"
    assert inner[-1:] != "`"
    if inner[0] == inner[-1] == " " and inner.strip():
        inner = inner[1:-1]
    assert inner == text


def test_numbers_and_names_as_text():
    assert number(0.98765, NumberFormat.POINTS) == "98.8"
    assert number(-0.0001, NumberFormat.POINTS, signed=True) == "0.0"
    assert number(-0.03, NumberFormat.POINTS) == "−3.0"
    assert number(12.3456, NumberFormat.NUMBER) == "12.35"
    assert number(float("nan"), NumberFormat.POINTS) == "–"
    assert interval(-0.06, 0.004, NumberFormat.POINTS, signed=True) == "[−6.0, +0.4]"
    assert interval(-np.inf, np.inf, NumberFormat.NUMBER) == "[−∞, ∞]"
    assert [size(v) for v in (512, 2048, 15_000, 5 * 2**20)] == [
        "512 B",
        "2.00 KiB",
        "14.6 KiB",
        "5.00 MiB",
    ]
    assert plain("a\nb\u202e") == "a\\nb\\u202e"
    assert len(short("x" * 100, 20)) == 20
    assert code("snapkv:window=64") == "`snapkv:window=64`"
    assert not set("|<>*`[") & set(md("|<>*`["))
    assert slug("niah_single_1") == "niah_single_1"
    assert slug("./mine.jsonl") != slug("mine.jsonl")
    assert re.fullmatch(r"[a-z0-9._-]+", slug("../../ETC/pass wd"))


def test_stars_of_bytes_read_have_a_column_of_their_own(run_frames, tmp_path):
    cells, samples = run_frames(["snapkv", "criticalkv"], ("0.1", "0.4"), ["vt", "cwe"])
    for frame, heads in (
        (cells, ["Pareto-optimal"]),
        (reading_few(cells, "criticalkv"), ["Pareto-optimal (held)", "Pareto-optimal (read)"]),
    ):
        render(frame, samples, tmp_path)
        table = pd.read_csv(tmp_path / "tables" / "mean-ruler.csv", keep_default_na=False)
        assert [head for head in table.columns if "areto" in head] == heads
    starred = table[table["Pareto-optimal (read)"] == "★"]
    held = table[table["Pareto-optimal (held)"] == "★"]
    assert ("criticalkv", "0.1") in set(zip(starred["policy"], starred["budget"], strict=True))
    assert ("criticalkv", "0.1") not in set(zip(held["policy"], held["budget"], strict=True))


def test_a_report_that_takes_seconds_names_what_it_does_and_counts(
    run_frames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorder(Silent):
        def __init__(self) -> None:
            self.counts: dict[str, list[int]] = {}

        def start(self, total_units: int, description: str, unit: str = "") -> None:
            self.counts[description] = [0, total_units]

        def advance(self, n: int = 1, seconds_left: float | None = None) -> None:
            self.counts[next(reversed(self.counts))][0] += n

    monkeypatch.setattr(Late, "AFTER", 0.0)
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt", "cwe"], depths=(0, 50), samples=10)
    results, recorder = prepare(cells, samples), Recorder()
    write_report(results, tmp_path, reporter=recorder)
    responses = samples.set_index("sample_id", drop=False)
    write_page(results, lambda ids: responses.loc[list(ids)], tmp_path, reporter=recorder)
    assert recorder.counts == {
        "drawing figures": [3, 3],  # two tasks and their mean
        "drawing heat maps": [2, 2],
        "collecting responses": [20, 20],
    }
