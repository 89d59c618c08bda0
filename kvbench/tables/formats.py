"""Tables as file content."""

from __future__ import annotations

from enum import StrEnum

from kvbench.tables.outputs import csv, html, html_text, latex, markdown
from kvbench.tables.table import Table

_LATEX_NEEDS = "% \\usepackage{booktabs,graphicx}\n"

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }}
figure {{ margin: 0; overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
caption {{ caption-side: top; font-weight: 600; padding-bottom: .6rem; text-align: left; }}
thead, tbody {{ border-bottom: 1px solid; }}
thead {{ border-top: 2px solid; }}
tbody:last-of-type {{ border-bottom-width: 2px; }}
th, td {{ padding: .15rem .6rem; text-align: right; white-space: nowrap; }}
th[colspan] {{ text-align: center; }}
.text {{ text-align: left; }}
sup {{ display: inline-block; line-height: 0; width: 0; }}
.note {{ font-size: .85rem; margin: .4rem 0; max-width: 60rem; }}
</style>
<figure>
{table}</figure>
</html>
"""


class Format(StrEnum):
    """File format of a table."""

    LATEX = "latex"
    MARKDOWN = "markdown"
    CSV = "csv"
    HTML = "html"


def format_table(table: Table, output_format: Format) -> str:
    """Return a table in a file format, with a trailing line break.

    LaTeX output is a float whose first line names the required packages; HTML output is a complete page.
    """
    match output_format:
        case Format.LATEX:
            return _LATEX_NEEDS + latex(table, fit=True)
        case Format.MARKDOWN:
            return markdown(table) + "\n"
        case Format.CSV:
            return csv(table)
        case Format.HTML:
            return _PAGE.format(title=_title(table), table=html(table))


def _title(table: Table) -> str:
    """Return the title without markup."""
    return html_text(table.title).replace("<code>", "").replace("</code>", "")
