"""Files made for a model are found where the page says, and only for the weights they are of."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from kvbench import reference
from kvbench.artifacts import Artifacts, MadeFor, _compared, slug
from kvbench.errors import UserError
from kvbench.named import model_digest


def made_for(path: Path) -> MadeFor:
    content = json.loads((path / "a.json" if path.is_dir() else path).read_text())
    return MadeFor(content["model"], content["revision"])


FILE = Artifacts(
    noun="map",
    option="map",
    shipped=Path("none"),
    folder="maps",
    pattern="{model}.{kind}.json",
    command="make map --of {model} --as {kind}",
    made_for=made_for,
)
FOLDER = dataclasses.replace(FILE, noun="maps", option="maps", pattern="{model}-{kind}", files=("a.json", "b.bin"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["file", "folder"])
def sort(request: pytest.FixtureRequest, tmp_path: Path) -> Artifacts:
    chosen = FILE if request.param == "file" else FOLDER
    return dataclasses.replace(chosen, shipped=tmp_path / "shipped")


def write(sort: Artifacts, path: Path, model: str = "", revision: str = "") -> Path:
    main = path / "a.json" if sort.files else path
    main.parent.mkdir(parents=True, exist_ok=True)
    main.write_text(json.dumps({"model": model, "revision": revision}))
    if sort.files:
        (path / "b.bin").write_bytes(b"1")
    return path


def test_hub_ids_and_folders_have_their_own_names(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "m", tmp_path / "b" / "m"
    one.mkdir(parents=True)
    other.mkdir(parents=True)
    slugs = [slug(m) for m in ("org/name", "org/name-2", str(one), str(other))]
    assert len(set(slugs)) == 4
    assert slugs[0] == "org--name"
    assert slugs[2].startswith("m-")
    assert slug(f"{one}/../m") == slugs[2]
    assert slug("reference") == slug(str(reference.path()))


def test_the_named_goes_before_the_shipped_and_that_before_the_users(
    sort: Artifacts, tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(UserError) as error:
        sort.find("org/name", ("x",))
    assert f"model org/name has no x {sort.noun}; run `make map --of org/name --as x`" in str(error.value)
    assert "\n" not in str(error.value)
    own = write(sort, sort.user_path("org/name", "x"))
    assert cache in own.parents
    assert sort.find("org/name", ("x",)) == own
    shipped = write(sort, sort.shipped / sort.pattern.format(model="name", kind="x"), "org/name")
    assert sort.find("org/name", ("x",)) == shipped
    assert sort.locate(shipped.name) == shipped
    with pytest.raises(UserError, match="has no x"):  # of the same name, by someone else
        sort.find("other/name", ("x",))
    named = write(sort, tmp_path / "mine")
    assert sort.find("org/name", ("x",), str(named)) == named


def test_the_first_kind_that_there_is_is_taken(sort: Artifacts) -> None:
    second = write(sort, sort.user_path("org/name", "second"))
    assert sort.find("org/name", ("first", "second")) == second
    first = write(sort, sort.user_path("org/name", "first"))
    assert sort.find("org/name", ("first", "second")) == first
    with pytest.raises(UserError, match=f"has no {sort.noun}; run `make map --of a/b --as first`"):
        sort.find("a/b", ("first", "second"))


def test_what_is_named_and_not_there_is_said_in_one_line(sort: Artifacts, tmp_path: Path) -> None:
    what = "folder" if sort.files else "file"
    with pytest.raises(UserError, match=f"{sort.option}=.*none: no such {what}"):
        sort.find("org/name", ("x",), str(tmp_path / "none"))
    if sort.files:
        with pytest.raises(UserError, match=r"no a\.json in that folder"):
            sort.locate(str(tmp_path))
        file = write(sort, tmp_path / "mine") / "b.bin"
        with pytest.raises(UserError, match=r"is a file; name the folder that holds a\.json"):
            sort.locate(str(file))


def test_the_users_own_of_other_weights_is_refused(sort: Artifacts, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    digest = model_digest(str(folder))
    path = write(sort, sort.user_path(str(folder), "x"), revision=digest)
    assert sort.find(str(folder), ("x",)) == path
    (folder / "config.json").write_text('{"other": 1}')
    _compared.cache_clear()  # a new process
    with pytest.raises(UserError, match=r"for other weights of .*; run `make map .* again") as e:
        sort.find(str(folder), ("x",))
    assert "\n" not in str(e.value)
    assert sort.find(str(folder), ("x",), str(path)) == path


def test_a_copy_of_the_reference_model_has_what_ships_for_it(sort: Artifacts, tmp_path: Path) -> None:
    folder = tmp_path / reference.NAME
    shutil.copytree(reference.path(), folder)
    name = sort.pattern.format(model=reference.NAME, kind="x")
    shipped = write(sort, sort.shipped / name, reference.NAME, model_digest("reference"))
    assert sort.find(str(folder), ("x",)) == sort.find("reference", ("x",)) == shipped
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0}))
    _compared.cache_clear()
    with pytest.raises(UserError, match=f"has no x {sort.noun}"):
        sort.find(str(folder), ("x",))
    assert sort.find("reference", ("x",)) == shipped


def test_the_digest_is_that_of_the_content(sort: Artifacts, tmp_path: Path) -> None:
    one, two = write(sort, tmp_path / "one"), write(sort, tmp_path / "two")
    assert len(sort.digest(one)) == 16
    assert sort.digest(one) == sort.digest(two)
    write(sort, two, model="m")
    assert sort.digest(one) != sort.digest(two)
    if sort.files:
        write(sort, two)
        (two / "b.bin").write_bytes(b"2")
        assert sort.digest(one) != sort.digest(two)
    with pytest.raises(UserError, match="cannot read"):
        sort.digest(tmp_path / "none")
