"""Eviction policies, one method a file, each registered as an entry point."""
