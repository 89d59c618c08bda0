"""Planning, execution and scoring of runs."""
