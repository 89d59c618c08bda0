"""Run the examples of Markdown pages: `python docs/run_examples.py README.md CONTRIBUTING.md`.

Every fenced block that says `bash` or `python` is run as it stands, in order, in a fresh folder
with a copy of `examples/`. A block right after `<!-- not run here: reason -->` is left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK = re.compile(
    r"(?P<skip><!-- not run here:[^>]*-->\s*)?^(?P<indent> *)```(?P<language>bash|python)\n"
    r"(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and code of every block that is to be run."""
    found = []
    for match in BLOCK.finditer(text):
        if not match["skip"]:
            indent = match["indent"]
            lines = [line.removeprefix(indent) for line in match["code"].splitlines()]
            found.append((match["language"], "\n".join(lines)))
    return found


def main(pages: list[str]) -> int:
    """Run the pages' examples; 1 if one fails."""
    root = Path(__file__).parent.parent
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
    }
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(root / "examples", Path(folder) / "examples")
            for language, code in blocks((root / page).read_text(encoding="utf-8")):
                print(f"--- {page} ({language})\n{code}", flush=True)
                begin = time.monotonic()
                command = ["bash", "-euc", code]
                if language == "python":
                    command = [sys.executable, "-c", code]
                done = subprocess.run(command, cwd=folder, env=environment, check=False)
                print(f"--- {time.monotonic() - begin:.0f} s", flush=True)
                if done.returncode:
                    print(f"{page}: this example ended with status {done.returncode}")
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
