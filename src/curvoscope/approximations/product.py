"""`KroneckerProduct`: a stand-in that is one Kronecker product."""

from functools import cached_property

import torch
from torch import Tensor

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.eigenbasis import EigenbasisForm
from curvoscope.approximations.gradients import GradientFactors
from curvoscope.magnitudes import norm


class KroneckerProduct(Approximation):
    """A = U (x) V with positive semidefinite U (a, a) and V (p, p): A vec(M) = vec(U M V).

    `spans`: vectors (n, a) and (n, p) that span the columns of U and of V, if they are few.
    """

    def __init__(
        self,
        name: str,
        left: Tensor,
        right: Tensor,
        floats: int | None = None,
        spans: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        stored = left.numel() + right.numel() if floats is None else floats
        super().__init__(name, (len(left), len(right)), left, stored)
        self.left, self.right, self._spans = left, right, spans

    @cached_property
    def diagonalised(self) -> EigenbasisForm:
        """The same matrix in its eigenbasis, which solves use."""
        pairs = zip((self.left, self.right), self._spans, strict=True)
        (values, left), (others, right) = (eigenvectors(factor, span) for factor, span in pairs)
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


def eigenvectors(matrix: Tensor, span: Tensor | None) -> tuple[Tensor, Tensor]:
    """Eigenvalues (r,) and eigenvectors (n, r) of a symmetric matrix in the span of vectors (r, n); None: all."""
    if span is None:
        found = torch.linalg.eigh(matrix)
        return found.eigenvalues, found.eigenvectors
    Q = torch.linalg.qr(span.mT).Q
    values, vectors = torch.linalg.eigh(Q.mT @ matrix @ Q)
    return values, Q @ vectors
