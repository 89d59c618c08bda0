"""A package that is executed when something of it is used is then as if it had been imported as usual."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = {
    "__init__.py": '"""Does sums."""\nimport builtins\nbuiltins.count = getattr(builtins, "count", 0) + 1\n'
    "from .series import series\nfrom . import errors\n__version__ = '1.2'\nanswer = 42\n",
    "series.py": "import builtins\nbuiltins.parts = getattr(builtins, 'parts', 0) + 1\n"
    "def series():\n    return 'sum'\n",
    "errors.py": "class Wrong(Exception):\n    pass\n",
    "later.py": "from . import answer\n",
    "broken.py": "import no_such_module\n",
    "note.txt": "read me",
}
USES = {
    "print(lazy.answer)": "42",
    "print(lazy.__version__)": "1.2",
    "from lazy import *; print(answer)": "42",
    "from lazy import series; print(series())": "sum",
    "import lazy.series; print(lazy.series())": "sum",
    "from lazy.series import series; print(series(), lazy.series is series)": "sum True",
    "import lazy.later; print(lazy.later.answer)": "42",
    "from lazy.errors import Wrong; print(Wrong is lazy.errors.Wrong)": "True",
    "import lazy.no_such_part": "No module named 'lazy.no_such_part'",
    "import lazy.broken": "No module named 'no_such_module'",
    "print(lazy.no_such_name)": "module 'lazy' has no attribute 'no_such_name'",
    "print(importlib.resources.files('lazy').joinpath('note.txt').read_text())": "read me",
    "print(pkgutil.get_data('lazy', 'note.txt').decode())": "read me",
    "print(inspect.getsource(importlib.import_module('lazy.errors')).splitlines()[0])": "class Wrong(Exception):",
    """
spec = importlib.util.find_spec("lazy.errors")
from lazy.errors import Wrong
print(Wrong is lazy.errors.Wrong, spec.origin == lazy.errors.__file__, spec.loader.get_source("lazy.errors")[:11])
""": "True True class Wrong",
    """
threads = [threading.Thread(target=lambda: lazy.answer) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join(30)
print(lazy.answer)
""": "42",
}
USED = """
import builtins, importlib, importlib.resources, importlib.util, inspect, pkgutil, sys, threading
from kvbench.engine.lazy_module import LazyModule
LazyModule("lazy").install()
LazyModule("lazy").install()
import lazy
assert lazy is sys.modules["lazy"] and not hasattr(builtins, "count")
try:
    exec({use!r})
except Exception as error:
    print(error)
import lazy, lazy.errors, lazy.later
assert lazy.answer == 42 and lazy.series() == "sum" and lazy.__doc__ == "Does sums."
assert builtins.count == builtins.parts == 1, "executed once"
assert type(lazy) is type(sys) and not hasattr(lazy, "__getattr__")
modules = lazy, lazy.later, sys.modules["lazy.series"]
assert [type(module.__spec__.loader).__name__ for module in modules] == ["SourceFileLoader"] * 3
assert lazy.errors is sys.modules["lazy.errors"]
"""


@pytest.mark.parametrize("use", USES)
def test_each_use_executes_it_once(tmp_path: Path, use: str) -> None:
    package_path = tmp_path / "lazy"
    package_path.mkdir()
    for file_name, text in PACKAGE.items():
        (package_path / file_name).write_text(text)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + USED.format(use=use)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == USES[use]
