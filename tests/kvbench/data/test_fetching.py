"""The hub's own clients against a hub on this machine: what is fetched, and what is reported."""

from __future__ import annotations

import errno
import gzip
import io
import json
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from kvbench import cli
from kvbench.benchmark import Source
from kvbench.data import hub_cache
from kvbench.data.records import NotFetched, head
from kvbench.data.sources import keep, rows
from kvbench.errors import UserError
from kvbench_tasks.ruler.qa import HOTPOT, SQUAD

from .conftest import command

if TYPE_CHECKING:
    from .conftest import Hub

SHA = "0123456789abcdef0123456789abcdef01234567"

READ = """
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

FRESH = """
from pathlib import Path
from kvbench.data.fetching import fetch
from kvbench.data.sources import Source
for fresh in (False, True):
    print(fetch({source!r}, Path({cache!r}), fresh=fresh).revision)
"""


def read(hub: Hub, cache: Path, *sources: Source, **environment: str) -> list[Any]:
    """The rows of tables, or the errors, as another process gets them."""
    done = hub.python(READ.format(sources=sources, cache=str(cache)), cache, **environment)
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


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


@pytest.mark.slow
def test_every_kind_of_table_is_fetched_and_every_failure_is_one_line(hub: Hub, tmp_path: Path) -> None:
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
    login = "log in with `hf auth login` or set HF_TOKEN"
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
            "UserError: data.zip does not contain x.jsonl",
        ),
        (
            Source("org/raw", file="broken.json"),
            "UserError: cannot read broken.json as json: its list is invalid or incomplete",
        ),
        (
            Source("org/raw", file="list.json", columns=("a", "c")),
            "UserError: org/raw list.json has no column c; it has a, b, when",
        ),
        (
            Source("org/raw", file="none-*.csv"),
            "NotFetched: needs org/raw none-*.csv from the Hugging Face hub: FileNotFoundError: "
            "it has no file none-*.csv; it has broken.json, data.zip, list.json, "
            "more/test/0000.parquet, part-0.csv, part-1.csv, raw.py, two.jsonl.gz",
        ),
        (
            Source("org/raw"),
            "NotFetched: needs the dataset org/raw, which needs a loading script, and kvbench "
            "never runs one; name a raw file of its repository, or of its branch "
            "refs/convert/parquet",
        ),
        (
            Source("org/gated", file="x.jsonl"),
            "NotFetched: needs the dataset org/gated, which is gated: accept its terms on "
            f"{hub.url}/datasets/org/gated, then {login}",
        ),
        (
            Source("org/none"),
            f"NotFetched: needs the dataset org/none, but {hub.url}/datasets/org/none does not "
            f"exist or is private; {login}",
        ),
        (
            Source("org/tables", split="nope"),
            "NotFetched: needs org/tables nope from the Hugging Face hub: ValueError: Unknown "
            "split \"nope\". Should be one of ['validation'].",
        ),
    ]
    sources = [source for source, _ in cases]
    wanted = [want for _, want in cases]
    assert read(hub, tmp_path, *sources) == wanted
    assert sum(request == "HEAD /" for request in hub.requests) == 1
    assert "GET /api/datasets/org/raw/revision/refs%2Fconvert%2Fparquet" in hub.requests
    # From now on the tables do not need the hub; nothing else is left behind.
    fetched = [source for source, want in cases if isinstance(want, list)]
    hub.requests.clear()
    offline = read(hub, tmp_path, *fetched, HF_HUB_OFFLINE="1")
    assert offline == [want for want in wanted if isinstance(want, list)]
    assert hub.requests == []
    for source, want in zip(fetched, offline, strict=True):
        record = head(source, tmp_path)
        assert record is not None
        assert (record.rows, record.revision, record.cached) == (len(want), SHA, True)
    assert {p.suffix for p in (tmp_path / "hub").iterdir()} == {".jsonl"}
    assert len(list((tmp_path / "hub").iterdir())) == len(fetched)


def test_errors_of_this_machine_are_not_blamed_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets.exceptions import DatasetGenerationError

    def download(*_: Any, **options: Any) -> Any:
        try:
            raise cause
        except OSError as error:
            raise DatasetGenerationError("An error occurred while generating") from error

    monkeypatch.setattr("kvbench.data.hub.unreachable", lambda: "")
    monkeypatch.setattr(hub_cache, "download", download)
    cause = OSError(errno.ENOSPC, "No space left on device", "/x/arrow")
    full = r"^cannot store or read the dataset \S+: No space left on device \(/x/arrow\); free"
    with pytest.raises(UserError, match=full):
        rows(SQUAD, tmp_path)
    cause = OSError("the file is cut off")
    with pytest.raises(NotFetched, match=r"Hugging Face hub: OSError: the file is cut off$"):
        rows(SQUAD, tmp_path)


@pytest.mark.slow
def test_a_killed_fetch_and_two_at_once(hub: Hub, tmp_path: Path) -> None:
    content = squad(2000)
    hub.add(SQUAD.dataset, "data/validation-00000-of-00001.parquet", parquet(content))
    hub.stalled.add("data/validation-00000-of-00001.parquet")
    fetch = command("data", "fetch", "qa_1")
    killed = hub.start(fetch, tmp_path)
    while not any("GET" in r and r.endswith(".parquet") for r in hub.requests):
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    assert not (tmp_path / "hub").exists()
    hub.stalled.clear()
    both = [hub.start(fetch, tmp_path) for _ in range(2)]
    for process in both:
        out, error = process.communicate(timeout=120)
        assert (process.returncode, error) == (0, "")
        assert out.startswith("rajpurkar/squad_v2 validation (qa_1): ")
    want = [{name: row[name] for name in SQUAD.columns} for row in content]
    assert read(hub, tmp_path, SQUAD, HF_HUB_OFFLINE="1") == [want]
    assert len(list((tmp_path / "hub").iterdir())) == 1


@pytest.mark.slow
def test_the_newest_commit_is_fetched_on_request(hub: Hub, tmp_path: Path) -> None:
    source = Source("org/raw", file="a.jsonl")
    hub.add("org/raw", "a.jsonl", lines([{"a": 1}]))
    again = FRESH.format(source=source, cache=str(tmp_path))
    assert read(hub, tmp_path, source) == [[{"a": 1}]]
    hub.add("org/raw", "a.jsonl", lines([{"a": 2}]))
    hub.commit = "f" * 40
    assert hub.python(again, tmp_path).stdout.split() == [SHA, hub.commit]
    assert read(hub, tmp_path, source, HF_HUB_OFFLINE="1") == [[{"a": 2}]]
    # Rows that were put in place stay until they are asked for anew.
    keep(source, [{"a": 3}], tmp_path)
    assert hub.python(again, tmp_path).stdout.split() == [hub.commit]
    assert read(hub, tmp_path, source) == [[{"a": 2}]]


@pytest.mark.slow
def test_an_older_commit_is_not_taken_for_the_newest(hub: Hub, tmp_path: Path) -> None:
    """`datasets` falls back on what it has cached, whatever the error."""
    source = Source("org/tables", split="validation")
    hub.add("org/tables", "data/validation.parquet", parquet(squad(3)))
    assert read(hub, tmp_path, source) == [squad(3)]
    hub.commit = "f" * 40
    hub.gated.add("org/tables")
    done = hub.python(FRESH.format(source=source, cache=str(tmp_path)), tmp_path)
    assert done.stdout.splitlines()[:1] == [SHA]
    assert f"`datasets` cannot load commit {hub.commit}" in done.stderr
    assert read(hub, tmp_path, source) == [squad(3)]


# --- the commands ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_fetches_what_is_missing(hub: Hub, tmp_path: Path) -> None:
    hub.add(SQUAD.dataset, "data/validation-00000-of-00001.parquet", parquet(squad(5)))
    hub.add(HOTPOT.dataset, "distractor/validation-00000-of-00001.parquet", parquet(squad(5)))
    hub.gated.add(HOTPOT.dataset)
    done = hub.kvbench("data", "fetch", "qa_2,qa_1", "vt", cache=tmp_path)
    assert done.returncode == 1  # qa_2 is gated, but qa_1 is fetched nevertheless
    name = "rajpurkar/squad_v2 validation (qa_1)"
    what = f"5 rows, {head(SQUAD, tmp_path).bytes} bytes, commit {SHA[:12]}"
    assert done.stdout.splitlines()[-2:] == [f"{name}: fetching", f"{name}: fetched, {what}"]
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvbench: hotpotqa/hotpot_qa distractor validation (qa_2): needs")
    assert "accept its terms" in line
    again = hub.kvbench("data", "fetch", "qa_1,qa_2", cache=tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert again.stdout.startswith(f"{name}: already fetched, {what}\n")
    assert again.stderr == (
        "kvbench: hotpotqa/hotpot_qa distractor validation (qa_2): needs the dataset "
        "hotpotqa/hotpot_qa from the Hugging Face hub, which cannot be reached (ConnectError at "
        "http://127.0.0.1:9)\n"
    )
    assert again.returncode == 1
    # Another cache folder: the hub's own caches are enough.
    found = hub.kvbench("data", "fetch", "qa_1", cache=tmp_path / "new", HF_HUB_OFFLINE="1")
    assert found.stdout == f"{name}: fetching\n{name}: fetched, {what}\n"
    assert found.stderr == ""


def test_verify_and_list_name_what_is_damaged_or_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    assert cli.call(["data", "verify"]) == 0
    assert capsys.readouterr().out == f"all: nothing is fetched into {tmp_path / 'hub'}\n"
    row = {"title": "t", "context": "c", "question": "q", "answers": {"text": ["c"]}}
    path = keep(SQUAD, [row] * 30, tmp_path, revision="c0ffee" * 6)
    assert cli.call(["data", "verify", "qa_1"]) == 0
    name = "rajpurkar/squad_v2 validation (qa_1)"
    size = f"{30 * len(json.dumps(row) + chr(10)) / 1000:.1f} kB"
    intact = f"{name}: intact, 30 rows, {size}, commit c0ffeec0ffee\n"
    assert capsys.readouterr().out == intact
    assert cli.call(["data", "verify", "qa_1", "qa_2"]) == 1
    printed = capsys.readouterr()
    assert printed.out == intact
    assert printed.err == (
        "kvbench: hotpotqa/hotpot_qa distractor validation (qa_2): missing; run `kvbench data fetch qa_2`\n"
    )
    assert cli.call(["data", "list", "qa_1,qa_2"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[1].split() == f"qa_1 rajpurkar/squad_v2 validation c0ffeec0ffee 30 {size}".split()
    assert table[2].split() == "qa_2 hotpotqa/hotpot_qa distractor validation not fetched".split()
    assert cli.call(["data", "list", "qa_1", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts == {
        "leaf": "qa_1",
        "dataset": "rajpurkar/squad_v2",
        "table": "validation",
        "pinned": None,
        "there": True,
        "revision": "c0ffee" * 6,
        "rows": 30,
        "bytes": 30 * len(json.dumps(row) + "\n"),
        "path": str(path),
    }
    path.write_bytes(path.read_bytes()[:-3])
    assert cli.call(["data", "verify"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"kvbench: {name}: {path} is damaged: its content does not match its hash; "
        "run `kvbench data fetch qa_1` to fetch it again\n"
    )


def test_commands_without_anything_to_do_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["data", "fetch", "vt"]) == 0
    assert capsys.readouterr().out == "vt: nothing to fetch\n"
    assert cli.call(["data", "fetch", "ruller"]) == 2
    assert "did you mean ruler, " in capsys.readouterr().err
