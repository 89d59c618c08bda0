"""Executors: responses are generated in this process, or by Ray workers on one machine or many."""
