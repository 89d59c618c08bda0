"""Tasks of lm-eval by their names: index of names, tasks and groups, contexts of prompts, the harness."""
