"""Options shared by several commands. Nothing heavy is imported here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

from kvbench.cli import complete
from kvbench.runs.options import FLAG, MODEL, OUTPUT, GridOptions, Option, Options, options

Names = list[str] | None
_Command = TypeVar("_Command", bound=Callable[..., None])


def split_names(names: Sequence[str] | None) -> list[str]:
    """Split the comma-separated values of an option."""
    return [name.strip() for comma_list in names or [] for name in comma_list.split(",") if name.strip()]


def option(panel: str | None, metavar: str, help_text: str, *flags: str, **typer_settings: Any) -> Any:
    """Return an option of a command.

    Args:
        panel: Heading in the help; None for "Options".
        metavar: Placeholder of the value in the help.
        help_text: Help text.
        flags: Spellings of the flag; default: the parameter's name.
        typer_settings: Further arguments of `typer.Option`.
    """
    return typer.Option(*flags, metavar=metavar, help=help_text, rich_help_panel=panel, **typer_settings)


def declared_options(
    declaration: type[Options], *names: str, anchor: str = "", help_texts: Mapping[str, str] | None = None
) -> Callable[[_Command], _Command]:
    """Add declared options to a command, which receives them as keyword arguments.

    Args:
        declaration: Class that declares the options.
        names: Fields of it; default: all.
        anchor: Option of the command after which the help lists them; "" for the beginning.
        help_texts: Help texts of this command, by field.
    """
    declared = dict(options(declaration))

    def decorate(command: _Command) -> _Command:
        parameters: list[inspect.Parameter] = []
        new_parameters = [_parameter(name, declared[name], help_texts or {}) for name in names or declared]
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            if parameter.name == anchor:
                parameters += new_parameters
        parameters = parameters if anchor else [*new_parameters, *parameters]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {described.name: described.annotation for described in parameters}
        return command

    return decorate


def grid_options(
    *names: str, anchor: str = "", help_texts: Mapping[str, str] | None = None
) -> Callable[[_Command], _Command]:
    """Give a command options of a grid; see `declared_options`."""
    return declared_options(GridOptions, *names, anchor=anchor, help_texts=help_texts)


def split_options(flag_values: Mapping[str, Any], declaration: type[Options]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the values of a command's options into those of a declaration, by field, and the others."""
    fields_by_flag = {declared.flag or name: name for name, declared in options(declaration)}
    own = {fields_by_flag[flag]: value for flag, value in flag_values.items() if flag in fields_by_flag}
    return own, {flag: value for flag, value in flag_values.items() if flag not in fields_by_flag}


def _parameter(option_name: str, declared_option: Option, help_texts: Mapping[str, str]) -> inspect.Parameter:
    """Return the command parameter for a grid option; its default is None."""
    completion = getattr(complete, declared_option.complete) if declared_option.complete else None
    typer_option = option(
        declared_option.panel,
        declared_option.metavar,
        help_texts.get(option_name, declared_option.help),
        *_spellings(option_name, declared_option),
        autocompletion=completion,
    )
    value_type: Any = list[str] if declared_option.kind is list else declared_option.kind
    return inspect.Parameter(
        declared_option.flag or option_name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[value_type | None, typer_option],
    )


def _spellings(option_name: str, declared_option: Option) -> list[str]:
    """Return the flags of an option; none if Typer's own is right."""
    if declared_option.alias:
        return [f"--{(declared_option.flag or option_name).replace('_', '-')}", declared_option.alias]
    return [declared_option.spelling] if declared_option.spelling else []


def given_values(flag_values: Mapping[str, Any], excluded: Collection[str] = ()) -> dict[str, Any]:
    """Return the given options by name, in the format of `Grid.from_dict`.

    Args:
        flag_values: All options; None and empty lists are options that were not given.
        excluded: Names to exclude.
    """
    return {
        flag_name: flag_value
        for flag_name, flag_value in flag_values.items()
        if flag_value not in (None, [], ()) and flag_name not in excluded
    }


OneModel = Annotated[
    str,
    option(
        MODEL,
        "NAME",
        "reference (the default), a name of kvbench list models, a folder, a GGUF file or a hub id.",
        autocompletion=complete.models,
        show_default=False,
    ),
]
Metric = Annotated[
    str | None,
    option(
        None,
        "NAME",
        "Show another metric than each task's own, such as acc_norm, or exact_match,strict-match with its filter.",
        show_default=False,
    ),
]
CHOOSE = "Filter (comma-separated)"
ModelFilter = Annotated[Names, option(CHOOSE, "NAME", "Models.", "--model")]
BudgetFilter = Annotated[Names, option(CHOOSE, "B", "Budgets.", "--budget")]
TaskFilter = Annotated[Names, option(CHOOSE, "NAME", "Tasks, groups or subsets.", "--task")]
MomentFilter = Annotated[Names, option(CHOOSE, "WHEN", "Moments.", "--moment")]
LengthFilter = Annotated[
    Names, option(CHOOSE, "N", "Lengths. Tasks of natural length are always included.", "--length")
]
SeedFilter = Annotated[Names, option(CHOOSE, "N", "Seeds.", "--seed")]
Labels = Annotated[
    Names,
    option(
        None,
        "POLICY=LABEL",
        "Show a policy under this name, such as snapkv=SnapKV. Repeatable or comma-separated.",
        "--label",
    ),
]
Quiet = Annotated[bool, option(OUTPUT, FLAG, "Print only errors and the path of the result.", "--quiet")]
AsJson = Annotated[bool, option(OUTPUT, FLAG, "Print the results as JSON on stdout.", "--json")]
DryRun = Annotated[bool, option(OUTPUT, FLAG, "Show what would be done without doing it.", "--dry-run")]
