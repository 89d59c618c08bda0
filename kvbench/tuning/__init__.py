"""`kvbench tune`: searches for the parts and parameters that keep the most of a model's answers."""
