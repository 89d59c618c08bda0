"""The list of runs as a file: which runs it links to, and what it says of folders that are none."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbench.errors import UserError
from kvbench.progress import Silent
from kvbench.runs.file_names import CELLS, SAMPLES
from kvbench.runs.integrity import with_record
from kvbench.viewer.runs_page import write_runs_page

from ..leaderboard.conftest import save_run
from ..report.conftest import make_run
from ..report.page.conftest import HOSTILE, data_of


def save(folder: Path, **options: Any) -> Path:
    """A small finished run."""
    given: dict[str, Any] = {"policies": ["snapkv"], "budgets": ("0.2",), "tasks": ["vt"], "samples": 4} | options
    run = save_run(folder, make_run(**given), models=[given.get("model", "reference")])
    for age, name in enumerate((CELLS, "grid.yaml"), start=1):
        os.utime(run / name, (1_700_000_000 - age, 1_700_000_000 - age))
    return run


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two finished runs, and folders that are none."""
    folder = tmp_path / "results"
    save(folder / "one")
    save(folder / "deep" / "two", model="smollm2", tasks=["cwe"])
    damaged = save(folder / "damaged")
    (damaged / SAMPLES).write_bytes(b"PAR1 and nothing more")
    old = save(folder / "old")
    cells = pq.read_table(old / CELLS)
    schema = cells.schema.get_field_index("schema")
    ancient = cells.set_column(schema, "schema", pa.array([0] * len(cells), pa.int32()))
    pq.write_table(with_record(ancient, old, {}), old / CELLS)
    (folder / "begun").mkdir()
    (folder / "begun" / "grid.yaml").write_text("policies: [h2o]\n")
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("no folder")
    return folder


def runs_of(page: Path) -> dict[str, dict[str, Any]]:
    return {run["path"]: run for run in data_of(page)["runs"]}


def test_every_run_is_listed_and_those_with_results_have_a_page(results: Path) -> None:
    page, problems = write_runs_page(results, Silent())
    assert page == results / "index.html"
    runs = runs_of(page)
    assert set(runs) == {"one", "deep/two", "damaged", "old", "begun"}
    linked = {path: run["link"] for path, run in runs.items() if run["link"]}
    assert linked == {name: f"./{name}/report/report.html" for name in ("one", "deep/two")}
    assert all((results / link).is_file() for link in linked.values())
    assert (runs["deep/two"]["models"], runs["deep/two"]["tasks"]) == (["smollm2"], ["cwe"])
    assert (runs["one"]["ok"], runs["one"]["failed"], runs["one"]["problem"]) == (2, 0, "")
    for name, reason in (("damaged", SAMPLES), ("old", "run it again"), ("begun", "cells.parquet is missing")):
        assert reason in runs[name]["problem"]
        assert sum(str(results / name) in line and reason in line for line in problems) == 1
    assert data_of(page)["without"] == ["empty"]
    assert problems[-1] == f"no run in {results / 'empty'}"
    assert all("\n" not in line for line in problems)


def test_pages_are_written_once_and_the_list_is_the_same_again(results: Path) -> None:
    page, _ = write_runs_page(results, Silent())
    before = page.read_bytes()
    run_page = results / "one" / "report" / "report.html"
    run_page.write_text("mine")
    assert write_runs_page(results, Silent())[0].read_bytes() == before
    assert run_page.read_text() == "mine"


def test_another_folder_holds_all_pages(results: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "site", results / "site"):
        page, problems = write_runs_page(results, Silent(), None, out)
        runs = runs_of(page)
        assert runs["deep/two"]["link"] == "./deep/two/report.html" and (out / "deep/two/report.html").is_file()
        assert not (results / "one" / "report").exists()
        assert data_of(page)["without"] == ["empty"] and len(problems) == 4


@pytest.mark.parametrize(
    "name", ["javascript:alert(1)", "a b#c?d%2f&<b>", '"><script>', HOSTILE[5].replace("/", "\\").replace("\0", "")]
)
def test_a_link_leads_to_the_run_whatever_its_name_is(tmp_path: Path, name: str) -> None:
    save(tmp_path / name)
    page, _ = write_runs_page(tmp_path, Silent())
    (run,) = data_of(page)["runs"]
    assert re.fullmatch(r"\./[A-Za-z0-9_.~%/-]+", run["link"])
    assert (tmp_path / os.fsdecode(unquote(urlsplit(run["link"]).path))).is_file()
    assert (
        "<script>" not in run["path"]
        or "<script>" not in page.read_text().partition('id="data"')[2].partition("</script>")[0]
    )


def test_names_of_a_grid_are_data(tmp_path: Path) -> None:
    save_run(
        tmp_path / "run", make_run(["snapkv"], ("0.2",), ["vt"], samples=4), models=[HOSTILE[0]], policies=list(HOSTILE)
    )
    page, _ = write_runs_page(tmp_path, Silent())
    text = page.read_text()
    assert text.count("<script") == 2 and not set("\x1b\u202e\u2066\u2028") & set(text)
    assert "globalThis.hacked" in text


def test_our_script_makes_no_markup_of_text() -> None:
    script = (resources.files("kvbench.viewer") / "runs.js").read_text()
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|fetch\("
    assert not re.search(ways, script)


def test_a_folder_without_runs_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run in .*name the folder of a run"):
        write_runs_page(tmp_path, Silent())
    with pytest.raises(UserError, match="is not a folder"):
        write_runs_page(tmp_path / "nothing", Silent())
