"""`KroneckerProduct`: a stand-in that is one Kronecker product."""

import math
from functools import cached_property

import torch
from torch import Tensor

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.eigenbasis import EigenbasisForm
from curvoscope.approximations.factors import GradientFactors
from curvoscope.magnitudes import norm
from curvoscope.solve import Eigenbasis


class KroneckerProduct(Approximation):
    """A = U (x) V with positive semidefinite U (a, a) and V (p, p): A vec(M) = vec(U M V).

    Args:
        name: of the approximation.
        left: U.
        right: V.
        floats: that it stores; None: those of U and V.
        rest: squared norm and trace of A in the directions that a `spanned` source leaves out.
        spans: vectors (n, a) and (n, p) that span the columns of U and of V, if they are few.
    """

    def __init__(
        self,
        name: str,
        left: Tensor,
        right: Tensor,
        floats: int | None = None,
        rest: tuple[float, float] = (0.0, 0.0),
        spans: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> None:
        stored = left.numel() + right.numel() if floats is None else floats
        super().__init__(name, (len(left), len(right)), left, stored)
        self.left, self.right, self._rest, self._spans = left, right, rest, spans

    def within(self, parts: int, axis: int) -> "KroneckerProduct":
        """Without the entries that couple two of the equal parts of its rows (axis 0) or columns (axis 1)."""
        whole = (self.left, self.right)[axis]
        number = torch.arange(len(whole), device=whole.device) * parts // len(whole)
        kept = torch.where(number[:, None] == number, whole, 0)
        sides = (kept, self.right) if axis == 0 else (self.left, kept)
        return KroneckerProduct(self.name, *sides, self.floats - len(whole) ** 2 + len(whole) ** 2 // parts)

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

    def _eigenbasis(self) -> Eigenbasis:
        return self.diagonalised._eigenbasis()

    def _ends(self) -> tuple[float, float]:
        return self.diagonalised._ends()

    def _trace(self) -> float:
        return float(self.left.trace() * self.right.trace()) + self._rest[1]

    def _diagonal(self) -> Tensor:
        return torch.outer(self.left.diagonal(), self.right.diagonal()).flatten()

    def _norm(self) -> float:
        return math.hypot(norm(self.left) * norm(self.right), self._rest[0] ** 0.5)

    def _spectrum_is_cheap(self) -> bool:
        return True

    def _all_eigenvalues(self) -> Tensor:
        return self.diagonalised._all_eigenvalues()

    def quadratic(self, found: GradientFactors) -> Tensor:
        """<gamma, U gamma V> for each gradient, (n,)."""
        return found.quadratic(self.left, self.right)


def eigenvectors(matrix: Tensor, span: Tensor | None) -> tuple[Tensor, Tensor]:
    """Eigenvalues (r,) and eigenvectors (n, r) of a symmetric matrix in the span of vectors (r, n); None: all."""
    if span is None:
        found = torch.linalg.eigh(matrix)
        return found.eigenvalues, found.eigenvectors
    Q = torch.linalg.qr(span.mT).Q
    values, vectors = torch.linalg.eigh(Q.mT @ matrix @ Q)
    return values, Q @ vectors
