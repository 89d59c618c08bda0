"""Capacity loss of retention gates: the entries that a head would hold beyond its budget."""
