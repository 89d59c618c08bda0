"""A vector autoregression of order 1 on principal components: fit, stability, stationary moments.

Nguyen, Cohan, Ying and others: Make Each Token Count, arXiv 2605.09649, assumption A.1 and figure 8: queries are
projected onto the leading principal directions, and `r_{t+1} = A r_t + b + eta_t` is fitted per context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbench.errors import UserError
from kvbench.stats import Floats


def principal_directions(states: Floats, count: int) -> tuple[Floats, float]:
    """Return the leading principal directions of `states` `[n, d]`, `[d, count]`, and their share of the variance.

    The states are centred to find the directions; their projection is not.
    """
    _, singular_values, directions = np.linalg.svd(states - states.mean(0), full_matrices=False)
    total = float((singular_values**2).sum())
    share = float((singular_values[:count] ** 2).sum()) / total if total > 0 else 1.0
    return directions[:count].T, share


@dataclass(frozen=True)
class Autoregression:
    """`r_{t+1} = matrix r_t + offset + eta_t`, with `eta_t` of covariance `noise`.

    Attributes:
        matrix: `[m, m]`.
        offset: `[m]`.
        noise: `[m, m]`.
    """

    matrix: Floats
    offset: Floats
    noise: Floats

    @property
    def eigenvalues(self) -> npt.NDArray[np.complex128]:
        """Return the eigenvalues of the matrix."""
        return np.asarray(np.linalg.eigvals(self.matrix), dtype=np.complex128)

    @property
    def radius(self) -> float:
        """Return the spectral radius; the process is stable and mean-reverting below 1."""
        return float(np.abs(self.eigenvalues).max())

    def stationary(self) -> tuple[Floats, Floats]:
        """Return mean `[m]` and covariance `[m, m]` of the stationary distribution; NaN if it is not stable."""
        size = len(self.offset)
        if self.radius >= 1:
            return np.full(size, np.nan), np.full((size, size), np.nan)
        mean = np.linalg.solve(np.eye(size) - self.matrix, self.offset)
        # S = A S A^T + noise, with the entries of S as a vector.
        system = np.eye(size * size) - np.kron(self.matrix, self.matrix)
        covariance = np.linalg.solve(system, self.noise.ravel()).reshape(size, size)
        return np.asarray(mean, dtype=np.float64), np.asarray(covariance, dtype=np.float64)

    def innovations(self, paths: Sequence[Floats]) -> Floats:
        """Return `eta_t` of all steps of the paths `[tokens, m]`, `[steps, m]`."""
        before, after = _steps(paths)
        return np.asarray(after - before @ self.matrix.T - self.offset, dtype=np.float64)

    def whitened(self, paths: Sequence[Floats]) -> Floats:
        """Return the innovations with unit covariance, as the fit estimates it, `[steps, m]`."""
        values, vectors = np.linalg.eigh(self.noise)
        scales = np.where(values > 1e-12 * max(values.max(), 1e-300), 1 / np.sqrt(values.clip(1e-300)), 0.0)
        return np.asarray(self.innovations(paths) @ vectors * scales, dtype=np.float64)

    def explained(self, paths: Sequence[Floats]) -> float:
        """Return R² of the prediction one step ahead."""
        _, after = _steps(paths)
        total = float(((after - after.mean(0)) ** 2).sum())
        return 1 - float((self.innovations(paths) ** 2).sum()) / total if total > 0 else float("nan")


def fit_autoregression(paths: Sequence[Floats]) -> Autoregression:
    """Fit by least squares over all steps of the paths `[tokens, m]`.

    Raises:
        UserError: There are too few steps.
    """
    before, after = _steps(paths)
    size = before.shape[1]
    if len(before) < 2 * (size + 1):
        raise UserError(
            f"{len(before)} steps are too few to fit {size} components; use more --rollouts or --new-tokens, or fewer "
            "--components"
        )
    design = np.hstack([before, np.ones((len(before), 1))])
    solution, *_ = np.linalg.lstsq(design, after, rcond=None)
    residuals = after - design @ solution
    noise = residuals.T @ residuals / (len(before) - size - 1)
    coefficients = np.asarray(solution, dtype=np.float64)
    return Autoregression(coefficients[:size].T, coefficients[size], noise)


def _steps(paths: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Return the states before and after every step, `[steps, m]` each."""
    long_enough = [path for path in paths if len(path) > 1]
    if not long_enough:
        raise UserError("no sampled answer has two tokens; use another --task, --temperature or --new-tokens")
    return np.concatenate([path[:-1] for path in long_enough]), np.concatenate([path[1:] for path in long_enough])
