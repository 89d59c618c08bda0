"""Retention of a text's tokens by policies: matrices, eviction maps, survival, entries per head."""
