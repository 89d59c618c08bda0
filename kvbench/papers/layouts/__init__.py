"""Tables for papers: layouts of published tables, or any others, filled with the results of runs."""
