"""Kernels of the engine: one folder per op.

ref.py      the definition in a few lines of torch, exact in float64
triton.py   the Triton kernels; imported only on a GPU or under Triton's interpreter

`launch` is shared with the kernels of policies. The module that needs an op chooses between kernel and torch code.
"""
