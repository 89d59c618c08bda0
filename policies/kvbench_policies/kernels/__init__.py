"""Kernels: a folder per op, with its oracle, its Triton kernels and its dispatch.

ref.py      the definition in a few lines of torch, exact in float64
triton.py   the kernels; imports triton, and is itself imported on a GPU only
op.py       the public function: custom op, shapes, gradients, blocked torch without a GPU
"""
