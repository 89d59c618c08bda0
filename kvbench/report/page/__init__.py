"""The HTML report: one file with data, styles and scripts, which needs no network."""

from kvbench.report.page.html import NAME, write_page

__all__ = ["NAME", "write_page"]
