"""Compile and run model-written C++, only if the user allows it.

Every process has limits on time, memory, output and (except for root) child processes. This is not a sandbox: the
program can read files and use the network with the user's rights.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import UserError

ALLOW = "KVBENCH_RUN_CODE"
_TESTS = 10
_SECONDS = 3
_COMPILE_SECONDS = 60
_WAIT = 4
"""Wall-clock seconds allowed per CPU second, for busy machines."""
_OUTPUT = 16 << 20
_MEMORY = 1 << 30
_COMPILE_MEMORY = 4 << 30
_HEADERS = (
    "cstdio iostream vector algorithm numeric cmath cstring set map queue stack list fstream "
    "climits cassert iomanip sstream bitset"
)
_PROGRAM = "".join(f"#include <{name}>\n" for name in _HEADERS.split()) + "using namespace std;\n"
_LIMIT = """
import os, resource, sys
seconds, memory, output, children = map(int, sys.argv[1:5])
for what, most in (
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_AS, memory),
    (resource.RLIMIT_FSIZE, output),
    (resource.RLIMIT_CORE, 0),
    *([] if children else [(resource.RLIMIT_NPROC, 0)]),
):
    resource.setrlimit(what, (most, most))
os.execvp(sys.argv[5], sys.argv[5:])
"""

Test = Sequence[Sequence[str]]


def obstacle() -> str:
    """Return why code cannot run here, or ""."""
    if os.environ.get(ALLOW) != "1":
        return f"compiles and runs C++ that the model wrote; set {ALLOW}=1 to allow it"
    if os.name != "posix":
        return "runs C++ that the model wrote, within limits that exist on POSIX systems only"
    if shutil.which("g++") is None:
        return "compiles C++, and g++ is not installed"
    return ""


def passes(code: str, tests: Sequence[Test]) -> bool:
    """Return whether a program prints exactly the expected output in the first ten tests.

    Args:
        code: C++11; the standard headers named in the prompt are prepended.
        tests: Pairs of input lines and output lines.

    Raises:
        UserError: Code cannot run here.
    """
    if reason := obstacle():
        raise UserError(f"LongProc's pseudo_to_code {reason}")
    with tempfile.TemporaryDirectory(prefix="kvbench-code-") as folder_name:
        folder = Path(folder_name)
        source, program = folder / "answer.cpp", folder / "answer"
        source.write_text(_PROGRAM + code, encoding="utf-8", errors="replace")
        compiler = ["g++", "-std=c++11", "-O", "-o", str(program), str(source)]
        compiler_output = _limited(compiler, folder, b"", _COMPILE_SECONDS, _COMPILE_MEMORY, children=True)
        if compiler_output is None or not program.is_file():
            return False
        for input_lines, expected_lines in tests[:_TESTS]:
            printed = _limited([str(program)], folder, _text(input_lines), _SECONDS, _MEMORY)
            if printed != _text(expected_lines):
                return False
    return True


def _text(lines: Sequence[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()


def _limited(
    command: list[str],
    folder: Path,
    input_bytes: bytes,
    seconds: int,
    memory: int,
    children: bool = False,
) -> bytes | None:
    """Run a command within limits; return its output, or None if it takes too long."""
    limits = [str(limit) for limit in (seconds, memory, _OUTPUT, int(children))]
    with (
        (folder / "output").open("w+b") as output_file,
        (folder / "input").open("w+b") as input_file,
    ):
        input_file.write(input_bytes)
        input_file.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LIMIT, *limits, *command],
            stdin=input_file,
            stdout=output_file,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": str(folder)},
            start_new_session=True,
        )
        try:
            process.wait(timeout=_WAIT * seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output_file.seek(0)
        return output_file.read()
