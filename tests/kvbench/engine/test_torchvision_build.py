"""A torchvision built for another torch, as a stand-in that raises what the real one raises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # every test starts processes that import torch

# What torchvision/_meta_registrations.py does on import.
STAND_IN = """
import torch
from torchvision import extension
for name in ("nms", "qnms"):
    torch.library.register_fake(f"torchvision::{name}")(lambda dets, scores, iou_threshold: dets)
count = extension.count
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"],
        capture_output=True,
        text=True,
    )


def stand_in(folder: Path, text: str = STAND_IN) -> Path:
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(text)
    (package / "extension.py").write_text("count = 7\n")
    return folder


def test_it_is_imported_all_the_same_and_only_when_needed(tmp_path: Path) -> None:
    folder = stand_in(tmp_path)
    alone = run("import torchvision", folder)
    assert "operator torchvision::nms does not exist" in alone.stderr
    code = (
        "import kvbench; assert 'torchvision' not in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
        "import torchvision; print(torchvision.count)"
    )
    done = run(code, folder)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def test_any_other_failure_of_torchvision_is_its_own(tmp_path: Path) -> None:
    folder = stand_in(tmp_path, "raise RuntimeError('something else')")
    done = run("import kvbench, torchvision", folder)
    assert "RuntimeError: something else" in done.stderr


@pytest.mark.parametrize(
    "before",
    [
        "try:\n    import torchvision\nexcept RuntimeError:\n    pass\n",
        "import torch; library = torch.library.Library('torchvision', 'DEF')\n",
        "import torch; library = torch.library.Library('torchvision', 'DEF')\n"
        "library.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n",
    ],
    ids=["torchvision", "its namespace", "one of its operators"],
)
def test_what_was_imported_or_declared_before_kvbench_does_no_harm(tmp_path: Path, before: str) -> None:
    done = run(f"{before}import kvbench, torchvision; print(torchvision.count)", stand_in(tmp_path))
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
