"""Shared parts of synthetic task generators: lexicons, words, essays and fitting to length."""
