"""Attempts at a model that ranks policies as SmolLM2 does; the card of reference-1 has them."""
