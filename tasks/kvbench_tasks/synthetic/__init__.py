"""What the generators of synthetic tasks share: lexicons, words, essays and fitting to length."""
