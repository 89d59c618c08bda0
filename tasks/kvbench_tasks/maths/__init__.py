"""Shared by the mathematics tasks: prompt, boxed answer, and equality of answers."""
