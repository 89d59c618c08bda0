"""A third party's policy runs from a file and from an installed package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvbench
from kvbench.checks import run_checks
from kvbench.errors import UserError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MyPolicy", "value_norm"])
def test_the_file_holds_every_invariant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    failed = [r for r in run_checks(f"./examples/my_policy.py:{name}") if not r.ok]
    assert not failed


def test_a_policy_in_a_file_is_spelled_with_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    mine = kvbench.policy("./examples/my_policy.py:MyPolicy:window=4:allocate=head_adaptive")
    assert str(mine) == "./examples/my_policy.py:MyPolicy:allocate=head_adaptive:window=4"
    assert kvbench.policy(str(mine)) == mine
    function = kvbench.policy("./examples/my_policy.py:value_norm", power=2)
    assert str(function) == "./examples/my_policy.py:value_norm:power=2.0"
    assert kvbench.policy(str(function)) == function
    assert "long" in function.summary
    with pytest.raises(UserError, match="window=-1"):
        kvbench.policy("./examples/my_policy.py:MyPolicy:window=-1")


@pytest.mark.slow
def test_an_installed_package_is_found_by_its_entry_point(tmp_path: Path) -> None:
    source = shutil.copytree(EXAMPLES / "kvbench_example_policy", tmp_path / "source")
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--no-build-isolation", "--target", str(target), str(source)], check=True)
    script = (
        "import kvbench; from kvbench import registry\n"
        "print(kvbench.policy('example_vatp:window=8'))\n"
        "print(kvbench.policy('criticalkv:score=example_vatp'))\n"
        "print(registry.origin(registry.POLICIES, 'example_vatp'))\n"
        "from kvbench.checks import run_checks\n"
        "print([r for r in run_checks('example_vatp') if not r.ok])\n"
    )
    path = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "example_vatp:window=8",
        "criticalkv:score=example_vatp",
        "kvbench-example-policy==0.1.0",
        "[]",
    ]
