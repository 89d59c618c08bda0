"""Kernels: one folder per op, with its reference, its Triton kernels and its dispatch.

ref.py      reference implementation in a few lines of torch, exact in float64
triton.py   the Triton kernels; imported only on a GPU or under Triton's interpreter
op.py       the public function: custom op, shape checks, gradients, blocked torch without a GPU
"""
