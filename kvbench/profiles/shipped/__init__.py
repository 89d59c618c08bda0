"""Head profiles that ship with kvbench: `python -m kvbench.profiles.ship` makes them."""
