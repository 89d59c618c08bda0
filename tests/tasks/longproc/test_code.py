"""Code that a model wrote runs only where it is allowed, and within limits."""

from __future__ import annotations

import json
import shutil
import time

import pytest

from kvbench.errors import UserError
from kvbench_tasks.longproc import code
from kvbench_tasks.longproc.metric import score

SUM = "int main() { int a, b; cin >> a >> b; cout << a + b << endl; }"
TESTS = [[["1 2"], ["3"]], [["4", "5"], ["9"]]]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(code.ALLOW, "1")


@pytest.mark.parametrize("value", [None, "", "0", "yes"])
def test_no_code_runs_unless_it_is_allowed(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(code.ALLOW, raising=False)
    if value is not None:
        monkeypatch.setenv(code.ALLOW, value)
    monkeypatch.setattr(code.subprocess, "Popen", lambda *_, **__: pytest.fail("ran something"))
    with pytest.raises(UserError, match="set KVBENCH_RUN_CODE=1 to allow it"):
        code.passes(SUM, TESTS)


def test_a_missing_compiler_is_named(allowed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code.shutil, "which", lambda _: None)
    assert "g++ is not installed" in code.obstacle()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("program", "right"),
    [
        (f"```cpp\n{SUM}\n```", 1),
        (f"Here it is:\n```c++\n{SUM}\n```\nDone.", 1),
        (f"```cpp\n{SUM.replace('+', '-')}\n```", 0),
        (f"```cpp\n{SUM.replace('endl', '3')}\n```", 0),  # 33 and no line feed
        (f"```cpp\n{SUM[:-1]}\n```", 0),  # does not compile
        (SUM, 0),
        (f"```cpp\n{SUM}", 0),
    ],
)
def test_a_program_must_print_what_is_expected(program: str, right: int, allowed: None) -> None:
    metadata = json.dumps({"testcases": TESTS})
    doc = {"kind": "pseudo_to_code", "outputs": [SUM], "metadata": metadata}
    assert score(doc, [program])["score"] == right


@needs_compiler
def test_only_ten_tests_are_run(allowed: None) -> None:
    assert code.passes(SUM, [*TESTS * 5, [["1 1"], ["3"]]])


@needs_compiler
@pytest.mark.slow
def test_limits_of_time_memory_and_output(allowed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_SECONDS", 1)
    monkeypatch.setattr(code, "_OUTPUT", 1 << 20)
    test = [[["1 2"], ["3"]]]
    before = time.monotonic()
    assert not code.passes("int main() { while (1); }", test)
    assert not code.passes('int main() { while (1) cout << "0123456789"; }', test)
    big = "int main() { vector<long long> v(1000000000, 1); cout << 3 + v[7] - 1 << endl; }"
    assert not code.passes(big, test)
    assert time.monotonic() - before < 60
    small = big.replace("1000000000", "1000")
    assert code.passes(small, test)


@needs_compiler
def test_a_program_sees_none_of_the_users_environment(allowed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    program = 'int main() { cout << (getenv("HF_TOKEN") ? "seen" : "none") << endl; }'
    assert code.passes(program, [[["x"], ["none"]]])
