"""Describe the columns of the result tables in docs/results.md: `python docs/make_results.py`.

With `--check` the page is only compared with their declarations in `kvbench.runs.schema`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvbench.runs.schema import CELL_COLUMNS, METRIC_COLUMNS, SAMPLE_COLUMNS, ResultColumn

PAGE = Path(__file__).parent / "results.md"
TABLES = {"cells.parquet": CELL_COLUMNS, "samples.parquet": SAMPLE_COLUMNS, "metrics.parquet": METRIC_COLUMNS}
AVERAGED = "as in `cells.parquet`, for this sample"


def table(columns: Sequence[ResultColumn], *, of_samples: bool) -> str:
    """A row for every meaning, with all columns that share it."""
    groups: list[tuple[list[str], str]] = []
    for column in columns:
        meaning = AVERAGED if of_samples and column.averaged else column.meaning
        if groups and meaning in ("", groups[-1][1]):
            groups[-1][0].append(f"`{column.name}`")
        else:
            groups.append(([f"`{column.name}`"], meaning))
    rows = [f"| {', '.join(names)} | {meaning} |" for names, meaning in groups]
    return "\n".join(["| column | meaning |", "| --- | --- |", *rows, ""])


def page(text: str) -> str:
    """The page with all tables written anew between their marks."""
    for name, columns in TABLES.items():
        begin, end = (f"<!-- {edge}: columns of {name} -->\n" for edge in ("begin", "end"))
        before, _, rest = text.partition(begin)
        _, end_found, after = rest.partition(end)
        if not end_found:
            raise SystemExit(f"{PAGE} lacks a line {begin.strip()} or {end.strip()}")
        columns_table = table(columns, of_samples=name == "samples.parquet")
        text = f"{before}{begin}{columns_table}{end}{after}"
    return text


def main(arguments: list[str]) -> int:
    """Write the page, or check that it is up to date."""
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if "--check" in arguments:
        if new != old:
            print("docs/results.md is out of date; run python docs/make_results.py")
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
