"""Attention of a few new queries over ragged segments."""
