from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "kvbench",
    "policies/kvbench_policies",
    "tasks/kvbench_tasks",
    "results/published/kvbench_published",
)


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("package", PACKAGES)
def test_every_file_of_a_package_is_in_the_wheel(package: str, project: dict[str, Any]) -> None:
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    shipped = {pattern.removeprefix("**/*") for pattern in patterns} | {".py"}
    files = [p for p in (ROOT / package).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert files
    for path in files:
        assert path.suffix in shipped or path.name in shipped, f"{path} matches no package-data"
        if path.suffix == ".py":
            assert (path.parent / "__init__.py").exists(), f"{path.parent} is no package"


def test_scripts_are_not_in_the_wheel(project: dict[str, Any]) -> None:
    assert (ROOT / "scripts" / "__init__.py").is_file()
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    for package in ("scripts", "scripts.ablations", "scripts.reference_model"):
        assert not any(fnmatch(package, pattern) for pattern in patterns)


def test_every_pin_satisfies_and_covers_what_is_required(project: dict[str, Any]) -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (x.partition(";")[0].split("==") for x in lines if not x.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pairs}
    extras = project["project"]["optional-dependencies"].values()
    for text in [*project["project"]["dependencies"], *(r for extra in extras for r in extra)]:
        required = Requirement(text)
        if required.name != "kvbench":
            assert required.specifier.contains(pins[canonicalize_name(required.name)]), text
