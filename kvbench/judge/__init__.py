"""Judges decide whether a response is right; see docs/judge.md."""
