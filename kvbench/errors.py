"""Errors that a user can fix, and the line that describes what a plugin raised."""

from __future__ import annotations

import contextlib
import difflib
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

_FEW = 12
"""Names that an error message lists at most."""

LONGEST = 200
"""Characters of a value that a message shows at most."""

_LONG_WORD = re.compile(rf"\S{{{LONGEST + 1},}}")
_REPORT = re.compile(r"For details look at .*above report!?")


class UserError(ValueError):
    """Wrong input. The message is one line; the command line prints it and exits with status 2.

    Args:
        message: What is wrong, then what to do. Words of more than `LONGEST` characters, such as
            paths, are shortened.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shorten_words(message))


class LeftOut(UserError):
    """A task cannot run here and is left out. The message completes "<leaf> is left out: "."""


class NeedsHub(LeftOut):
    """A task's data is not available here, usually because the hub cannot be reached."""


class BudgetError(RuntimeError):
    """A policy did not keep exactly as many entries as its budget allows. The cell fails."""


class PluginError(RuntimeError):
    """A plugin (policy, observer, metric) raised. The message is one line; see `plugin_call`."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the machine or the device has run out of memory.

    Goes by names and messages, so that it needs no import of torch: torch's CPU allocator raises a
    plain RuntimeError.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError"}:
        return True
    text = message_of(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text or "CUDA out of memory" in text
    )


@contextlib.contextmanager
def plugin_call() -> Iterator[None]:
    """Turn whatever a plugin raises into a `PluginError`.

    Running out of memory is never the plugin's failure: that error passes through unchanged.

    Raises:
        PluginError: The plugin raised; the message says what and where, in one line.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if out_of_memory(error):
            raise
        raise PluginError(reason_of(error)) from error


class BudgetRefused(BudgetError):
    """A policy cannot meet this budget by design. The message says from which budget on it can."""


def shorten(text: str) -> str:
    """Keep the beginning and the end of a text of more than `LONGEST` characters."""
    if len(text) <= LONGEST:
        return text
    return f"{text[:120]}...{text[-60:]}"


def shorten_words(text: str) -> str:
    """Apply `shorten` to each word of a message."""
    return _LONG_WORD.sub(lambda word: shorten(word[0]), text)


def quoted(value: object) -> str:
    """Return the `repr` of a value for a message, of at most `LONGEST` characters."""
    try:
        return shorten(repr(value))
    except ValueError:  # Python spells no integer of more than 4,300 digits
        return f"<{type(value).__name__} of thousands of digits>"


def message_of(error: BaseException) -> str:
    """Return `str(error)`; an error of a plugin may have a `__str__` that raises."""
    try:
        return str(error)
    except (Exception, SystemExit):
        return "its message cannot be read, because its __str__ raises"


def reason_of(error: BaseException) -> str:
    """Describe in one line what was raised, and where."""
    text = shorten_words((message_of(error) or "no message").splitlines()[0])
    if isinstance(error, (BudgetError, PluginError, UserError)):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"


def first_lines(error: Exception) -> str:
    """An error in one line; its first line alone if that is a sentence of its own."""
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    # transformers logs its report, which kvbench silences, so nothing is "above".
    text = _REPORT.sub("", text).strip()
    plain = isinstance(error, (OSError, ValueError, ImportError))
    return text if plain else f"{type(error).__name__}: {text}"


def nearest(name: str, names: Iterable[str], n: int = 3) -> str:
    """Suggest the known names closest to an unknown one.

    Args:
        name: The unknown name.
        names: All known names.
        n: The largest number of suggestions.

    Returns:
        `"; did you mean a, b?"`, or an empty string if no name is close.
    """
    known = {k.lower(): k for k in sorted(set(names))}
    low = name.lower()
    close = difflib.get_close_matches(low, known, n=n, cutoff=0.6)
    close += [k for k in known if k not in close and low and low in k]
    close = [known[k] for k in close]
    return f"; did you mean {', '.join(close[:n])}?" if close else ""


def unknown(kind: str, name: object, names: Iterable[str], see: str = "") -> UserError:
    """Make the error for a name that is not known.

    Args:
        kind: What the name should be, such as "task".
        name: The unknown name.
        names: All known names. The nearest are suggested. If none is close, a few names are listed
            in full, and of many the least distant.
        see: The command that lists all names, such as "kvbench list tasks".
    """
    known = list(names)
    text = name if isinstance(name, str) else quoted(name)
    hint = nearest(text, known)
    if not hint and len(known) <= _FEW:
        hint = f"; choose from {', '.join(known) or 'nothing: none exists'}"
    elif not hint:
        near = difflib.get_close_matches(text.lower(), known, cutoff=0.3)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
    shown = f" ({see} shows all)" if see else ""
    return UserError(f"unknown {kind} {quoted(name)}{hint}{shown}")
