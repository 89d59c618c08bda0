"""`kvbench bench`: time and memory of policies beside the full cache."""
