"""MINRES, as a recurrence on the Lanczos process."""

import torch
from torch import Tensor

from curvoscope.solve.lanczos import LanczosProcess

_ROUNDING = 16  # units of rounding of a product, below which |A w| / |w| is zero


class MinimumResidual:
    """x_k in the span of V_k with the least residual, for a symmetric matrix, indefinite or not.

    Givens rotations make the columns (β_k, α_k, β_{k+1}) of T upper triangular (Paige and Saunders 1975).

    Args:
        start: the right-hand sides, rows (c, n).
        process: that begins with them.
    """

    residual: Tensor | None = None

    def __init__(self, start: Tensor, process: LanczosProcess) -> None:
        self.x = torch.zeros_like(start)
        self._process, beta = process, process.beta
        self._w, self._w_before = torch.zeros_like(start), torch.zeros_like(start)
        self._residual, self.alive = beta, beta > 0
        self._cosine, self._sine = -torch.ones_like(beta), torch.zeros_like(beta)
        self._diagonal, self._far, self._size = (torch.zeros_like(beta) for _ in range(3))

    def advance(self, v: Tensor, alpha: Tensor, below: Tensor) -> Tensor:
        """Take the next vector v (c, n) with its column (alpha, below) of T; return the residual norms (c,)."""
        far = self._far
        beside = self._cosine * self._diagonal + self._sine * alpha
        pivot = self._sine * self._diagonal - self._cosine * alpha
        self._far, self._diagonal = self._sine * below, -self._cosine * below
        length = torch.hypot(pivot, below)
        self._size = torch.maximum(self._size, length)
        divisor = torch.where(length > 0, length, 1.0)
        far, beside, scale = (part.to(v.dtype)[:, None] for part in (far, beside, divisor))
        w = (v - far * self._w_before - beside * self._w) / scale
        # |A w| = 1: a longer w than this shows a matrix that is singular to rounding, along w
        regular = _ROUNDING * self._process.epsilon * self._size * self._process.row_lengths(w) < 1
        self.alive = self.alive & (length > 0) & regular
        self._cosine, self._sine = pivot / divisor, below / divisor
        step = torch.where(self.alive, self._cosine * self._residual, 0.0)
        self._residual = torch.where(self.alive, self._sine * self._residual, self._residual)
        self._w_before, self._w = self._w, w
        self.x += step.to(v.dtype)[:, None] * w
        self.alive = self.alive & (below > 0)
        return self._residual.abs() * self._process.lengths
