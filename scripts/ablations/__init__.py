"""Ablations: variants of a training, compared on the same questions, as tables with intervals."""
