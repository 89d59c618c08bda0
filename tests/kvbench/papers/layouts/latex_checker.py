"""A strict reader of the LaTeX that tables are written in, for machines without TeX."""

from __future__ import annotations

import re

_COMMANDS = {
    "begin", "end", "centering", "caption", "smallskip", "setlength", "tabcolsep", "sbox",
    "toprule", "midrule", "bottomrule", "cmidrule", "multicolumn", "textbf", "underline", "texttt",
    "rlap", "shortstack", "ifdim", "wd", "linewidth", "resizebox", "usebox", "else", "fi", "par",
    "footnotesize", "raggedright", "textbackslash", "textasciicircum", "textasciitilde",
    "textless", "textgreater", "textbar", "textasciigrave", "textendash", "ldots",
}  # fmt: skip
_MATH = {"times", "infty", "circ", "cdot", "star", "downarrow", "Delta", "alpha", "beta", "theta"}
_ESCAPED = set("{}$&#_%\\")
_TOKEN = re.compile(r"\\([a-zA-Z]+)\*?|\\(.)|([{}&$#_^~])|(.)", re.DOTALL)
_TABULAR = re.compile(r"\\begin\{tabular\}\{([lr]+)\}(.*?)\\end\{tabular\}", re.DOTALL)
_RULE = re.compile(r"\\(?:top|mid|bottom)rule|(?:\\cmidrule\(lr\)\{\d+-\d+\})+")


def check(text: str, letters: set[str]) -> None:
    """Check a float with a table.

    Args:
        text: The LaTeX.
        letters: Every character that may stand in it.

    Raises:
        AssertionError: It would not compile, or not with the packages that it names.
    """
    needs, _, rest = text.partition("\n")
    assert needs == r"% \usepackage{booktabs,graphicx}"
    assert not set(rest) - letters - {"\n"}, "a letter that LaTeX may not have"
    rest = re.sub(r"(?<!\\)%$", "", rest, flags=re.MULTILINE)  # a line break that is no space
    _check_tokens(rest)
    environments: list[str] = []
    for kind, name in re.findall(r"\\(begin|end)\{([a-z*]+)\}", rest):
        if kind == "begin":
            environments.append(name)
        else:
            assert environments.pop() == name
    assert not environments
    (table,) = _TABULAR.findall(rest)
    _check_rows(*table)


def _check_tokens(text: str) -> None:
    depth, math = 0, False
    for command, escaped, special, other in _TOKEN.findall(text):
        if command:
            assert command in (_MATH if math else _COMMANDS), command
        elif escaped:
            assert escaped in _ESCAPED, escaped
        elif special == "{":
            depth += 1
        elif special == "}":
            depth -= 1
            assert depth >= 0
        elif special == "$":
            math = not math
        elif special == "^":
            assert math
        else:
            assert special in ("", "&"), special
            assert other != "%", "what follows would be a comment"
    assert depth == 0
    assert not math


def _check_rows(spec: str, body: str) -> None:
    lines = [line.strip() for line in body.strip().split("\n")]
    rows = [line for line in lines if not _RULE.fullmatch(line)]
    assert rows
    for row in rows:
        assert row.endswith(r"\\"), row
        assert not row.startswith(("[", "*")), "an argument of the row before"
        cells = row.removesuffix(r"\\").replace(r"\&", "")
        spans = [int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", cells)]
        assert cells.count("&") + 1 + sum(spans) == len(spec), row
