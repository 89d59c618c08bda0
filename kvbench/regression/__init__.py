"""Regression tests between two runs, and the sample sizes that they need."""
