"""Attention whose logits are discounted by retention gates."""
