"""The best entries of a whole cache, all layers and heads together, and the rows they go to."""
