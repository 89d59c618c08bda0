"""Hugging Face hub tables that tasks read: fetched, recorded and read from the hub's caches."""
