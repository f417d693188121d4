"""`KroneckerProduct`: a stand-in that is one Kronecker product."""

from functools import cached_property

import torch
from torch import Tensor

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.eigenbasis import EigenbasisForm
from curvoscope.approximations.gradients import GradientFactors
from curvoscope.magnitudes import norm


class KroneckerProduct(Approximation):
    """A = U (x) V with positive semidefinite U (a, a) and V (p, p): A vec(M) = vec(U M V)."""

    def __init__(self, name: str, left: Tensor, right: Tensor, floats: int | None = None) -> None:
        stored = left.numel() + right.numel() if floats is None else floats
        super().__init__(name, (len(left), len(right)), left, stored)
        self.left, self.right = left, right

    @cached_property
    def diagonalised(self) -> EigenbasisForm:
        """The same matrix in its eigenbasis, which solves use."""
        (values, left), (others, right) = torch.linalg.eigh(self.left), torch.linalg.eigh(self.right)
        both = torch.outer(values.clamp_min(0), others.clamp_min(0))
        return EigenbasisForm(self.name, left, right, both, self.floats)

    def _matmat(self, columns: Tensor) -> Tensor:
        return (self.left @ columns.mT.unflatten(1, self.row_shape) @ self.right).flatten(1).mT

    def _solve(self, columns: Tensor, damping: float) -> Tensor:
        return self.diagonalised._solve(columns, damping)

    def _ends(self) -> tuple[float, float]:
        return self.diagonalised._ends()

    def _trace(self) -> float:
        return float(self.left.trace() * self.right.trace())

    def _diagonal(self) -> Tensor:
        return torch.outer(self.left.diagonal(), self.right.diagonal()).flatten()

    def _norm(self) -> float:
        return norm(self.left) * norm(self.right)

    def _spectrum_is_cheap(self) -> bool:
        return True

    def _all_eigenvalues(self) -> Tensor:
        return self.diagonalised._all_eigenvalues()

    def quadratic(self, found: GradientFactors) -> Tensor:
        """<gamma, U gamma V> for each gradient, (n,)."""
        return found.inner(found.turned(self.left, self.right))
