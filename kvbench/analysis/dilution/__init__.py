"""`kvbench analyze dilution`: attention that useless tokens take, before and after an eviction."""
