from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

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


def test_the_wheel_carries_the_licences_of_what_is_not_ours(tmp_path: Path) -> None:
    """The metadata of a wheel lists the files, and they are in it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree)
    for parent in ("", "policies", "tasks", "results/published"):
        (tree / parent).mkdir(parents=True, exist_ok=True)
    built = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    subprocess.run([sys.executable, "-c", built], cwd=tree, check=True, capture_output=True)
    [wheel] = tree.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {Path(name).name: name for name in archive.namelist()}
        metadata = archive.read(files["METADATA"]).decode()
        notice = archive.read(files["NOTICE"]).decode()
    assert "License-File: LICENSE" in metadata and "License-File: NOTICE" in metadata
    assert "Permission is hereby granted, free of charge" in notice
    assert notice.count("Copyright") >= 8


def test_the_notice_names_every_task_with_a_prompt_under_the_mit_licence() -> None:
    notice = (ROOT / "NOTICE").read_text()
    prompts = re.compile(r"Licence: MIT (\([^)]*prompt|AND .*prompts? (is|are) MIT)")
    shipped = {
        readme.parent.name
        for readme in (ROOT / "tasks" / "kvbench_tasks").glob("*/README.md")
        if prompts.search(readme.read_text())
    }
    assert shipped >= {"longbench", "infinitebench", "scbench", "longmemeval", "coqa"}
    for task in shipped:
        assert f"kvbench_tasks/{task}" in notice, task
    for rubric in (ROOT / "kvbench" / "judge" / "shipped").glob("*.json"):
        if json.loads(rubric.read_text())["licence"] == "MIT":
            assert f"kvbench/judge/shipped/{rubric.name}" in notice


def test_what_was_made_for_a_model_names_it_and_its_licence() -> None:
    folders = [*(ROOT / "policies/kvbench_policies/gates/shipped").glob("*/gates.json")]
    assert folders
    for config in folders:
        facts, card = json.loads(config.read_text()), config.with_name("README.md").read_text()
        _, front, body = card.split("---\n")
        assert yaml.safe_load(front)["license"] == "apache-2.0"
        named = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
        base = facts["base_model"]
        assert yaml.safe_load(front)["base_model"] == named.get(base, base)
        assert facts["base_revision"] in body and "Apache-2.0" in body
    shipped = ROOT / "kvbench" / "profiles" / "shipped"
    card = (shipped / "README.md").read_text()
    listed = re.findall(r"^\| `(.+?)\*` .*Apache-2\.0 \|$", card, re.MULTILINE)
    for path in shipped.iterdir():
        if path.name not in ("README.md", "__init__.py", "__pycache__"):
            assert any(path.name.startswith(name) for name in listed), path


EXTRAS = {
    "cv2": "vision", "gguf": "gguf", "hqq": "quantizers", "loguru": "vision", "openai": "judge",
    "optimum": "quantizers", "optuna": "tune", "ray": "ray", "triton": "gpu",
}  # fmt: skip
"""Packages that only some commands need, and the extra that brings each."""

SEPARATE = {"lmms_eval"}
"""Goes in with --no-deps (`make vision`): its requirements would replace torch."""

DISTRIBUTIONS = {
    "PIL": "pillow", "cv2": "opencv-python-headless", "optimum": "optimum-quanto", "yaml": "pyyaml",
}  # fmt: skip
"""Distributions that are called otherwise than their package."""


def test_every_package_that_is_imported_is_declared(project: dict[str, Any]) -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    def names(texts: list[str]) -> set[str]:
        return {canonicalize_name(Requirement(text).name) for text in texts}

    imported = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.partition(".")[0])
    imported = {m for m in imported if m not in sys.stdlib_module_names and m[:7] != "kvbench"}
    assert {"torch", "PIL", "nltk", "tokenizers"} <= imported
    assert imported >= {*EXTRAS, *SEPARATE}
    always, extras = project["project"]["dependencies"], project["project"]["optional-dependencies"]
    for module in imported - SEPARATE:
        declared = names(extras[EXTRAS[module]] if module in EXTRAS else always)
        assert canonicalize_name(DISTRIBUTIONS.get(module, module)) in declared, module


def test_the_extras_that_are_required_exist(project: dict[str, Any]) -> None:
    """pip only warns of an extra that a package does not have, and installs less."""
    from packaging.requirements import Requirement

    for text in project["project"]["dependencies"]:
        required = Requirement(text)
        there = importlib.metadata.metadata(required.name).get_all("Provides-Extra") or []
        assert set(required.extras) <= {*there}, text


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
