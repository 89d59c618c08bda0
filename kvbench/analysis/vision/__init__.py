"""What is kept of images: which visual tokens, and how they share the cache with text."""
