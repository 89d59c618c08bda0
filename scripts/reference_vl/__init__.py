"""Training and evaluation of the vision-language reference model."""
