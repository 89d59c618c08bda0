"""`kvbench bench`: time and memory of policies against the full cache."""
