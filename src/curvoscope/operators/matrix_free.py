"""Blocks of a Hessian that is known by its products only: what is asked of them is answered by an Estimate."""

import torch
from torch import Tensor

from curvoscope import checks
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

    @property
    def estimated(self) -> bool:
        """Always."""
        return True

    def norm_bound(self) -> float:
        """|B|_2 <= |B|_F: with all products, so for small blocks."""
        return float(self.dense().norm())
