"""Benchmarks, one folder each, registered as entry points."""
