"""Blocks of a Hessian that is known by its products only: what is asked of them is answered by an Estimate."""

import torch
from torch import Tensor

from curvoscope import checks, estimate
from curvoscope.estimate import DiagonalEstimate, Eigenvalues, Estimate
from curvoscope.operators.base import LinearOperator


class MatrixFree(LinearOperator):
    """An operator whose every entry costs a product: estimates are the default, `dense()` must be asked for.

    `matvecs` is the budget, `tolerance` the relative error to stop at.
    """

    def __matmul__(self, other: Tensor) -> Tensor:
        fits = other.ndim == 1 and other.shape[0] == self.shape[1] and other.dtype == self.dtype
        if fits and other.device == self.device and bool(torch.isfinite(other.sum())):
            # the usual checks take 5 % of a product's time
            return checks.finite("product", self._matmat(other[:, None])[:, 0])
        return super().__matmul__(other)

    def trace(
        self,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int | None = None,
    ) -> Estimate:
        """The trace."""
        self._square("trace")
        return estimate.trace(self, matvecs=matvecs, tolerance=tolerance, seed=seed)

    def diagonal(
        self,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int | None = None,
    ) -> DiagonalEstimate:
        """The diagonal, (R,)."""
        self._square("diagonal")
        return estimate.diagonal(self, matvecs=matvecs, tolerance=tolerance, seed=seed)

    def frobenius_norm(
        self,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int | None = None,
    ) -> Estimate:
        """The Frobenius norm."""
        return estimate.frobenius_norm(self, matvecs=matvecs, tolerance=tolerance, seed=seed)

    def spectral_norm(
        self,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int | None = None,
    ) -> Estimate:
        """The largest singular value, by Lanczos."""
        return self._lanczos_norm(matvecs, tolerance, seed)

    def eigenvalues(
        self,
        k: int | None = None,
        which: str = "LM",
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int | None = None,
    ) -> Tensor | Eigenvalues:
        """The `k` of largest magnitude (LM), largest (LA) or smallest (SA), by Lanczos; all of them from `dense()`."""
        if k is None:
            return super().eigenvalues(None, which)
        self._square("eigenvalues")
        return estimate.lanczos(self, k, which, matvecs=matvecs, tolerance=tolerance, seed=seed)

    def norm_bound(self) -> float:
        """|B|_2 <= |B|_F: with all products, so for small blocks."""
        return float(self.dense().norm())
