"""The hub's own clients against an endpoint on this machine: what is loaded, and what is said."""

from __future__ import annotations

import errno
import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from kvbench.benchmark import Source
from kvbench.data import fetching
from kvbench.data.sources import NotFetched, head, rows
from kvbench.errors import UserError
from kvbench_tasks.tables import HOTPOT, SQUAD

if TYPE_CHECKING:
    from .conftest import Hub

SHA = "0123456789abcdef0123456789abcdef01234567"

TRY = """
import json
from pathlib import Path
from kvbench.data import sources
from kvbench.data.sources import Source
from kvbench.errors import UserError
for source in {sources!r}:
    try:
        print(json.dumps(sources.rows(source, Path({cache!r}))))
    except UserError as error:
        print(json.dumps(f"{{type(error).__name__}}: {{error}}"))
"""


def parquet(content: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pa.parquet.write_table(pa.Table.from_pylist(content), out)
    return out.getvalue()


def lines(content: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content).encode()


def squad(n: int) -> list[dict[str, Any]]:
    """Rows with the fields of rajpurkar/squad_v2's card."""
    return [
        {
            "id": str(i),
            "title": "Houses",
            "context": f"House {i} is red.\u2028",
            "question": f"What colour is house {i}?",
            "answers": {"text": ["red"], "answer_start": [12]},
        }
        for i in range(n)
    ]


def test_every_kind_of_table_is_loaded_and_every_failure_is_one_line(
    hub: Hub, tmp_path: Path
) -> None:
    small = [{"a": 1, "b": "ü\u2028", "when": None}, {"a": 2, "b": "", "when": None}]
    hub.add("org/tables", "data/validation-00000-of-00001.parquet", parquet(squad(3)))
    hub.add("org/raw", "raw.py", b"1 / 0")
    hub.add("org/raw", "two.jsonl.gz", gzip.compress(lines(small)))
    hub.add("org/raw", "list.json", json.dumps(small).encode())
    hub.add("org/raw", "broken.json", json.dumps(small).encode()[:-5])
    hub.add("org/raw", "part-0.csv", b'a,b\n1,"x\ny"\n')
    hub.add("org/raw", "part-1.csv", b"a,b\n2,z\n")
    hub.add("org/raw", "more/test/0000.parquet", parquet(small))
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data/in.jsonl", lines(small))
    hub.add("org/raw", "data.zip", archive.getvalue())
    hub.add("org/gated", "x.jsonl", lines(small))
    hub.gated.add("org/gated")
    login = "log in with `hf auth login`, or set HF_TOKEN"
    cases: list[tuple[Source, Any]] = [
        (Source("org/tables", split="validation"), squad(3)),
        (
            Source("org/tables", split="validation", columns=("id",)),
            [{"id": "0"}, {"id": "1"}, {"id": "2"}],
        ),
        (Source("org/raw", file="two.jsonl.gz"), small),
        (Source("org/raw", file="list.json", columns=("b",)), [{"b": "ü\u2028"}, {"b": ""}]),
        (
            Source("org/raw", file="part-*.csv"),
            [{"a": "1", "b": "x\ny"}, {"a": "2", "b": "z"}],
        ),
        (
            Source("org/raw", file="more/test/*.parquet", revision="refs/convert/parquet"),
            small,
        ),
        (Source("org/raw", file="data.zip:data/in.jsonl"), small),
        (
            Source("org/raw", file="data.zip:x.jsonl"),
            "UserError: data.zip has no x.jsonl; it has data/in.jsonl",
        ),
        (
            Source("org/raw", file="broken.json"),
            "UserError: broken.json is no json that can be read: it ends in the middle of its list",
        ),
        (
            Source("org/raw", file="list.json", columns=("a", "c")),
            "UserError: org/raw list.json has no field c; it has a, b, when",
        ),
        (
            Source("org/raw", file="none-*.csv"),
            "NotFetched: needs org/raw none-*.csv from the Hugging Face hub: FileNotFoundError: "
            "no file none-*.csv in it; it has broken.json, data.zip, list.json, "
            "more/test/0000.parquet, part-0.csv, part-1.csv, raw.py, two.jsonl.gz",
        ),
        (
            Source("org/raw"),
            "NotFetched: needs the dataset org/raw, whose repository holds a loading script, which "
            "is never run; a raw file of it, or of its branch refs/convert/parquet, would be right",
        ),
        (
            Source("org/gated", file="x.jsonl"),
            "NotFetched: needs the dataset org/gated, which is gated: accept its terms on "
            f"{hub.url}/datasets/org/gated, then {login}",
        ),
        (
            Source("org/none"),
            "NotFetched: needs the dataset org/none, which the hub does not show: there is no "
            f"{hub.url}/datasets/org/none, or it is private, and then {login}",
        ),
        (
            Source("org/tables", split="nope"),
            "NotFetched: needs org/tables nope from the Hugging Face hub: ValueError: Unknown "
            "split \"nope\". Should be one of ['validation'].",
        ),
    ]
    asked = [source for source, _ in cases]
    done = hub.python(TRY.format(sources=asked, cache=str(tmp_path)), tmp_path)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [want for _, want in cases]
    # The copies do without the hub, at the commit that was fetched; nothing else is left behind.
    for source, want in cases:
        if isinstance(want, list):
            assert rows(source, tmp_path) == want
            found = head(source, tmp_path)
            assert found is not None
            assert (found.rows, found.revision) == (len(want), SHA)
    left = {p.suffix for p in (tmp_path / "hub").iterdir()}
    assert left == {".jsonl", ".lock"}
    assert sum(ask == "HEAD /" for ask in hub.asked) == 1
    assert "GET /api/datasets/org/raw/revision/refs%2Fconvert%2Fparquet" in hub.asked


def test_what_this_machine_cannot_hold_is_not_the_hubs_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets.exceptions import DatasetGenerationError

    def load_dataset(*_: Any, **options: Any) -> Any:
        try:
            raise cause
        except OSError as error:
            raise DatasetGenerationError("An error occurred while generating") from error

    monkeypatch.setattr(fetching, "unreachable", lambda: "")
    monkeypatch.setattr(fetching, "_commit", lambda source: SHA)
    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    cause = OSError(errno.ENOSPC, "No space left on device", "/x/arrow")
    with pytest.raises(UserError, match=r"cannot be kept: No space left on device \(/x/arrow\); "):
        rows(SQUAD, tmp_path)
    cause = OSError("the file is cut off")
    with pytest.raises(NotFetched, match=r"Hugging Face hub: OSError: the file is cut off$"):
        rows(SQUAD, tmp_path)


def test_the_command_fetches_what_is_missing_and_says_what_is_there(
    hub: Hub, tmp_path: Path
) -> None:
    hub.add(SQUAD.dataset, "data/validation-00000-of-00001.parquet", parquet(squad(5)))
    hub.add(HOTPOT.dataset, "distractor/validation-00000-of-00001.parquet", parquet(squad(5)))
    hub.gated.add(HOTPOT.dataset)
    done = hub.kvbench("data", "fetch", "qa_2,qa_1", "vt", cache=tmp_path)
    assert done.returncode == 1  # qa_2 is gated, and qa_1 comes all the same
    name = "rajpurkar/squad_v2 validation (qa_1)"
    size = head(SQUAD, tmp_path)
    assert size is not None
    what = f"5 rows, {size.bytes / 1000:.1f} kB, commit {SHA[:12]}"
    assert done.stdout.splitlines()[-2:] == [f"{name}: fetching", f"{name}: fetched, {what}"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvbench: hotpotqa/hotpot_qa distractor validation (qa_2): needs")
    assert "accept its terms" in line
    assert rows(SQUAD, tmp_path)[4]["question"] == "What colour is house 4?"
    offline = hub.kvbench("data", "fetch", "qa_1,qa_2", cache=tmp_path, HF_HUB_OFFLINE="1")
    assert (
        offline.stdout
        == f"{name}: is there, 5 rows, {size.bytes / 1000:.1f} kB, commit {SHA[:12]}\n"
    )
    assert offline.stderr == (
        "kvbench: the Hugging Face hub is not asked: HF_HUB_OFFLINE is set; not fetched: "
        "hotpotqa/hotpot_qa distractor validation (qa_2)\n"
    )
    assert offline.returncode == 1
