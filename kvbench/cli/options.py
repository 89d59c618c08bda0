"""Options that several commands have, in one wording. Nothing heavy is imported here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

from kvbench.cli import complete
from kvbench.runs.options import FLAG, MODEL, OUTPUT, Option, options

Names = list[str] | None
_Command = TypeVar("_Command", bound=Callable[..., None])


def split_names(names: Sequence[str] | None) -> list[str]:
    """The names of an option that takes several with commas."""
    return [name.strip() for text in names or [] for name in text.split(",") if name.strip()]


def option(panel: str | None, metavar: str, text: str, *flags: str, **more: Any) -> Any:
    """An option of a command.

    Args:
        panel: Heading in the help; None for "Options".
        metavar: What the help shows for the value.
        text: What the help says.
        flags: Spellings of the flag; none for the name of the parameter.
        more: Further arguments of `typer.Option`.
    """
    return typer.Option(*flags, metavar=metavar, help=text, rich_help_panel=panel, **more)


def grid_options(
    *names: str, after: str = "", help: Mapping[str, str] | None = None
) -> Callable[[_Command], _Command]:
    """Give a command options of a grid; it receives those that were given as keyword arguments.

    Args:
        names: Fields of `kvbench.runs.options.GridOptions`; none for all.
        after: Own option of the command behind which the help shows them; "" for the beginning.
        help: Help texts that differ in this command, by field.
    """
    declared = dict(options())

    def decorate(command: _Command) -> _Command:
        parameters: list[inspect.Parameter] = []
        grid = [_parameter(name, declared[name], help or {}) for name in names or declared]
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            if parameter.name == after:
                parameters += grid
        parameters = parameters if after else [*grid, *parameters]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _parameter(name: str, declared: Option, help: Mapping[str, str]) -> inspect.Parameter:
    """The parameter of a command for an option of the grid; None where it is not given."""
    complete_with = getattr(complete, declared.complete) if declared.complete else None
    flag = option(
        declared.panel,
        declared.metavar,
        help.get(name, declared.help),
        *filter(None, [declared.spelling]),
        autocompletion=complete_with,
    )
    kind: Any = list[str] if declared.kind is list else declared.kind
    return inspect.Parameter(
        declared.flag or name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, flag],
    )


def given_values(values: Mapping[str, Any], but: Collection[str] = ()) -> dict[str, Any]:
    """The options that were given, by name, as `Grid.from_dict` takes them.

    Args:
        values: All options; None and empty lists stand for those that were not given.
        but: Names to leave out.
    """
    return {k: v for k, v in values.items() if v not in (None, [], ()) and k not in but}


OneModel = Annotated[
    str,
    option(
        MODEL,
        "NAME",
        "reference (the default), a name of kvbench list models, a folder, a GGUF file or a hub "
        "id.",
        autocompletion=complete.models,
        show_default=False,
    ),
]
Quiet = Annotated[
    bool, option(OUTPUT, FLAG, "Print only errors and the path of the result.", "--quiet")
]
AsJson = Annotated[bool, option(OUTPUT, FLAG, "Print the results as JSON on stdout.", "--json")]
DryRun = Annotated[bool, option(OUTPUT, FLAG, "Show what would be done; do nothing.", "--dry-run")]
