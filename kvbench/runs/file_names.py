"""Names of the files in the folder of a run.

They stand alone: `kvbench list runs` looks for files, and need not import pandas for their names.
"""

RESPONSES = "responses.jsonl"
GRID = "grid.yaml"
LOCK = ".lock"
MACHINES = ".machines.json"
CELLS = "cells.parquet"
SAMPLES = "samples.parquet"
METRICS = "metrics.parquet"
