"""Command line: parses arguments, calls the library and prints."""

from kvbench.cli.app import call, main

__all__ = ["call", "main"]
