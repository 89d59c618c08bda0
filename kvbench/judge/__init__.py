"""Judges, which decide whether a response is correct; see docs/judge.md."""
