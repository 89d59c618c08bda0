"""Tables and their output formats; formatting of numbers, text and figures."""
