"""Escaping of text for terminals, Markdown, LaTeX and file names."""

from __future__ import annotations

import hashlib
import re
import unicodedata

REFERENCE_MODEL = "reference"
REFERENCE_NOTE = (
    f"The model {REFERENCE_MODEL} is kvbench's own tiny model, trained on synthetic tasks: its "
    "scores compare policies and say nothing about real models."
)


_TEX = {c: f"\\{c}" for c in "{}$&#_%"} | {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",
    "*": "{*}",
    "\N{MINUS SIGN}": "$-$",
    "\N{EN DASH}": r"\textendash{}",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{INFINITY}": r"$\infty$",
    "\N{DEGREE SIGN}": r"$^\circ$",
    "\N{MIDDLE DOT}": r"$\cdot$",
    "\N{BLACK STAR}": r"$\star$",
    "\N{DOWNWARDS ARROW}": r"$\downarrow$",
    "\N{HORIZONTAL ELLIPSIS}": r"\ldots{}",
    "\N{SUPERSCRIPT PLUS SIGN}": "$^{+}$",
    "\N{SUPERSCRIPT MINUS}": "$^{-}$",
    "\N{GREEK CAPITAL LETTER DELTA}": r"$\Delta$",
    "\N{GREEK SMALL LETTER ALPHA}": r"$\alpha$",
    "\N{GREEK SMALL LETTER BETA}": r"$\beta$",
    "\N{GREEK SMALL LETTER THETA}": r"$\theta$",
    # Letters and quotes that need no package and exist in every font encoding.
    **{c: c for c in "ßæœøåłÆŒØÅŁ‘’“”"},
}
_ACCENTS = "\N{COMBINING GRAVE ACCENT}\N{COMBINING ACUTE ACCENT}\N{COMBINING CIRCUMFLEX ACCENT}\
\N{COMBINING TILDE}\N{COMBINING DIAERESIS}\N{COMBINING CARON}\N{COMBINING CEDILLA}"


def plain(text: object) -> str:
    """Return text on one line without control, bidirectional or other unprintable characters."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in str(text)
    )


def short(text: object, width: int = 44) -> str:
    """Return plain text of at most `width` characters; the middle of longer text is removed."""
    plain_text = plain(text)
    if len(plain_text) <= width:
        return plain_text
    head_length = (width - 1) * 2 // 3
    return f"{plain_text[:head_length]}…{plain_text[len(plain_text) - (width - 1 - head_length) :]}"


def md(text: object, *, start: bool = True) -> str:
    """Escape text for Markdown, including table cells.

    Characters that Markdown or HTML could interpret as structure become numeric entities, which are never structure
    (CommonMark 0.31, section 2.5). Underscores within words need no escape.

    Args:
        text: The text.
        start: Whether the text can be at the start of a line.
    """
    structure_pattern = r"[\\`*{}\[\]<>#+!|~&@$]|(?<![^\W_])_|_(?![^\W_])"
    escaped = re.sub(structure_pattern, lambda match: f"&#{ord(match[0])};", plain(text))
    if start:  # "- ", "1. " and "1) " begin a list there, "--" a heading, four spaces begin code
        list_marker = re.match(r"\d*[.)](?= |$)|-(?=[- ]|$)| ", escaped)
        if list_marker:
            last_index = list_marker.end() - 1
            escaped = f"{escaped[:last_index]}&#{ord(escaped[last_index])};{escaped[last_index + 1 :]}"
    return escaped.replace("://", "&#58;//").replace("www.", "www&#46;")


def code(text: object) -> str:
    """Return a name as Markdown: as a code span if that is safe, otherwise as escaped text."""
    plain_text = plain(text)
    return f"`{plain_text}`" if re.fullmatch(r"[\w.:=,/+-]+", plain_text) else md(plain_text)


def span(text: object) -> str:
    """Return any text as a Markdown code span; not for tables, where `|` would end the cell.

    The fence is longer than every run of backticks in the text (CommonMark 0.31, section 6.1).
    """
    plain_text = plain(text)
    if not plain_text:
        return ""
    fence = "`" * (max((len(backtick_run) for backtick_run in re.findall("`+", plain_text)), default=0) + 1)
    # Markdown strips one space at each end if both ends have one and the text is not blank.
    needs_padding = plain_text.startswith(("`", " ")) or plain_text.endswith(("`", " "))
    padding = " " if needs_padding and plain_text.strip() else ""
    return f"{fence}{padding}{plain_text}{padding}{fence}"


def tex(text: object) -> str:
    r"""Escape text for LaTeX, including the start of a table row.

    Letters that no pdfLaTeX font has are spelled as in Python, such as `\u4e2d`.
    """
    # `\\` takes a following `[` or `*` as its argument, and `--` becomes a dash.
    return "".join(map(_tex_char, plain(text))).replace("--", "-{}-")


def _tex_char(character: str) -> str:
    if character in _TEX or character.isascii():
        return _TEX.get(character, character)
    letter, *accents = list(unicodedata.normalize("NFD", character))
    # LaTeX sets these composed letters of Latin-1 and Latin Extended-A with any font.
    if character <= "\u017f" and len(accents) == 1 and accents[0] in _ACCENTS and letter.isascii():
        return character
    return "".join(_TEX.get(escaped_char, escaped_char) for escaped_char in character.encode("unicode_escape").decode())


def word(text: object) -> str:
    """Return a name unchanged if it contains no markup, otherwise as a code span."""
    plain_text = plain(text)
    return plain_text if re.fullmatch(r"[^\W_]+(?:[._-]+[^\W_]+)*", plain_text) else span(plain_text)


def tokens(length: int) -> str:
    """Return the length of a task's prompts as text; 0 stands for data that kvbench does not resize."""
    return f"{length} tokens" if length else "natural length"


def slug(text: object) -> str:
    """Return a file name for a name; different names give different file names."""
    full_name = str(text)
    safe_name = re.sub(r"[^a-z0-9._-]+", "-", full_name).strip("-.")[:60]
    if safe_name == full_name:
        return safe_name
    return f"{safe_name or 'task'}-{hashlib.sha256(full_name.encode()).hexdigest()[:6]}"


def mean_of(task_count: int) -> str:
    """Return the name of a mean over a group."""
    return f"mean of {counted(task_count, 'task')}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as `1 question` or `3 questions`."""
    return f"{count} {noun}{'s' * (count != 1)}"


def listed(items: list[str], max_items: int = 12) -> str:
    """Join items with commas; a long list is shortened to `a, b and 3 more`."""
    if len(items) <= max_items:
        return ", ".join(items)
    return ", ".join(items[:max_items]) + f" and {len(items) - max_items} more"
