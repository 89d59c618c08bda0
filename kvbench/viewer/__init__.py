"""Runs in a browser: the page of one run, and a page that lists all runs of a folder."""
