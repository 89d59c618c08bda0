"""List the papers' contradictions in docs/published.md: `python docs/make_published.py`.

With `--check` the page is only compared with the list.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvbench.papers.published.check import check, findings_table
from kvbench.papers.published.results import papers
from kvbench.tables.outputs import markdown

PAGE = Path(__file__).parent / "published.md"
BEGIN, END = "<!-- begin: make_published.py -->\n", "<!-- end: make_published.py -->\n"


def page(text: str) -> str:
    """The page with the list between its two marks written anew."""
    found = check(papers().values())
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    if not after:
        raise SystemExit(f"{PAGE} lacks a line {BEGIN.strip()} or {END.strip()}")
    said = (
        f"{found.sums} figures were computed again from others, and {found.repeats} measurements "
        f"are printed in several tables. {len(found.findings)} figures contradict others:"
    )
    return f"{before}{BEGIN}{said}\n\n{markdown(findings_table(found))}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write the page, or check that it is up to date."""
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if "--check" in arguments:
        if new != old:
            print("docs/published.md is out of date; run python docs/make_published.py")
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
