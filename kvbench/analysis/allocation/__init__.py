"""How policies spread a budget over layers and KV heads."""
