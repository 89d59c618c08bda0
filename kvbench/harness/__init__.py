"""Harnesses: they provide the prompts of a task and score its responses. They never generate."""
