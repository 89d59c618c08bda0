"""Published results, layouts of published tables, and recipes of published experiments."""
