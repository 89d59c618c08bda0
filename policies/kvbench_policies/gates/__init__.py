"""Learned gates: small networks that predict which tokens to keep or to read.

`config` describes a set of gates, `modules` implements token gates and `block_gates` block gates, `files` stores and
finds them, `loaded` caches them in memory, `learned` is the base of scores that use them, `methods` defines their
training, and `convert` imports checkpoints of other projects. Gates only score; they do not change the model's
attention. LoCoCo's convolutions (`convolutions`), which merge entries instead, are stored, found and trained in the
same way.
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
