"""Reads the result tables of runs as data frames. Home of `kvbench.load`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from kvbench.errors import UserError, nearest
from kvbench.runs.schema import ADDED, CELLS_SCHEMA, COPIED, SAMPLES_SCHEMA, SCHEMA_VERSION
from kvbench.runs.store import CELLS, SAMPLES

REPEATED = tuple(
    "cell task policy budget moment sample_id context_id stop error extra prompt_end".split()
)
"""Columns of texts that many samples share."""


def load(
    paths: str | Path | Iterable[str | Path], columns: Sequence[str] | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the results of one run or several as data frames: cells and samples.

    Args:
        paths: Folders of runs.
        columns: Columns of the samples; None for all. Millions of samples take far less memory
            without `prompt_end`, `target`, `extra` and `response`.

    Raises:
        UserError: A run cannot be read, a column does not exist, or the runs do not fit together.
    """
    return load_frames(paths, columns)


def load_frames(
    paths: str | Path | Iterable[str | Path],
    columns: Sequence[str] | None = None,
    *,
    coded: bool = False,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the result tables of one run or of several.

    If several runs have a cell, it is taken from the run with the most samples of it, and among
    these from the run with the most responses.

    Args:
        paths: Folders of runs.
        columns: Columns of the samples, in this order; None for all.
        coded: Whether texts that samples share are categories: 4 bytes a sample for each column.

    Returns:
        The frames of `cells.parquet` and `samples.parquet`.

    Raises:
        UserError: A folder does not exist, holds no results or those of another version, two runs
            score the same data by different metrics or judges, or a column does not exist.
    """
    folders = [Path(paths)] if isinstance(paths, (str, Path)) else [Path(p) for p in paths]
    if not folders:
        raise UserError("name at least one run, such as results/my_run")
    for name in columns or ():
        if name not in SAMPLES_SCHEMA.names:
            raise UserError(f"samples have no column {name!r}{nearest(name, SAMPLES_SCHEMA.names)}")
    cells = pd.concat(
        [
            _table(folder, CELLS, CELLS_SCHEMA, CELLS_SCHEMA.names).to_pandas().assign(_run=run)
            for run, folder in enumerate(folders)
        ],
        ignore_index=True,
    )
    _one_metric(cells, folders)
    if cells["cell"].duplicated().any():
        cells = _fullest(cells, folders)
    tables = [
        _samples(folder, columns, coded, set(cells.loc[cells["_run"] == run, "cell"]))
        for run, folder in enumerate(folders)
    ]
    table = pa.concat_tables(tables).unify_dictionaries()
    del tables
    samples = table.to_pandas(split_blocks=True, self_destruct=True)
    return cells.drop(columns="_run").reset_index(drop=True), samples


def _fullest(cells: pd.DataFrame, folders: Sequence[Path]) -> pd.DataFrame:
    """Each cell once, from the run that has the most of it."""
    said: dict[tuple[str, int], int] = {}
    for run, folder in enumerate(folders):
        counts = _table(folder, SAMPLES, SAMPLES_SCHEMA, ["cell"])["cell"].value_counts()
        said |= {(str(one["values"]), run): one["counts"].as_py() for one in counts}
    rows = [said.get(key, 0) for key in zip(cells["cell"], cells["_run"], strict=True)]
    order = cells.assign(_said=rows).sort_values(["samples", "_said"], ascending=False)
    return cells.loc[sorted(order.drop_duplicates("cell").index)]


def _one_metric(cells: pd.DataFrame, folders: Sequence[Path]) -> None:
    """Refuse to mix scores of different metrics, usually those of two judges."""
    for (task, _), part in cells.groupby(["task", "data_hash"], sort=False):
        found = part.drop_duplicates("metric")
        if len(found) > 1:
            (a, one), (b, two) = zip(found["metric"][:2], found["_run"][:2], strict=True)
            raise UserError(
                f"{task} is scored by {a} in {folders[one]} and by {b} in {folders[two]}, which "
                "cannot be compared; give one run at a time, or use the same judge for both"
            )


def _samples(folder: Path, columns: Sequence[str] | None, coded: bool, cells: set[str]) -> pa.Table:
    """The samples of some cells of a run."""
    wanted = SAMPLES_SCHEMA.names if columns is None else list(columns)
    read = dict.fromkeys([*wanted, "cell"])
    table = _table(folder, SAMPLES, SAMPLES_SCHEMA, list(read), REPEATED if coded else ())
    if not cells.issuperset(table["cell"].unique().to_pylist()):
        table = table.filter(pc.is_in(table["cell"], pa.array(sorted(cells), pa.string())))
    return table.select(wanted)


def _table(
    folder: Path, name: str, schema: pa.Schema, columns: Sequence[str], coded: Sequence[str] = ()
) -> pa.Table:
    """Columns of a table, those of an older schema included."""
    path = folder / name
    if not path.is_file():
        raise UserError(f"{folder} is not a finished run: {name} is missing")
    try:
        present = pq.read_schema(path).names
        equal = [source for pair in COPIED.values() for source in pair.values()]
        read = [c for c in dict.fromkeys([*columns, *equal, "schema"]) if c in present]
        table = pq.read_table(path, columns=read, read_dictionary=list(coded))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
    version = set(table["schema"].unique().to_pylist()) if "schema" in read else {None}
    for older, added in ADDED.items():
        if version == {older}:
            for column in set(added).intersection(columns).difference(present):
                field = schema.field(column)
                values = pa.array([added[column]] * len(table), field.type)
                table = table.append_column(field, values)
            for column, source in COPIED.get(older, {}).items():
                if column in columns and column not in present:
                    table = table.append_column(schema.field(column), table[source])
            version = {older + 1}
    if not version <= {SCHEMA_VERSION}:
        raise UserError(f"{path} was not written with schema {SCHEMA_VERSION}; run it again")
    if "schema" in columns:
        place = table.schema.get_field_index("schema")
        values = pa.array([SCHEMA_VERSION] * len(table), schema.field("schema").type)
        table = table.set_column(place, "schema", values)
    return table.select(list(columns)).replace_schema_metadata()
