"""`EigenbasisForm`: a stand-in that is diagonal in a Kronecker product of two bases."""

import torch
from torch import Tensor

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.factors import GradientFactors
from curvoscope.magnitudes import norm


class EigenbasisForm(Approximation):
    """A = (L (x) R) diag(values) (L (x) R)^T, with orthogonal L (a, a) and R (p, p); None for the identity."""

    def __init__(self, name: str, left: Tensor | None, right: Tensor | None, values: Tensor, floats: int) -> None:
        rows, columns = values.shape
        super().__init__(name, (rows, columns), values, floats)
        self.left, self.right, self.values = left, right, values

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._scaled(columns, self.values)

    def _solve(self, columns: Tensor, damping: float) -> Tensor:
        return self._scaled(columns, 1 / (self.values + damping))

    def _scaled(self, columns: Tensor, values: Tensor) -> Tensor:
        """Columns (a p, k) with their coordinates in the basis multiplied by values (a, p)."""
        matrices = columns.mT.unflatten(1, self.row_shape)
        turned = matrices if self.left is None else self.left.mT @ matrices
        turned = (turned if self.right is None else turned @ self.right) * values
        back = turned if self.left is None else self.left @ turned
        return (back if self.right is None else back @ self.right.mT).flatten(1).mT

    def _ends(self) -> tuple[float, float]:
        return float(self.values.min()), float(self.values.max())

    def _trace(self) -> float:
        return float(self.values.sum())

    def _diagonal(self) -> Tensor:
        found = self.values if self.left is None else self.left.square() @ self.values
        return (found if self.right is None else found @ self.right.square().mT).flatten()

    def _norm(self) -> float:
        return norm(self.values)

    def _spectrum_is_cheap(self) -> bool:
        return True

    def _all_eigenvalues(self) -> Tensor:
        return self.values.flatten().sort().values

    def quadratic(self, found: GradientFactors) -> Tensor:
        """gamma^T A gamma for each gradient, (n,)."""
        turned = found.turned(self.left, self.right).pieces()
        return torch.cat([(some.gradients().square() * self.values).sum((1, 2)) for some in turned])
