"""Analyses of what eviction does inside a model: output perturbation, and who gets the budget."""
