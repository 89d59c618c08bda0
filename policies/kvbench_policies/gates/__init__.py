"""Learned gates: small networks that say of every token how long it will be worth keeping.

`config` says what a set of gates is, `modules` computes them, `files` keeps them on disk, `learned`
is what a score that reads them builds on, `convert` reads the checkpoints of others. Gates only
score: the attention of the model stays its own.
"""

from kvbench_policies.gates.config import GateConfig
from kvbench_policies.gates.files import find, fingerprint, load, save
from kvbench_policies.gates.modules import RetentionGates, build

__all__ = ["GateConfig", "RetentionGates", "build", "find", "fingerprint", "load", "save"]
