"""Errors that a user can fix, and one-line descriptions of plugin errors."""

from __future__ import annotations

import contextlib
import difflib
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

_FEW = 12
"""Maximum number of names in an error message."""

LONGEST = 200
"""Maximum number of characters of a value in a message."""

_LONG_WORD = re.compile(rf"\S{{{LONGEST + 1},}}")
_REPORT = re.compile(r"For details look at .*above report!?")
_NO_TOKENIZER = "Couldn't instantiate the backend tokenizer"
"""Begins transformers' message of several lines about a model without one."""


class UserError(ValueError):
    """Invalid input. The message is one line; the command line prints it and exits with status 2.

    Args:
        message: What is wrong, then what to do. Words of more than `LONGEST` characters, such as paths, are shortened.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shorten_words(message))


class LeftOut(UserError):
    """A task cannot run here and is left out. The message completes "<task> is left out: "."""


class NeedsHub(LeftOut):
    """A task whose data is not available here, usually because the hub cannot be reached."""


class BudgetError(RuntimeError):
    """A policy did not keep exactly as many entries as its budget allows. The cell fails."""


class PluginError(RuntimeError):
    """A plugin (policy, observer, metric) raised. The message is one line; see `plugin_call`."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the machine or the device has run out of memory.

    Compares names and messages to avoid importing torch, whose CPU allocator raises a plain RuntimeError.
    """
    class_names = {base_class.__name__ for base_class in type(error).__mro__}
    if class_names & {"MemoryError", "OutOfMemoryError"}:
        return True
    message = message_of(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in message or "CUDA out of memory" in message)


@contextlib.contextmanager
def plugin_call() -> Iterator[None]:
    """Convert any error of a plugin to a `PluginError`, except out-of-memory errors, which are not the plugin's fault.

    Raises:
        PluginError: The plugin raised; the message gives error and location in one line.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if out_of_memory(error):
            raise
        raise PluginError(reason_of(error)) from error


class BudgetRefused(BudgetError):
    """A policy does not support this budget by design. The message gives the smallest supported budget."""


def shorten(text: str) -> str:
    """Shorten a text of more than `LONGEST` characters to its beginning and end."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:120]}...{text[-60:]}"


def shorten_words(text: str) -> str:
    """Apply `shorten` to each word of a message."""
    return _LONG_WORD.sub(lambda match: shorten(match[0]), text)


def quoted(value: object) -> str:
    """Return the `repr` of a value for a message, of at most `LONGEST` characters."""
    try:
        return shorten(repr(value))
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return f"<{type(value).__name__} of thousands of digits>"


def message_of(error: BaseException) -> str:
    """Return `str(error)`, even if the `__str__` of a plugin's error raises."""
    try:
        return str(error)
    except (Exception, SystemExit):
        return "no message, because its __str__ raises"


def reason_of(error: BaseException) -> str:
    """Describe an error and its location in one line."""
    first_line = shorten_words((message_of(error) or "no message").splitlines()[0])
    if isinstance(error, (BudgetError, PluginError, UserError)):
        return first_line
    stack_frames = traceback.extract_tb(error.__traceback__)
    location = f" ({Path(stack_frames[-1].filename).name}:{stack_frames[-1].lineno})" if stack_frames else ""
    return f"{type(error).__name__}: {first_line}{location}"


def first_lines(error: Exception) -> str:
    """Return an error in one line: its first line, or the first two if the first ends with a colon."""
    message_lines = [message_line.strip() for message_line in message_of(error).splitlines() if message_line.strip()]
    if not message_lines:
        return type(error).__name__
    if message_lines[0].startswith(_NO_TOKENIZER):
        return "it has no tokenizer that can be loaded; copy the tokenizer's files (tokenizer.json) into its folder"
    summary = " ".join(message_lines[:2]) if message_lines[0].endswith(":") else message_lines[0]
    # kvbench silences the report of transformers, so nothing is "above".
    summary = _REPORT.sub("", summary).strip()
    is_plain = isinstance(error, (OSError, ValueError, ImportError))
    return summary if is_plain else f"{type(error).__name__}: {summary}"


def nearest(unknown_name: str, known_names: Iterable[str], max_matches: int = 3) -> str:
    """Suggest the known names closest to an unknown one.

    Returns:
        `"; did you mean a, b?"`, or an empty string if no name is close.
    """
    names_by_lower = {candidate.lower(): candidate for candidate in sorted(set(known_names))}
    lower_name = unknown_name.lower()
    close_matches = difflib.get_close_matches(lower_name, names_by_lower, n=max_matches, cutoff=0.6)
    close_matches += [
        candidate
        for candidate in names_by_lower
        if candidate not in close_matches and lower_name and lower_name in candidate
    ]
    close_matches = [names_by_lower[candidate] for candidate in close_matches]
    return f"; did you mean {', '.join(close_matches[:max_matches])}?" if close_matches else ""


def unknown(kind: str, name: object, names: Iterable[str], list_command: str = "") -> UserError:
    """Return the error for an unknown name.

    Args:
        kind: What the name should be, such as "task".
        name: The unknown name.
        names: All known names. The closest are suggested. If none is close, up to 12 names are all listed; of more
            names, the least distant ones.
        list_command: Command that lists all names, such as "kvbench list tasks".
    """
    known_names = list(names)
    name_text = name if isinstance(name, str) else quoted(name)
    hint = nearest(name_text, known_names)
    if not hint and len(known_names) <= _FEW:
        hint = f"; choose from {', '.join(known_names) or 'nothing: none exists'}"
    elif not hint:
        near_matches = difflib.get_close_matches(name_text.lower(), known_names, cutoff=0.3)
        hint = f"; the nearest are {', '.join(near_matches)}" if near_matches else ""
    list_hint = f" ({list_command} shows all)" if list_command else ""
    return UserError(f"unknown {kind} {quoted(name)}{hint}{list_hint}")
