"""Conjugate gradients, as a recurrence on the Lanczos process."""

import torch
from torch import Tensor

from curvoscope.errors import RangeError
from curvoscope.solve.lanczos import Lengths


class ConjugateGradients:
    """x_k = V_k T_k^-1 β_1 e_1, for a positive definite matrix: the error is least in its own norm.

    T = L D L^T has the pivots d_k = α_k - β_k l_k with l_k = β_k / d_{k-1}; the directions W with W L^T = V give
    x_k = x_{k-1} + (z_k / d_k) w_k, z_{k+1} = -l_{k+1} z_k. A pivot that is not positive shows an indefinite matrix.

    Args:
        start: rows (c, n), of the shape of x.
        beta: lengths (c,) of the right-hand sides.
        lengths: those of rows, which this recurrence does not need.
    """

    def __init__(self, start: Tensor, beta: Tensor, lengths: Lengths) -> None:
        self.x = torch.zeros_like(start)
        self._w = torch.zeros_like(start)
        self._z, self._alive = beta, beta > 0
        self._below, self._pivot = torch.zeros_like(beta), torch.ones_like(beta)

    def advance(self, v: Tensor, alpha: Tensor, below: Tensor) -> Tensor:
        """Take the next vector v (c, n) with its column (alpha, below) of T; return the residual norms (c,)."""
        lower = self._below / self._pivot
        pivot = torch.where(self._alive, alpha - self._below * lower, 1.0)
        if bool((pivot <= 0).any()):
            raise RangeError(
                "method",
                f"got 'cg', but the damped matrix is not positive definite: a pivot of {float(pivot.min()):.3g}; "
                "use method='minres', or a larger damping",
            )
        self._w = torch.addcmul(v, lower.to(v.dtype)[:, None], self._w, value=-1)
        step = torch.where(self._alive, self._z / pivot, 0.0)
        self.x.addcmul_(step.to(v.dtype)[:, None], self._w)
        self._z = -below * step
        self._pivot, self._below = pivot, below
        self._alive = self._alive & (below > 0)
        return self._z.abs()
