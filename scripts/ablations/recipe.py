"""Reads a recipe: a YAML file that says what to train, to evaluate and to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import UserError, nearest, unknown
from kvbench.tables.text import slug

PAPERS = Path(__file__).with_name("papers.yaml")
"""The ablations in the papers on retention gates."""

_DIRECTIONS = ("better", "worse")


@dataclass(frozen=True)
class Variant:
    """One row of a table.

    Attributes:
        name: Name in the table.
        policy: Spelling of the policy that reads the gates, without `gates`.
        train: Settings of the training that differ from the recipe's.
        data: Data of the training if they are not the recipe's, as for `kvbench train gates`.
        paper: The paper's scores, one per column; `better` or `worse` than the first variant, if
            the paper has no numbers; or None.
    """

    name: str
    policy: str
    train: Mapping[str, Any] = field(default_factory=dict)
    paper: tuple[float, ...] | str | None = None
    data: str = ""

    @property
    def kind(self) -> str:
        """The policy that reads the gates."""
        return self.policy.partition(":")[0]

    @property
    def folder(self) -> str:
        """Name of the gates' folder; variants of the same training share it."""
        settings = [f"{k}-{str(v).lower()}" for k, v in sorted(self.train.items())]
        return "-".join([self.kind, *settings, *([f"data-{slug(self.data)}"] if self.data else [])])


@dataclass(frozen=True)
class Ablation:
    """One table.

    Attributes:
        name: Name on the command line.
        title: What is compared, in one line.
        paper: Where the paper has its table.
        columns: Names of the paper's columns.
        variants: The rows; all others are compared with the first.
    """

    name: str
    title: str
    paper: str
    columns: tuple[str, ...]
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class Recipe:
    """The content of a recipe.

    Attributes:
        model: Model, as for `kvbench train gates`.
        data: Data, as for `kvbench train gates`.
        seeds: Every variant is trained once with each seed.
        train: Settings of all trainings.
        evaluate: Grids without policies and models.
        tables: The ablations by name.
    """

    model: str
    data: str
    seeds: tuple[int, ...]
    train: Mapping[str, Any]
    evaluate: tuple[Mapping[str, Any], ...]
    tables: Mapping[str, Ablation]

    def pick(self, names: Sequence[str]) -> list[Ablation]:
        """The named ablations, or all if no name is given.

        Raises:
            UserError: A name is unknown.
        """
        for name in names:
            if name not in self.tables:
                raise unknown("table", name, self.tables)
        return [self.tables[name] for name in dict.fromkeys(names or self.tables)]


def read(path: Path = PAPERS) -> Recipe:
    """Read a recipe.

    Raises:
        UserError: It cannot be read or is not a recipe; the message says what is wrong.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    try:
        return _recipe(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _recipe(content: Any) -> Recipe:
    recipe = _mapping(content, "recipe", ("model", "data", "seeds", "train", "evaluate", "tables"))
    seeds = _list(recipe["seeds"], "seeds")
    if not all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in seeds):
        raise UserError(f"seeds: {seeds} is invalid; use whole numbers such as [0, 1]")
    grids = [_mapping(grid, "evaluate", ("task",), None) for grid in _list(recipe["evaluate"], "evaluate")]
    for grid in grids:
        for key in ("policy", "policies", "model", "models", "out"):
            if key in grid:
                raise UserError(f"evaluate: {key} is invalid, because the tables set it; remove it")
    tables = _mapping(recipe["tables"], "tables", (), None)
    return Recipe(
        model=str(recipe["model"]),
        data=str(recipe["data"]),
        seeds=tuple(dict.fromkeys(seeds)),
        train=_mapping(recipe["train"], "train", (), None),
        evaluate=tuple(grids),
        tables={str(name): _ablation(str(name), table) for name, table in tables.items()},
    )


def _ablation(name: str, content: Any) -> Ablation:
    required = ("title", "paper", "policy", "variants")
    table = _mapping(content, f"table {name}", required, ("columns",))
    columns = tuple(str(c) for c in _list(table.get("columns", [""]), f"columns of {name}"))
    variants = tuple(
        _variant(name, row, str(table["policy"]), columns) for row in _list(table["variants"], f"variants of {name}")
    )
    if len(variants) < 2 or len({v.name for v in variants}) != len(variants):
        raise UserError(f"table {name}: use at least two variants with different names")
    return Ablation(name, str(table["title"]), str(table["paper"]), columns, variants)


def _variant(table: str, content: Any, policy: str, columns: Sequence[str]) -> Variant:
    row = _mapping(content, f"a variant of {table}", ("name",), ("policy", "train", "paper", "data"))
    where = f"{table}, {row['name']}"
    paper = row.get("paper")
    if isinstance(paper, list):
        if len(paper) != len(columns) or not all(isinstance(x, int | float) for x in paper):
            raise UserError(f"{where}: paper: {paper} is invalid; use {len(columns)} scores")
        paper = tuple(float(x) for x in paper)
    elif paper not in (None, *_DIRECTIONS):
        raise UserError(f"{where}: paper: {paper!r} is invalid; use scores, better or worse")
    settings = _mapping(row.get("train", {}), f"{where}: train", (), None)
    return Variant(str(row["name"]), str(row.get("policy", policy)), settings, paper, str(row.get("data", "")))


def _list(content: Any, what: str) -> list[Any]:
    if not isinstance(content, list) or not content:
        raise UserError(f"{what}: {content!r} is invalid; use a list")
    return content


def _mapping(content: Any, what: str, required: Sequence[str], optional: Sequence[str] | None = ()) -> dict[str, Any]:
    """Check that a mapping has the required keys and no others but the optional (None: any)."""
    if not isinstance(content, dict):
        raise UserError(f"{what}: {content!r} is invalid; use a mapping")
    for key in required:
        if key not in content:
            raise UserError(f"{what}: {key} is missing")
    known = [*required, *(optional or ())]
    for key in content if optional is not None else ():
        if key not in known:
            raise UserError(f"{what}: unknown key {key!r}{nearest(str(key), known)}")
    return content
