"""How the reference model, and the gates that ship for it, are made and measured."""
