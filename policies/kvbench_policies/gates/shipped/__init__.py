"""Gates that ship with kvbench: a folder for each, `<folder name of the model>-<kind>`."""
