"""Every test of this folder writes into memory that was poisoned first."""

from tests.kernels import poisoned

__all__ = ["poisoned"]
