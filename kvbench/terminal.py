"""Output filter for terminals, pipes and logs.

Names and messages come from models, plugins and files. Unfiltered, they could move the cursor, recolour the screen or
hide text, and some terminals cannot show all of their characters. `filtered` puts a `TerminalStream` in front of stdout
and stderr, and `console` returns a rich console with clean output; both use `printable`.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import IO, Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_UNSAFE = re.compile(r"[^ -~\n\t]")
_PROGRESS = re.compile(r"(?:\r|(?:\x1b\[A)+|\n+(?:\x1b\[A)*)")
"""Prefix of the lines that tqdm writes, which shows downloads from the hub."""

_FALLBACKS = {
    "\N{MINUS SIGN}": "-",
    "\N{EN DASH}": "-",
    "\N{EM DASH}": "-",
    "\N{HORIZONTAL ELLIPSIS}": "~",  # one column, like the ellipsis, so that tables stay aligned
    "\N{MIDDLE DOT}": "-",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{DEGREE SIGN}": "*",
    "\N{DOWNWARDS ARROW}": "v",
    "\N{UPWARDS ARROW}": "^",
    "\N{RIGHTWARDS ARROW}": ">",
    "\N{LEFT SINGLE QUOTATION MARK}": "'",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{LEFT DOUBLE QUOTATION MARK}": '"',
    "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
    "\N{BULLET}": "*",
    "\N{INFINITY}": "inf",
    "\N{ALMOST EQUAL TO}": "~",
    "\N{NO-BREAK SPACE}": " ",
}
_BOXES = dict.fromkeys("─━╸╺═", "-") | dict.fromkeys("│┃║", "|")
_ERRORS = "kvbench.fallback"


class OutputError(Exception):
    """Writing to stdout failed. The message is one line; `closed` is True if the reader has gone."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write the output: {error.strerror or error}")
        self.closed = isinstance(error, BrokenPipeError)


def printable(raw_text: str) -> str:
    r"""Replace control, bidirectional and other invisible characters by escapes such as `\x1b`.

    Line breaks and tabs stay. The text may contain lone surrogates.
    """
    return _UNSAFE.sub(lambda match: _shown(match[0]), raw_text)


def _shown(character: str) -> str:
    if character.isprintable() or character == "\N{NO-BREAK SPACE}":
        return character
    return character.encode("unicode_escape").decode()


def _fallback(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks: typography by look-alikes, letters by escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    unencodable = error.object[error.start : error.end]
    replacements = (
        _FALLBACKS.get(character) or _BOXES.get(character) or _escape(character) for character in unencodable
    )
    return "".join(replacements), error.end


def _escape(character: str) -> str:
    if 0x2500 <= ord(character) < 0x2580:  # a corner or crossing of a table
        return "+"
    return character.encode("ascii", "backslashreplace").decode()


codecs.register_error(_ERRORS, _fallback)


class TerminalStream:
    """A text stream in front of stdout or stderr.

    Args:
        stream: Where to write.
        clean: Whether to pass the text through `printable`.
        strict: Whether a failed write raises `OutputError`; otherwise it is ignored, because messages must never stop a
            run.
    """

    def __init__(self, stream: IO[str], *, clean: bool, strict: bool) -> None:
        self._stream, self._clean, self._strict = stream, clean, strict

    @property
    def rich_proxied_file(self) -> IO[str]:
        """Unfiltered stream for rich, whose own escape sequences must pass. See `console`."""
        return cast(TextIO, TerminalStream(self._stream, clean=False, strict=self._strict))

    def write(self, text: str) -> int:
        """Write a text.

        Raises:
            OutputError: The disk is full, or the reader has gone.
        """
        prefix = ""
        if self._clean:
            if not self._strict and (match := _PROGRESS.match(text)):
                prefix, text = match[0], text[match.end() :]
            text = printable(text)
        with self._failing():
            self._stream.write(prefix + text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for text_line in lines:
            self.write(text_line)

    def flush(self) -> None:
        """Flush the buffer.

        Raises:
            OutputError: As for `write`.
        """
        with self._failing():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _discard(self._stream)
            if self._strict:
                raise OutputError(error) from None


def _discard(stream: IO[str]) -> None:
    """Discard the buffer; otherwise Python would try to write it again at exit, and complain."""
    with contextlib.suppress(OSError, ValueError):
        null_descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_descriptor, stream.fileno())
        os.close(null_descriptor)


@contextlib.contextmanager
def filtered() -> Iterator[None]:
    """Filter stdout and stderr while the block runs.

    Raises:
        OutputError: Stdout could not be written.
    """
    _open_closed_streams()
    original_streams = sys.stdout, sys.stderr
    for stream in original_streams:
        with contextlib.suppress(AttributeError, ValueError):  # not every stream has an encoding
            cast(Any, stream).reconfigure(errors=_ERRORS)
    output_stream = TerminalStream(original_streams[0], clean=True, strict=True)
    sys.stdout = cast(TextIO, output_stream)
    sys.stderr = cast(TextIO, TerminalStream(original_streams[1], clean=True, strict=False))
    try:
        yield
        output_stream.flush()
    finally:
        sys.stdout, sys.stderr = original_streams


def _open_closed_streams() -> None:
    """Open standard streams that the shell has closed (`>&-`), so that writing to stdout fails properly.

    Otherwise `sys.stdout` is None, and the next opened file gets the descriptor of stdout and receives its output.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The smallest free descriptor is used. Output to stderr may be lost.
            os.open(os.devnull, os.O_WRONLY if descriptor == 2 else os.O_RDONLY)
    if cast(Any, sys.stdout) is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if cast(Any, sys.stderr) is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


class _Filtered(Console):
    """A console that escapes all sequences except its own styles and cursor moves."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or _UNSAFE.search(segment.text) is None:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def is_screen(rich_console: Console) -> bool:
    """Return whether the width of a console is meant: that of a terminal, or `COLUMNS` of the user."""
    return rich_console.is_terminal or "COLUMNS" in os.environ


def print_message(rich_console: Console, message: str, style: str = "") -> None:
    """Print a message, broken at spaces to the width of a screen; in a pipe or a log, its lines stay whole.

    A word that is wider than the screen, such as a path, stays whole so that it can be copied.
    """
    if is_screen(rich_console):
        wrapper = textwrap.TextWrapper(rich_console.width, break_long_words=False, break_on_hyphens=False)
        message = "\n".join(wrapper.fill(line) for line in message.split("\n"))
    rich_console.print(Text(message, style), soft_wrap=True)


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a rich console whose text cannot contain terminal commands.

    Args:
        stderr: Write to stderr instead of stdout.
        width: Number of columns; None for that of the terminal.
    """
    stream = sys.stderr if stderr else sys.stdout
    # Passed as a file, because rich replaces sys.stderr while a progress bar is shown, and would otherwise find only
    # the filtered stream.
    target_stream = getattr(stream, "rich_proxied_file", stream)
    return _Filtered(file=target_stream, width=width)
