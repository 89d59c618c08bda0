from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench import registry
from kvbench.benchmark import Benchmark
from kvbench.errors import UserError
from kvbench.harness import catalogue

Installer = Callable[[str, str, str], None]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    registry._entries.cache_clear()
    yield
    registry._entries.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    """Install a package of one module with entry points, as pip would."""

    def put(package: str, code: str, entries: str) -> None:
        site = tmp_path / package
        info = site / f"{package}-2.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{package}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.0\n")
        (info / "entry_points.txt").write_text(entries)
        monkeypatch.syspath_prepend(str(site))
        registry._entries.cache_clear()

    return put


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write `my_policy.py` into the current folder and name it."""
    monkeypatch.chdir(tmp_path)

    def write(code: str) -> str:
        (tmp_path / "my_policy.py").write_text(code)
        return "./my_policy.py"

    return write


# --- installed packages ---------------------------------------------------------------------------


def test_a_third_partys_name_is_found_and_loaded(install: Installer) -> None:
    install("theirs_a", "MINE = 41 + 1", "[kvbench.policies]\ntheir_policy = theirs_a:MINE\n")
    assert "their_policy" in registry.names(registry.POLICIES)
    assert registry.get(registry.POLICIES, "their_policy") == 42
    assert registry.origin(registry.POLICIES, "their_policy") == "theirs_a==2.0"


def test_code_that_can_change_under_its_version_is_part_of_the_origin(install: Installer, tmp_path: Path) -> None:
    entries = "[kvbench.policies]\nedited_{} = {}:mine\n"
    for package in ("fixed_pack", "edited_pack"):
        install(package, "mine = 1\n", entries.format(package, package))
    for package, is_editable in (("fixed_pack", False), ("edited_pack", True)):
        info = tmp_path / package / f"{package}-2.0.dist-info"
        (info / "direct_url.json").write_text(json.dumps({"url": "file:///x", "dir_info": {"editable": is_editable}}))
    assert registry.origin(registry.POLICIES, "edited_fixed_pack") == "fixed_pack==2.0"
    before = registry.origin(registry.POLICIES, "edited_edited_pack")
    assert before == "edited_pack==2.0 " + hashlib.sha256(b"mine = 1\n").hexdigest()[:16]
    (tmp_path / "edited_pack" / "edited_pack.py").write_text("mine = 2\n")
    assert registry.origin(registry.POLICIES, "edited_edited_pack") != before
    assert " " not in registry.origin(registry.POLICIES, "snapkv"), "kvbench's own cells keep their hashes"


def test_names_are_sorted_and_apart_by_group(install: Installer) -> None:
    install("theirs_b", "A = 1", "[kvbench.parts]\nscore.zz = theirs_b:A\nscore.aa = theirs_b:A\n")
    found = registry.names(registry.PARTS)
    assert found == sorted(found)
    assert {"score.aa", "score.zz"} <= set(found)
    assert "score.aa" not in registry.names(registry.POLICIES)


def test_an_unknown_name_gives_the_nearest(install: Installer) -> None:
    install("theirs_c", "A = 1", "[kvbench.policies]\nzebra_cache = theirs_c:A\n")
    with pytest.raises(UserError, match=r"unknown policy 'zebra_cash'; did you mean zebra_cache"):
        registry.get(registry.POLICIES, "zebra_cash")
    with pytest.raises(UserError, match=r"\(kvbench list policies shows all\)"):
        registry.get(registry.POLICIES, "@")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere"),
        ("raise RuntimeError('one\\ntwo')", "RuntimeError: one"),
        ("def broken(:", "SyntaxError"),
        ("B = 1", "AttributeError"),
    ],
)
def test_a_broken_package_is_named_in_one_line_and_breaks_no_other(install: Installer, code: str, says: str) -> None:
    name = f"theirs_{abs(hash(code))}"
    install(name, code, f"[kvbench.tasks]\nbroken_group = {name}:A\n")
    with pytest.raises(UserError, match=says) as caught:
        registry.get(registry.TASKS, "broken_group")
    assert f"package {name}==2.0" in str(caught.value)
    assert "\n" not in str(caught.value)
    _, failed = catalogue.benchmarks()
    assert any("broken_group" in line for line in failed)
    with pytest.raises(UserError, match=r"unknown task 'no_such_task'.*broken_group"):
        catalogue.resolve_task("no_such_task")


def test_a_name_claimed_by_two_packages_is_refused(install: Installer) -> None:
    install("theirs_d", "A = 1", "[kvbench.policies]\nshared_name = theirs_d:A\n")
    install("theirs_e", "A = 1", "[kvbench.policies]\nshared_name = theirs_e:A\n")
    with pytest.raises(UserError, match=r"two packages: theirs_., .*theirs_|two packages") as caught:
        registry.get(registry.POLICIES, "shared_name")
    assert "theirs_d==2.0" in str(caught.value)
    assert "theirs_e==2.0" in str(caught.value)


# --- tasks ----------------------------------------------------------------------------------------


def benchmark(name: str, *leaves: str) -> Benchmark:
    return Benchmark(name=name, leaves=leaves, docs=lambda *a, **k: [], yaml=Path())


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> dict[str, Benchmark]:
    found = {"one": benchmark("one", "a", "b"), "two": benchmark("two", "b", "c")}
    monkeypatch.setattr(registry, "names", lambda group: list(found))
    monkeypatch.setattr(registry, "get", lambda group, name: found[name])
    return found


def test_a_group_stands_for_its_leaves_in_order(groups: dict[str, Benchmark]) -> None:
    assert catalogue.resolve_task("one") == [("a", groups["one"]), ("b", groups["one"])]


def test_a_leaf_stands_for_itself(groups: dict[str, Benchmark]) -> None:
    assert catalogue.resolve_task("c") == [("c", groups["two"])]


def test_a_leaf_of_two_groups_is_refused(groups: dict[str, Benchmark]) -> None:
    with pytest.raises(UserError, match="more than one group: one, two"):
        catalogue.resolve_task("b")


def test_a_subset_stands_for_its_leaves(groups: dict[str, Benchmark]) -> None:
    groups["two"] = replace(groups["two"], subsets={"two_more": ("c",)})
    assert catalogue.resolve_task("two_more") == [("c", groups["two"])]
    with pytest.raises(UserError, match="did you mean two_more"):
        catalogue.resolve_task("two_mor")


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "file"),
    [
        ("./my.py:Mine", (Path("my.py"), "Mine")),
        ("./my.py:Mine:window=64", (Path("my.py"), "Mine")),
        ("/a/b.py", (Path("/a/b.py"), "")),
        ("snapkv:window=64", None),
        ("pyramid.pyx:Mine", None),
    ],
)
def test_a_file_is_told_from_a_name(spec: str, file: Any) -> None:
    assert registry.split_file(spec) == file


def test_an_object_of_a_file_is_loaded_once_per_content(script: Callable[[str], str]) -> None:
    name = script("from dataclasses import dataclass\n@dataclass\nclass Mine:\n    x: int = 1\n")
    first = registry.load_file(f"{name}:Mine")
    assert first().x == 1
    assert registry.load_file(f"{name}:Mine:x=3") is first
    digest = registry.file_digest(name)
    script("class Mine:\n    x = 2\n")
    assert registry.load_file(f"{name}:Mine")().x == 2
    assert registry.file_digest(f"{name}:Mine") != digest


def test_a_file_counts_with_the_modules_beside_it_however_they_are_replaced(
    script: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("helper", "deeper", "beside_pkg", "beside_ns"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    folder = tmp_path / "plugin"
    package = folder / "beside_pkg"
    package.mkdir(parents=True)
    monkeypatch.syspath_prepend(folder)
    files = {
        folder / "helper.py": "import deeper\nFROM = 1\n",
        folder / "deeper.py": "FROM = 1\n",
        package / "__init__.py": "",
        package / "inner.py": "FROM = 1\n",
        folder / "beside_ns" / "inner.py": "FROM = 1\n",
    }
    for file, text in files.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    (folder / "unused.py").write_text("FROM = 1\n")
    plugin = folder / "my_policy.py"
    plugin.write_text(
        "import deeper, helper\nfrom beside_pkg import inner\nimport json, kvbench\n"
        "from beside_ns import inner as other\n"
        "def total():\n    return helper.FROM + deeper.FROM + inner.FROM + other.FROM\n"
    )
    digests = {registry.file_digest(str(plugin))}
    assert registry.load_file(f"{plugin}:total")() == 4
    (folder / "unused.py").write_text("FROM = 2\n")
    assert registry.file_digest(str(plugin)) in digests
    for count, file in enumerate((f for f in files if f.stat().st_size), start=1):
        before = file.stat()
        file.write_text(files[file].replace("1", "2"))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp -p` does
        digest = registry.file_digest(str(plugin))
        assert digest not in digests
        digests.add(digest)
        assert registry.load_file(f"{plugin}:total")() == 4 + count


def test_a_file_without_modules_beside_it_keeps_its_digest(tmp_path: Path) -> None:
    plugin = tmp_path / "my_policy.py"
    plugin.write_text("import json\nimport kvbench\n")
    (tmp_path / "kvbench").mkdir()
    (tmp_path / "kvbench" / "__init__.py").write_text("")
    digest = hashlib.sha256(plugin.read_bytes()).hexdigest()[:16]
    assert registry.file_digest(f"{plugin}:Mine") == digest


@pytest.mark.parametrize(
    ("code", "name", "says"),
    [
        ("class MyPolicy: ...", "MyPolcy", r"has no 'MyPolcy'; did you mean MyPolicy"),
        ("x = 1\nclass (", "A", r"my_policy\.py:2 cannot be executed: SyntaxError"),
        ("x = 1\n\n1 / 0", "A", r"my_policy\.py:3 cannot be executed: ZeroDivisionError"),
        (
            "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
            "A",
            r"my_policy\.py:3 cannot be executed: E: no message, because its __str__ raises",
        ),
        ("A = 1", "", "does not name an object"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(script: Callable[[str], str], code: str, name: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        registry.load_file(f"{script(code)}:{name}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_said() -> None:
    with pytest.raises(UserError, match=r"cannot read none\.py"):
        registry.load_file("./none.py:A")
