"""The HTML report: one file with its data, its styles and its scripts, which needs no network."""

from kvbench.report.page.html import NAME, write_page

__all__ = ["NAME", "write_page"]
