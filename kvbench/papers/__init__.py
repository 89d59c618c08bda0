"""What papers report: published results, layouts of tables, recipes of experiments."""
