"""Capacity loss of retention gates: what a head would hold beyond its budget."""
