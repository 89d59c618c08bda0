"""The columns of the result tables: every fact about one follows from its declaration."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pytest

from docs import make_results
from kvbench.report.overall import MEMORY
from kvbench.runs import schema
from kvbench.runs.schema import CELL_COLUMNS, SAMPLE_COLUMNS, Response, ResultColumn

ROOT = Path(__file__).parents[3]
KINDS = {"str": pa.types.is_string, "int": pa.types.is_integer, "float": pa.types.is_floating}
KINDS["float | None"] = pa.types.is_floating


def test_a_measured_column_has_the_type_of_its_field() -> None:
    kinds = {entry.name: entry.type for entry in fields(Response)}
    for entry in fields(Response):
        if (column := entry.metadata.get("column")) is not None:
            assert KINDS[str(kinds[entry.name])](column.type), entry.name


def test_every_column_says_what_it_means() -> None:
    for columns in (CELL_COLUMNS, SAMPLE_COLUMNS):
        assert columns[0].meaning and len({column.name for column in columns}) == len(columns)
        assert all(column.name for column in columns)


def test_old_tables_have_a_substitute_for_each_newer_column() -> None:
    for version in range(schema.OLDEST_VERSION, schema.SCHEMA_VERSION):
        for column in schema.missing_columns(version):
            assert column.copy_of or column.substitute is not None, column.name


def test_the_page_is_up_to_date() -> None:
    text = make_results.PAGE.read_text(encoding="utf-8")
    assert make_results.page(text) == text, "run python docs/make_results.py"
    grown = (*CELL_COLUMNS, ResultColumn(pa.float64(), "nats a token", name="kl"))
    assert "| `kl` | nats a token |" in make_results.table(grown, of_samples=False)


NEW_COLUMN = """
from dataclasses import replace
import kvbench.runs.schema as schema
source = open(schema.__file__, encoding="utf-8").read()
line = '    request: str = ""\\n'
assert source.count(line) == 1
new = '    watts: float = field(default=0.0, metadata=_cost(_REAL, "W", **OPTIONS))\\n'
schema.OPTIONS = {"summarised": True, "paged": True}
exec(compile(source.replace(line, new + line), schema.__file__, "exec"), schema.__dict__)

from tests.kvbench.runs import test_results as t
from kvbench.report import overall
from kvbench.report.page import data
from kvbench.runs.schema import CELLS_SCHEMA, Response
from docs import make_results
full = t.cell("full")
answers = t.responses(full, t.FULL)
cells, samples = t.tables(t.task(), [full], [replace(a, watts=3.0) for a in answers])
assert cells.watts[0] == 3.0 and (samples.watts == 3.0).all()
assert "watts" in CELLS_SCHEMA.names and "watts" in overall.MEMORY and "watts" in data._NUMBERS
assert "`watts`" in make_results.page(make_results.PAGE.read_text(encoding="utf-8"))
"""


@pytest.mark.slow
def test_a_new_cost_column_is_one_declaration() -> None:
    """Declaring it reaches both tables, the means, the page and the documentation."""
    done = subprocess.run(
        [sys.executable, "-c", NEW_COLUMN],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["held_entries", "kv_bytes_read"])
def test_means_over_tasks_have_the_memory(name: str) -> None:
    assert name in MEMORY
