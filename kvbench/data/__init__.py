"""Tables of the Hugging Face hub that tasks read: fetched, recorded and read from its caches."""
