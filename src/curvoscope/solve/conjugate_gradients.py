"""Conjugate gradients with the least residual, as a recurrence on the Lanczos process."""

import torch
from torch import Tensor

from curvoscope.errors import RangeError
from curvoscope.solve.lanczos import LanczosProcess


class ConjugateGradients:
    """y_k = V_k T_k^-1 β_1 e_1 for a positive definite matrix, smoothed: |b - A x_k| falls with every step.

    T = L D L^T has the pivots d_k = α_k - β_k l_k with l_k = β_k / d_{k-1}; the directions W with W L^T = V give
    y_k = y_{k-1} + (z_k / d_k) w_k, z_{k+1} = -l_{k+1} z_k. A pivot that is not positive shows an indefinite matrix.
    The error of y_k is least in the norm of A, but its residual r_k = z_{k+1} q_{k+1} may rise. So x_k is the point
    between x_{k-1} and y_k with the least residual s_k (Zhou and Walker 1994). Without a preconditioner x_k is that of
    MINRES. It costs no product.

    Args:
        start: the right-hand sides, rows (c, n).
        process: that begins with them.
    """

    def __init__(self, start: Tensor, process: LanczosProcess) -> None:
        self.x, self.residual = torch.zeros_like(start), start.clone()
        self._process, beta = process, process.beta
        self._square = process.dot(start, start)  # |s|²
        self._y, self._w = torch.zeros_like(start), torch.zeros_like(start)
        self._z, self.alive = beta, beta > 0
        self._below, self._pivot = torch.zeros_like(beta), torch.ones_like(beta)

    def advance(self, v: Tensor, alpha: Tensor, below: Tensor) -> Tensor:
        """Take the next vector v (c, n) with its column (alpha, below) of T; return the residual norms (c,)."""
        lower = self._below / self._pivot
        pivot = torch.where(self.alive, alpha - self._below * lower, 1.0)
        if bool((pivot <= 0).any()):
            raise RangeError(
                "method",
                f"got 'cg', but the damped matrix is not positive definite: a pivot of {float(pivot.min()):.3g}; "
                "use method='minres', or a larger damping",
            )
        self._w = torch.addcmul(v, lower.to(v.dtype)[:, None], self._w, value=-1)
        step = torch.where(self.alive, self._z / pivot, 0.0)
        self._y.addcmul_(step.to(v.dtype)[:, None], self._w)
        self._z = -below * step
        self._pivot, self._below = pivot, below
        self.alive = self.alive & (below > 0)
        return self._smooth()

    def _smooth(self) -> Tensor:
        """Move x towards y as far as |s| falls: s + η (r - s) with η = <s, s - r> / |s - r|². Returns |s|."""
        process, square = self._process, self._square
        inner = self._z * process.dot(self.residual, process.q)  # <s, r>
        distance = square - 2 * inner + (self._z * process.lengths).square()  # |s - r|²
        share = torch.where(distance > 0, (square - inner) / distance, 0.0)
        self._square = (square - share * (square - inner)).clamp_min(0)
        share, moved = (part.to(self.x.dtype)[:, None] for part in (share, share * self._z))
        self.residual.mul_(1 - share).addcmul_(moved, process.q)
        self.x.lerp_(self._y, share)
        return self._square.sqrt()
