"""The figures of published tables, as data: a CSV file per paper and `papers.yaml` about them."""
