"""Numbers and names as text, safe for a terminal, for Markdown and for a file name."""

from __future__ import annotations

import hashlib
import math
import re

MINUS = "\N{MINUS SIGN}"
DASH = "\N{EN DASH}"

REFERENCE_NOTE = (
    "Model `reference` is kvbench's tiny reference model, trained on the synthetic tasks: "
    "its scores are about policies, not about a real model."
)


def plain(text: object) -> str:
    """Text on one line without control, bidirectional or other unprintable characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def short(text: object, width: int = 44) -> str:
    """Plain text of at most `width` characters; the middle of a longer one is left out."""
    line = plain(text)
    if len(line) <= width:
        return line
    head = (width - 1) * 2 // 3
    return f"{line[:head]}…{line[len(line) - (width - 1 - head) :]}"


def md(text: object) -> str:
    """Text as Markdown that renders as exactly that text, in a table cell as well.

    Characters that Markdown or HTML could read as structure become numeric entities, which no
    reader takes for structure (CommonMark 0.31, section 2.5).
    """
    escaped = re.sub(r"[\\`*_{}\[\]<>()#+!|~&@$]", lambda m: f"&#{ord(m[0])};", plain(text))
    return escaped.replace("://", "&#58;//").replace("www.", "www&#46;")


def code(text: object) -> str:
    """A name as Markdown: a code span where that is safe as it stands, escaped text otherwise."""
    line = plain(text)
    return f"`{line}`" if re.fullmatch(r"[\w.:=,/+-]+", line) else md(line)


def span(text: object) -> str:
    """Any text as a code span, in which nothing is markup; not for a table, which `|` would end.

    The fence is longer than every run of backticks within (CommonMark 0.31, section 6.1).
    """
    line = plain(text)
    if not line:
        return ""
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    # One space at either end is stripped again, if there is one at both and other text between.
    odd = line.startswith(("`", " ")) or line.endswith(("`", " "))
    gap = " " if odd and line.strip() else ""
    return f"{fence}{gap}{line}{gap}{fence}"


def word(text: object) -> str:
    """A name as it stands where nothing in it is markup, as a code span otherwise."""
    line = plain(text)
    return line if re.fullmatch(r"[^\W_]+(?:[._-]+[^\W_]+)*", line) else span(line)


def tokens(length: int) -> str:
    """The length of a task's prompts; 0 is that of data which is as long as it is."""
    return f"{length} tokens" if length else "not sized"


def slug(text: object) -> str:
    """A file name for a name; names that differ give file names that differ."""
    line = str(text)
    safe = re.sub(r"[^a-z0-9._-]+", "-", line).strip("-.")[:60]
    if safe == line:
        return safe
    return f"{safe or 'task'}-{hashlib.sha256(line.encode()).hexdigest()[:6]}"


def number(value: float, *, unit: bool, signed: bool = False) -> str:
    """A score: in points (0 to 100) where the task is scored in [0, 1], as it is otherwise.

    Args:
        value: The score or difference; NaN gives a dash.
        unit: Whether the task is scored in [0, 1].
        signed: Whether to write a plus sign.
    """
    if math.isnan(value):
        return DASH
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    shown = round(100 * value, 1) if unit else float(f"{value:.4g}")
    digits = f"{abs(shown):.1f}" if unit else f"{abs(shown):g}"
    sign = MINUS if shown < 0 else "+" if signed and shown > 0 else ""
    return sign + digits


def interval(lo: float, hi: float, *, unit: bool, signed: bool = False) -> str:
    """An interval such as `[−6.0, −0.4]`; a dash where there is none."""
    if math.isnan(lo) or math.isnan(hi):
        return DASH
    return f"[{number(lo, unit=unit, signed=signed)}, {number(hi, unit=unit, signed=signed)}]"


def percent(share: float) -> str:
    """A share of the full cache as a percentage with three significant digits at most."""
    if not math.isfinite(share):
        return DASH
    value = 100 * share
    return f"{value:.1f}%" if value < 99.95 else f"{value:.0f}%"


def size(value: float) -> str:
    """Bytes with a binary unit and three significant digits."""
    if not math.isfinite(value):
        return DASH
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        del units[0]
    name = units[0]
    digits = 0 if name == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {name}"


def mean_of(tasks: int) -> str:
    """What a mean over a group is called."""
    return f"mean of {tasks} task{'s' * (tasks != 1)}"


def listed(items: list[str], most: int = 12) -> str:
    """Items with commas; a long list is cut and says how many are left out."""
    if len(items) <= most:
        return ", ".join(items)
    return ", ".join(items[:most]) + f" and {len(items) - most} more"
