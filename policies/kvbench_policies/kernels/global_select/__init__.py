"""The best entries of a whole cache, over all layers and heads, and the rows they go to."""
