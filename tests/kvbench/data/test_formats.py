"""Raw files as rows: every format, and the JSON list that is read piece by piece."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.data.formats import file_rows, json_rows, split_member
from kvbench.errors import UserError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(
    content=st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=5),
    indent=st.sampled_from([None, 0, 3]),
    chunk=st.integers(1, 40),
    end=st.sampled_from(["", "\n", " \t\n"]),
)
def test_a_json_list_is_read_in_pieces(content: list[dict[str, Any]], indent: int | None, chunk: int, end: str) -> None:
    text = "\n " + json.dumps(content, indent=indent, ensure_ascii=False) + end
    assert list(json_rows(io.StringIO(text), chunk)) == content
    if content:
        assert list(json_rows(io.StringIO(json.dumps(content[0]) + end), chunk)) == content[:1]


@pytest.mark.parametrize("text", ["", "3", '"x"', "[", "[1]", '[{"a": 1}', '[{"a": 1},]', '[{"a": 1}] {}', "[{} {}]"])
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_what_is_not_a_json_list_of_objects_is_an_error(text: str, chunk: int) -> None:
    with pytest.raises(ValueError, match=r"list|object|JSON|Expecting|Extra|row"):
        list(json_rows(io.StringIO(text), chunk))


def test_a_member_is_named_after_its_archive() -> None:
    assert split_member("a/data.zip:b/x.jsonl") == ("a/data.zip", "b/x.jsonl")
    assert split_member("a/x.jsonl.gz") == ("a/x.jsonl.gz", "")


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_json_that_is_nested_deeply_is_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("[" * 100_000)
    with pytest.raises(UserError, match=rf"^cannot read {name} as \w+: it is nested too deeply"):
        list(file_rows(path))


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.parquet", "x.jsonl", "x.zip", "x.csv"])
def test_a_file_that_does_not_match_its_name_is_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x1f\x8b\x08\x00\xff\xff\n")
    member = "y.jsonl" if name == "x.zip" else ""
    with pytest.raises(UserError, match=r"^cannot read [xy]\.\w+(\.gz)? as \w+: |^cannot read x\.zip"):
        list(file_rows(path, member))
    with pytest.raises(UserError, match=r"^cannot read x\.txt: use jsonl, json, csv, "):
        list(file_rows(tmp_path / "x.txt"))
