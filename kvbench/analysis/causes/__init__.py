"""Causes: why a policy loses a sample that the full cache answers, by interventions on the kept entries."""
