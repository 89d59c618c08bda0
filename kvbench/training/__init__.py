"""Training of the gates that learned policies score with: `kvbench train gates`."""
