"""The layout of the code: layers, no import circle, and a core that names no policy and no task."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvbench import registry
from kvbench.harness.catalogue import benchmarks

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "kvbench": ROOT / "kvbench",
    "kvbench_policies": ROOT / "policies" / "kvbench_policies",
    "kvbench_tasks": ROOT / "tasks" / "kvbench_tasks",
}

GROUND = "moved errors terminal files budget moments decoding metrics stats progress"
PAGES = "registry plugin_facts named native view plugin parts spelling artifacts benchmark"
ROOMS = "data harness judge engine runs"
ABOVE = (
    "lm_eval lmms_eval tables report regression viewer leaderboard papers reference reference_vl named_models "
    "profiles analysis training tuning probes checks cli"
)
LAYERS = [*GROUND.split(), *PAGES.split(), *ROOMS.split(), *ABOVE.split()]
"""Files and folders of `kvbench/`; each imports only from those before it."""

CORE = LAYERS[: LAYERS.index("runs") + 1]
"""The part of kvbench that knows policies and tasks only through the registry."""

OUTSIDE = {
    "kvbench_policies": {*LAYERS} - {"runs", "harness", "judge", "report", "papers", "analysis", "cli"},
    "kvbench_tasks": {*LAYERS[: LAYERS.index("harness") + 1], "reference", "reference_vl"},
}
"""What plugins may import of kvbench."""

WORDS = {"full", "local", "random", "reference", "exact", "value"}
"""Names of policies or tasks that are ordinary words of the core as well."""

HEAVY = {
    "PIL",
    "accelerate",
    "bitsandbytes",
    "cv2",  # optional: decodes videos
    "datasets",
    "gguf",
    "huggingface_hub",
    "latex2sympy2_extended",
    "lm_eval",  # takes seconds to import
    "lmms_eval",  # optional, and takes seconds to import
    "loguru",  # optional: comes with lmms_eval
    "math_verify",
    "matplotlib",
    "nltk",
    "openai",
    "optuna",  # optional
    "ray",  # optional
    "hqq",  # optional
    "optimum",  # optional
    "resource",
    "rouge_score",
    "torch",
    "transformers",
    "triton",
}
"""Packages that may be imported inside a function: slow to import, or not always there."""

SLOW = {
    ("kvbench.data.sources", "kvbench.data.fetching"),  # imports `datasets`
    ("kvbench.training.command", "kvbench.training.trainer"),  # needs `accelerate`
    ("kvbench.report.drawn", "kvbench.report.heatmap"),  # imports `matplotlib`
    ("kvbench.report.drawn", "kvbench.report.pareto_figures"),  # the same
    ("kvbench.report.equal", "kvbench.spelling"),  # imports `torch`
    ("kvbench.report.last_queries", "kvbench.plugin"),  # the same
    ("kvbench.report.last_queries", "kvbench.spelling"),
}
"""Our own modules that may be imported inside a function, because they import a heavy package."""


LIGHT = {
    ("kvbench.cli.app",): {"torch", "transformers", "lm_eval", "matplotlib", "numpy", "pandas", "pyarrow"},
    ("kvbench.cli.compare", "kvbench.cli.table"): {"torch", "transformers", "lm_eval", "matplotlib"},
    ("kvbench.cli.report", "kvbench.cli.page", "kvbench.cli.leaderboard"): {"torch", "transformers", "lm_eval"},
    ("kvbench.cli.run",): {"matplotlib"},
}
"""Heavy packages that commands do not import, except in a function that needs them; see `reached`."""


@dataclass(frozen=True)
class Import:
    """One imported name; `inside` tells whether the import is in a function."""

    module: str
    name: str
    line: int
    inside: bool
    typing: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.name}"


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def of_project(name: str) -> str:
    """The module of the project that an imported name is in; "" for other packages."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name


@functools.cache
def imports() -> list[Import]:
    return [one for module, path in modules().items() for one in _imports(module, path)]


def _imports(module: str, path: Path) -> Iterator[Import]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, inside: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing = typing or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inside, typing)
            return
        for name in names:
            yield Import(module, name, getattr(node, "lineno", 0), inside, typing)

    yield from visit(ast.parse(path.read_text()), inside=False, typing=False)


def room(module: str) -> str:
    """The layer of a module of kvbench: the file or folder right below `kvbench/`."""
    return [*module.split("."), ""][1]


def test_the_walk_sees_every_kind_of_import(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(
        "import a.b\nfrom . import c\nfrom ..d import e\n"
        "def f():\n    from g import h\n"
        "class I:\n    def j(self):\n        import k\n"
    )
    found = {one.name: one.inside for one in _imports("p.q.m", path)}
    assert found == {"a.b": False, "p.q.c": False, "p.d.e": False, "g.h": True, "k": True}


def test_no_module_is_in_an_import_circle() -> None:
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for one in imports():
        target = of_project(one.name)
        if target and target != one.module and not one.typing:
            graph[one.module].add(target)
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_every_file_and_folder_of_kvbench_has_a_layer() -> None:
    found = {room(module) for module in modules() if module.startswith("kvbench.")}
    assert found - {"__main__"} == {*LAYERS}


def test_imports_go_down_the_layers() -> None:
    wrong = []
    for one in imports():
        target = of_project(one.name)
        above, below = room(one.module), room(target)
        if not one.module.startswith("kvbench.") or above == "__main__" or one.typing:
            continue
        # `kvbench` itself stands above all layers: its names lead everywhere.
        facade = target == "kvbench" and one.name != "kvbench.__version__"
        higher = below in LAYERS and LAYERS.index(below) > LAYERS.index(above)
        wrong += [str(one)] * (facade or higher)
    assert not wrong


def test_the_core_does_not_import_plugins_and_plugins_import_only_what_is_below_them() -> None:
    wrong = []
    for one in imports():
        package, target = one.module.partition(".")[0], of_project(one.name)
        if package == "kvbench":
            wrong += [str(one)] * (not target.startswith("kvbench.") and target != "kvbench")
        elif target.startswith("kvbench."):
            wrong += [str(one)] * (room(target) not in OUTSIDE[package])
        elif target:
            wrong += [str(one)] * (target.partition(".")[0] not in ("kvbench", package))
    wrong = [text for text in wrong if "kvbench_" in text or "imports kvbench" in text]
    assert not wrong


def test_only_commands_and_heavy_packages_are_imported_inside_functions() -> None:
    wrong = []
    for one in imports():
        target = of_project(one.name)
        if not one.inside or room(one.module) == "cli":
            continue
        if target:
            kernel = ".kernels." in target and target.endswith(".triton")
            allowed = (one.module, target) in SLOW or kernel
        else:
            allowed = one.name.partition(".")[0] in HEAVY
        wrong += [str(one)] * (not allowed)
    assert not wrong


def reached(command: str) -> set[str]:
    """All modules and packages that a command imports, leaving out imports in functions of other modules.

    `kvbench.cli.app` stands for what every command imports before its function is called.
    """
    by_module: dict[str, list[Import]] = {}
    for one in imports():
        if not one.typing and (not one.inside or (one.module == command and command != "kvbench.cli.app")):
            by_module.setdefault(one.module, []).append(one)
    found: set[str] = set()
    pending = {command}
    while pending:
        module = pending.pop()
        found.add(module)
        for one in by_module.get(module, []):
            target = of_project(one.name) or one.name.partition(".")[0]
            parents = {target.rsplit(".", depth)[0] for depth in range(target.count(".") + 1)}
            pending |= parents - found
    return found


@pytest.mark.parametrize("commands", LIGHT)
def test_a_command_imports_no_heavy_package_that_it_does_not_need(commands: tuple[str, ...]) -> None:
    assert {command: reached(command) & LIGHT[commands] for command in commands} == {
        command: set() for command in commands
    }


def test_what_a_command_imports_is_followed_through_modules() -> None:
    assert "torch" in reached("kvbench.cli.run")
    assert {"kvbench.report", "matplotlib"} <= reached("kvbench.cli.report")


def test_no_function_hides_a_module_of_its_package() -> None:
    """`from package import name` would give one or the other, by what was imported before."""
    hidden = []
    for name, folder in PACKAGES.items():
        for init in folder.rglob("__init__.py"):
            package = importlib.import_module(".".join((name, *init.parent.relative_to(folder).parts)))
            exported = getattr(package, "__all__", ())
            hidden += [f"{package.__name__}.{word}" for word in exported if (init.parent / f"{word}.py").exists()]
    assert not hidden


def test_no_file_is_longer_than_700_lines() -> None:
    long = {m: n for m, p in modules().items() if (n := len(p.read_text().splitlines())) > 700}
    assert not long


def names_of_plugins() -> set[str]:
    """Names of all policies, parts, tasks and groups that ship with kvbench."""
    names = {*registry.names(registry.POLICIES)}
    names |= {name.partition(".")[2] for name in registry.names(registry.PARTS)}
    for benchmark in benchmarks()[0].values():
        names |= {benchmark.name, *benchmark.leaves}
    return names - WORDS


def test_the_core_names_no_policy_and_no_task() -> None:
    names = names_of_plugins()
    assert {"snapkv", "criticalkv", "ruler", "vt", "longbench"} <= names
    wrong = []
    for module, path in modules().items():
        if room(module) not in CORE or not module.startswith("kvbench."):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in names:
                wrong.append(f"{module}:{node.lineno} names {node.value!r}")
    assert not wrong
