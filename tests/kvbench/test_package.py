from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvbench


def test_the_public_names_are_listed_without_importing_torch() -> None:
    code = "import kvbench, sys; print(' '.join(dir(kvbench)), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *names, torch = done.stdout.split()
    assert {"Budget", "attach", "kept", "load", "policy", "run", "__version__"} <= set(names)
    assert torch == "False"
    assert all(getattr(kvbench, name) is not None for name in kvbench.__all__)


def test_run_shows_its_progress_and_reports_what_is_left_out(tmp_path: Path, capsys: Any) -> None:
    grid = {"policy": "knorm", "task": "aime24,niah_single_1", "length": 256, "samples": 1}
    done = kvbench.run(grid | {"out": str(tmp_path / "a")})
    assert "loading model reference" in capsys.readouterr().err
    assert list(done.left_out) == ["aime24"]
    assert "--model" in done.left_out["aime24"]
    done = kvbench.run(grid | {"out": str(tmp_path / "b")}, progress=False)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""
    assert list(done.left_out) == ["aime24"]


@pytest.mark.parametrize("is_collecting", [True, False])
def test_public_names_are_imported_without_collecting_garbage(
    monkeypatch: pytest.MonkeyPatch, is_collecting: bool
) -> None:
    def fail(module_name: str) -> Any:
        assert not gc.isenabled()
        raise ImportError(f"no {module_name}")

    monkeypatch.setattr(importlib, "import_module", fail)
    was_collecting = gc.isenabled()
    try:
        (gc.enable if is_collecting else gc.disable)()
        with pytest.raises(ImportError, match=r"no kvbench\.runs\.runner"):
            _ = kvbench.run
        assert gc.isenabled() == is_collecting
    finally:
        (gc.enable if was_collecting else gc.disable)()
