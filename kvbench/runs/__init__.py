"""How a plan is carried out: on this machine, one model at a time."""
