"""Training of learned policies' gates: `kvbench train gates`."""
