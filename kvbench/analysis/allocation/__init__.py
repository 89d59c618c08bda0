"""How policies distribute a budget over layers and KV heads."""
