"""Learned gates: small networks that predict which tokens are worth keeping, or reading.

`config` describes a set of gates, `modules` computes those of tokens and `block_gates` those of
blocks, `files` stores and finds them, `learned` is what the policies that read them share,
`methods` says how they are trained, and `convert` reads checkpoints of other projects. Gates only
score: they do not change the model's attention.
"""

from kvbench_policies.gates.config import GateConfig
from kvbench_policies.gates.files import find, fingerprint, load, save
from kvbench_policies.gates.modules import RetentionGates

__all__ = ["GateConfig", "RetentionGates", "find", "fingerprint", "load", "save"]
