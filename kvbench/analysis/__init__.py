"""Analyses of eviction inside a model: output perturbation, budget allocation, retention."""
