"""Models that `--model` knows by name and that other packages on the package index carry."""
