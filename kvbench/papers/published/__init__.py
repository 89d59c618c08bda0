"""Published results: browse them, check them, and compare a run with them."""
