"""Tables for a paper: the layouts of published tables, and any other, filled with runs' figures."""
