"""Shipped head profiles, built by `python -m kvbench.profiles.ship`."""
