"""How much eviction changes each head's output, and CriticalKV's bounds on that change."""
