"""Learned gates: small networks that predict which tokens are worth keeping, or reading.

`config` describes a set of gates, `modules` computes those of tokens and `block_gates` those of
blocks, `files` stores and finds them, `loaded` keeps them in memory, `learned` is the base of
scores that read them, `methods` says how they are trained, and `convert` reads checkpoints of other
projects. Gates only score: they do not change the model's attention. The convolutions of LoCoCo
(`convolutions`), which merge instead, are stored, found and trained in the same way.
"""

from kvbench_policies.gates.config import GateConfig
from kvbench_policies.gates.convolutions import ConvolutionConfig, MergeConvolutions
from kvbench_policies.gates.files import find, fingerprint, load, save
from kvbench_policies.gates.modules import RetentionGates

__all__ = [
    "ConvolutionConfig",
    "GateConfig",
    "MergeConvolutions",
    "RetentionGates",
    "find",
    "fingerprint",
    "load",
    "save",
]
