"""Publications: a run's tables without texts, in a folder that its digest identifies.

`publication.json` lists the other files with their SHA-256, and holds a digest of itself. The tables have the schemas
of a run, so everything that reads a run reads a publication; prompts, responses and reference answers are left out.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from kvbench.errors import UserError
from kvbench.files import cannot, digest_of, file_digests, replacing_folder
from kvbench.report.frames import prepare, uncompared
from kvbench.report.remarks import remarks
from kvbench.report.sorted_samples import COLUMNS
from kvbench.runs.command import command_line, portable_options
from kvbench.runs.file_names import CELLS, GRID, METRICS, RESPONSES, SAMPLES
from kvbench.runs.folders import short_names, summarise
from kvbench.runs.integrity import checked_cells, recorded_hardware, unreadable, with_record
from kvbench.runs.load import load_frames
from kvbench.runs.schema import TEXTS
from kvbench.runs.yaml_loader import Loader, read_text
from kvbench.tables.outputs import plain_text

MANIFEST = "publication.json"
_FILES = (CELLS, SAMPLES, METRICS, GRID)
_SHORT_DIGEST = 8
_LONGEST_LABEL = 32
"""Length of a text in `extra` up to which it is a label such as a domain, if it is a single word."""
_COMPRESSION: dict[str, Any] = {"compression": "zstd", "compression_level": 9, "write_page_checksum": True}


@dataclass(frozen=True)
class Publication:
    """A published run.

    Attributes:
        folder: Its folder.
        digest: 16 hex digits over its contents.
        command: Command that repeats the run.
        hardware: The machine, as recorded or as whoever published the run describes it; "" if unknown.
        kvbench: Version of kvbench that published it.
        remarks: What to know before comparing its scores.
        grid: The grid, by field of `kvbench.runs.options.GridOptions`.
        files: Names of the files that the digest covers; a report may be written beside them.
    """

    folder: Path
    digest: str
    command: str
    hardware: str
    kvbench: str
    remarks: tuple[str, ...]
    grid: Mapping[str, Any]
    files: tuple[str, ...]

    @property
    def short_digest(self) -> str:
        """Return the digits of the digest that are shown and part of the folder's name."""
        return self.digest[:_SHORT_DIGEST]

    @property
    def byte_count(self) -> int:
        """Return the size of the files."""
        return sum((self.folder / file_name).stat().st_size for file_name in self.files)


def publish(run_folder: Path, parent_folder: Path, hardware: str = "") -> Publication:
    """Write a run as a publication; the same results give the same digest.

    Args:
        run_folder: Folder of the run.
        parent_folder: Folder in which the publication is created, named after model, tasks and digest.
        hardware: Description of the machine, such as "NVIDIA H200"; "" for what the run recorded.

    Raises:
        UserError: The run is unfinished or damaged, has no score or no full cache, or the folder cannot be written.
    """
    cells = checked_cells(run_folder)
    grid_values = portable_options(_grid(run_folder))
    _check_finished(run_folder)
    published_remarks = _remarks(run_folder)
    try:
        with TemporaryDirectory(prefix="kvbench-publication-") as scratch_name:
            scratch_folder = Path(scratch_name)
            (scratch_folder / GRID).write_text(yaml.safe_dump(grid_values, sort_keys=False), encoding="utf-8")
            _write_tables(run_folder, scratch_folder, cells)  # after the grid, as in a finished run
            file_names = [file_name for file_name in _FILES if (scratch_folder / file_name).exists()]
            contents = {
                "kvbench": version("kvbench"),
                "command": command_line(grid_values),
                "hardware": hardware or ", ".join(recorded_hardware(run_folder)),
                "remarks": published_remarks,
                "files": dict(zip(file_names, file_digests(map(scratch_folder.joinpath, file_names)), strict=True)),
            }
            digest = digest_of(contents)
            manifest_text = json.dumps({"digest": digest, **contents}, indent=2, ensure_ascii=False) + "\n"
            (scratch_folder / MANIFEST).write_text(manifest_text, encoding="utf-8")
            folder = parent_folder / _folder_name(cells, digest)
            with replacing_folder(folder) as partial_folder:
                shutil.copytree(scratch_folder, partial_folder, dirs_exist_ok=True)
    except OSError as error:
        raise cannot("write", error.filename or parent_folder, error) from None
    return load_publication(folder)


def load_publication(folder: Path) -> Publication:
    """Read a publication after comparing every file with its digest.

    Raises:
        UserError: The folder is not a publication, or a file is missing or differs; the message names it.
    """
    manifest_path = folder / MANIFEST
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        contents = {name: value for name, value in manifest.items() if name != "digest"}
        known_digests = dict(contents["files"])
        known_digest, remark_texts = str(manifest["digest"]), tuple(map(str, contents["remarks"]))
        text_fields = {name: str(contents[name]) for name in ("command", "hardware", "kvbench")}
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{folder} is not a published run: {MANIFEST} is missing; `kvbench publish RUN` writes one"
        ) from None
    except OSError as error:
        raise cannot("read", manifest_path, error) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{manifest_path} is damaged; get the folder again") from None
    if digest_of(contents) != known_digest:
        raise _changed(manifest_path)
    if not {CELLS, SAMPLES, GRID} <= set(known_digests) <= set(_FILES):
        raise UserError(f"{manifest_path} does not list the files of a run; get the folder again")
    for file_name in known_digests:
        try:
            (file_digest,) = file_digests([folder / file_name])
        except FileNotFoundError:
            raise UserError(f"{folder / file_name} is missing; get the folder again") from None
        except OSError as error:
            raise cannot("read", folder / file_name, error) from None
        if file_digest != known_digests[file_name]:
            raise _changed(folder / file_name)
    return Publication(
        folder,
        known_digest,
        **text_fields,
        remarks=remark_texts,
        grid=_grid(folder),
        files=(MANIFEST, *known_digests),
    )


def find_publications(paths: Iterable[Path]) -> list[Publication]:
    """Load the publications in folders and their subfolders, once each.

    Raises:
        UserError: A folder does not exist or holds none, or a publication is damaged.
    """
    publications: dict[str, Publication] = {}
    for path in paths:
        folders = sorted(_publication_folders(path))
        if not folders:
            raise UserError(f"{path} holds no published run; `kvbench publish RUN --out {path}` writes one")
        for folder in folders:
            publication = load_publication(folder)
            publications.setdefault(publication.digest, publication)
    return list(publications.values())


def _publication_folders(root: Path) -> Iterator[Path]:
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; name one that holds published runs")
    for folder_name, subfolder_names, file_names in os.walk(root):
        subfolder_names[:] = [name for name in subfolder_names if not name.startswith(".")]
        if MANIFEST in file_names:
            subfolder_names.clear()
            yield Path(folder_name)


def _changed(path: Path) -> UserError:
    return UserError(f"{path} differs from what was published: its digest is another one; get the folder again")


def _folder_name(cells: pa.Table, digest: str) -> str:
    names = [short_names(cells[column].to_pylist()) for column in ("model", "task")]
    return "-".join([*names, digest[:_SHORT_DIGEST]])


def _grid(folder: Path) -> dict[str, Any]:
    """Read the values of a run's grid, without the checks that a run makes.

    Raises:
        UserError: There is none, so that nobody could repeat the run.
    """
    try:
        grid_values = yaml.load(read_text(folder / GRID), Loader)
    except FileNotFoundError:
        raise UserError(f"{folder} has no {GRID}, which says how to repeat the run; restore it") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise unreadable(folder / GRID, error) from None
    if not isinstance(grid_values, dict):
        raise UserError(f"{folder / GRID} is not a grid; restore it")
    return grid_values


def _check_finished(run_folder: Path) -> None:
    """Refuse a run that still goes on, or that stopped after its tables were written."""
    # Without responses, as in a checkout of our repository, the times of the files mean nothing.
    state = summarise(run_folder).state if (run_folder / RESPONSES).exists() else ""
    if state == "running":
        raise UserError(f"{run_folder} is still running; publish it when it has finished")
    if state == "stopped":
        raise UserError(f"{run_folder} was stopped before its tables were complete; run the same command again")


def _remarks(run_folder: Path) -> list[str]:
    """Return the remarks of a run's report, which need its responses, and the number of failed cells.

    Raises:
        UserError: The run has no score, or no full cache to compare with.
    """
    cells, samples = load_frames(run_folder, COLUMNS, coded=True)
    failed_count = int((cells["status"] != "ok").sum())
    if failed_count == len(cells):
        raise UserError(f"{run_folder} has no score to publish: every cell failed")
    if set(uncompared(cells)) >= set(cells["task"]):
        raise UserError(
            f"{run_folder} has no score of the full cache, so nothing says what its scores mean; "
            "run the same command again without --no-full"
        )
    failed_remark = [f"{failed_count} of {len(cells)} cells failed."] if failed_count else []
    return [*failed_remark, *map(plain_text, remarks(prepare(cells, samples)))]


def _write_tables(run_folder: Path, folder: Path, cells: pa.Table) -> None:
    """Write the tables of a run without the texts of its samples."""
    with pq.ParquetFile(run_folder / SAMPLES, page_checksum_verification=True) as samples_file:
        text_names = [column.name for column in TEXTS]
        names = [name for name in samples_file.schema_arrow.names if name not in text_names]
        schema = pa.schema([samples_file.schema_arrow.field(name) for name in names])
        with pq.ParquetWriter(folder / SAMPLES, schema, **_COMPRESSION) as writer:
            for group_index in range(samples_file.num_row_groups):
                writer.write_table(_with_labels(samples_file.read_row_group(group_index, names)).cast(schema))
    if (run_folder / METRICS).exists():
        shutil.copyfile(run_folder / METRICS, folder / METRICS)
    pq.write_table(with_record(cells, folder, {}), folder / CELLS, **_COMPRESSION)


def _with_labels(samples: pa.Table) -> pa.Table:
    """Reduce `extra` to numbers and labels, because a task may describe a question by a sentence of its context."""
    encoded = samples["extra"].combine_chunks().dictionary_encode()
    labels = pa.array([_labels(text) for text in encoded.dictionary.to_pylist()], pa.string())
    column = pc.take(labels, encoded.indices)
    return samples.set_column(samples.schema.get_field_index("extra"), "extra", column)


def _labels(extra_json: str) -> str:
    def is_label(value: object) -> bool:
        is_word = isinstance(value, str) and len(value) <= _LONGEST_LABEL and len(value.split()) < 2
        return is_word or isinstance(value, (bool, int, float))

    extra: Mapping[str, Any] = json.loads(extra_json or "{}")
    return json.dumps({name: value for name, value in extra.items() if is_label(value)}, sort_keys=True)
