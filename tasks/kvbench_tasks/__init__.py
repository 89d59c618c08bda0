"""Benchmarks, a folder each, registered as entry points."""
