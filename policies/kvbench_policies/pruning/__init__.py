"""Pruning of visual tokens in the prefill: all text stays, and some visual tokens."""
