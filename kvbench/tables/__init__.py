"""A table as a value, its outputs, and how numbers, text and figures look."""
