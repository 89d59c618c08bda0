"""Loading of recipes: one YAML file in `shipped/` per table or figure of a paper."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from types import MappingProxyType
from typing import Any

import yaml

from kvbench.errors import UserError, unknown
from kvbench.harness import catalogue
from kvbench.papers.published.results import papers
from kvbench.runs.grid import Grid, overlaid
from kvbench.runs.options import flag_of
from kvbench.spelling import policy

RUN = "run"
"""The `kvbench` subcommand of most recipes."""

_KINDS = ("table", "figure")
_LEFT_OUT = "left_out.yaml"


@dataclass(frozen=True)
class Recipe:
    """Reproduction of a table or figure.

    Attributes:
        paper: Name of the paper, a key of `kvbench.papers.published.results.papers`.
        item: "table 1" or "figure 4".
        title: Content of the item, in our words.
        full: The paper's experiment, for a GPU: a grid for `kvbench run --config`, or the flags of `by`.
        miniatures: Changes of `full` in the miniature, by small model; the model itself is implied.
        differs: Differences from the paper's protocol, a sentence each.
        by: The `kvbench` subcommand: "run", "bench", or for example "analyze perturbation".
        needs: Commands that create the model-specific files of policies, once per model.
        lacks: Rows, columns or models of the paper that kvbench cannot run.
        layout: Options of `kvbench table` for the full run.
        small_layout: Options of `kvbench table` for a miniature.
        states: Settings that the paper gives in its text, by attribute or flag name; those of tables are read from the
            published results.
        also: Other items that the same run covers, such as "figures 5 and 6"; may be empty.
    """

    paper: str
    item: str
    title: str
    full: Mapping[str, Any]
    miniatures: Mapping[str, Mapping[str, Any]]
    differs: tuple[str, ...]
    by: str = RUN
    needs: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    layout: str = ""
    small_layout: str = ""
    also: str = ""
    states: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name on the command line, such as `criticalkv-table1`."""
        return f"{self.paper}-{self.item.replace(' ', '')}"

    @property
    def source(self) -> str:
        """Location, such as `table 1 of criticalkv`."""
        return f"{self.item} of {self.paper}"

    def is_miniature(self, models: Sequence[str]) -> bool:
        """Return whether these models of the command line select a miniature."""
        return bool(set(models) & set(self.miniatures))

    def settings(self, models: Sequence[str] = ()) -> dict[str, Any]:
        """Return the experiment for the requested models.

        Args:
            models: Names from the command line. A single small model selects its miniature; anything else selects the
                full experiment, on those models if there are any.

        Raises:
            UserError: A small model is requested together with others.
        """
        small = [model_name for model_name in models if model_name in self.miniatures]
        if not small:
            return overlaid(self.full, {"models": list(models)} if models else {})
        if len(models) > 1:
            raise UserError(
                f"the miniature of {self.name} for {small[0]} has a different grid than the full experiment; "
                "use one --model at a time"
            )
        small_settings = overlaid(self.full, self.miniatures[small[0]])
        return overlaid(small_settings, {"models": small})

    def command(self, models: Sequence[str] = ()) -> str:
        """Return the command of a recipe that `kvbench run` does not run."""
        command_words = ["kvbench", *self.by.split()]
        for setting_name, setting_value in self.settings(models).items():
            if setting_value is None:  # a miniature leaves out the option of the full experiment
                continue
            setting_values = setting_value if isinstance(setting_value, list) else [setting_value]
            command_words += [
                f"--{flag_of(setting_name).replace('_', '-')}",
                ",".join(map(str, setting_values)),
            ]
        return shlex.join(command_words)

    def grid(self, models: Sequence[str] = (), override: Mapping[str, Any] | None = None) -> Grid:
        """Return the grid for `kvbench run`.

        Args:
            models: As in `settings`.
            override: Values that take precedence, by attribute or flag name.

        Raises:
            UserError: The recipe needs another command, or a value of `override` is invalid.
        """
        if self.by != RUN:
            raise UserError(f"{self.name} needs another command: {self.command(models)}")
        return Grid.from_dict(overlaid(self.settings(models), override or {}))

    def layout_for(self, models: Sequence[str] = ()) -> str:
        """Return the options of `kvbench table` for the run of these models."""
        return self.small_layout if self.is_miniature(models) else self.layout


@dataclass(frozen=True)
class LeftOutItem:
    """A table or figure without a recipe; the reason completes "there is no recipe NAME: "."""

    paper: str
    item: str
    reason: str

    @property
    def name(self) -> str:
        """Name that its recipe would have."""
        return f"{self.paper}-{self.item.replace(' ', '')}"


@functools.cache
def recipes() -> Mapping[str, Recipe]:
    """Return all recipes by name, paper by paper, tables before figures.

    Raises:
        ValueError: A file of the package is not a recipe.
    """
    all_recipes = []
    for recipe_path in _folder().iterdir():
        if recipe_path.name.endswith(".yaml") and recipe_path.name != _LEFT_OUT:
            loaded_recipe = _read(yaml.safe_load(recipe_path.read_text(encoding="utf-8")))
            if recipe_path.name != f"{loaded_recipe.name}.yaml":
                raise ValueError(f"{recipe_path.name} holds {loaded_recipe.name}")
            all_recipes.append(loaded_recipe)
    all_recipes.sort(key=lambda loaded_recipe: place_of(loaded_recipe.paper, loaded_recipe.item))
    return MappingProxyType({loaded_recipe.name: loaded_recipe for loaded_recipe in all_recipes})


def recipe(name: str) -> Recipe:
    """Return a recipe by name.

    Raises:
        UserError: There is none; the message gives the reason, or suggests the closest names.
    """
    if name in recipes():
        return recipes()[name]
    for left_item in left_out():
        if left_item.name == name:
            raise UserError(f"there is no recipe {name}: {left_item.reason}")
    raise unknown("recipe", name, recipes(), "kvbench list recipes")


@functools.cache
def left_out() -> tuple[LeftOutItem, ...]:
    """Return the tables and figures without a recipe, in the order of `recipes`."""
    yaml_text = (_folder() / _LEFT_OUT).read_text(encoding="utf-8")
    left_items = [
        LeftOutItem(paper_name, item, reason)
        for paper_name, items in yaml.safe_load(yaml_text).items()
        for item, reason in items.items()
    ]
    return tuple(sorted(left_items, key=lambda left_item: place_of(left_item.paper, left_item.item)))


def missing_parts(checked_recipe: Recipe) -> list[str]:
    """Return the parts of a recipe that cannot be run here: unsupported or not installed."""
    settings = {flag_of(setting_name): setting_value for setting_name, setting_value in checked_recipe.full.items()}
    missing_items = list(checked_recipe.lacks)
    for policy_spec in settings.get("policy", ()):
        try:
            policy(policy_spec)
        except UserError as error:
            missing_items.append(str(error))
    for task_name in settings.get("task", ()):
        try:
            catalogue.resolve_task(task_name)
        except UserError as error:
            missing_items.append(str(error))
    return missing_items


def place_of(paper_name: str, item_label: str) -> tuple[int, bool, int]:
    """Return the sort key of a table or figure."""
    item_kind, item_number = item_label.split()
    return list(papers()).index(paper_name), item_kind != "table", int(item_number)


def _folder() -> Any:
    return resources.files(__name__.rpartition(".")[0]) / "shipped"


def _read(recipe_data: dict[str, Any]) -> Recipe:
    item_labels = [f"{item_kind} {recipe_data.pop(item_kind)}" for item_kind in _KINDS if item_kind in recipe_data]
    known_keys = {recipe_field.name for recipe_field in fields(Recipe)}
    if len(item_labels) != 1 or not set(recipe_data) <= known_keys:
        raise ValueError(f"{recipe_data.get('title')}: needs table or figure, and keys of {sorted(known_keys)}")
    list_fields = {list_name: tuple(recipe_data.get(list_name, ())) for list_name in ("differs", "needs", "lacks")}
    return Recipe(item=item_labels[0], **(recipe_data | list_fields))
