"""`EigenbasisForm`: a stand-in that is diagonal in a Kronecker product of two bases."""

import torch
from torch import Tensor

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.factors import GradientFactors
from curvoscope.magnitudes import norm
from curvoscope.operators.base import Shape
from curvoscope.solve import Eigenbasis


class EigenbasisForm(Approximation):
    """A = (L (x) R) diag(values) (L (x) R)^T, with orthonormal columns L (a, r) and R (p, s); None for the identity.

    With fewer columns than rows, as of a matrix made of few tokens, A is zero outside of their span.
    """

    def __init__(self, name: str, left: Tensor | None, right: Tensor | None, values: Tensor, floats: int) -> None:
        rows, columns = (
            size if basis is None else len(basis) for basis, size in zip((left, right), values.shape, strict=True)
        )
        super().__init__(name, (rows, columns), values, floats)
        self.left, self.right, self.values = left, right, values
        self._null = rows * columns - values.numel()  # eigenvalues that are zero outside of the span

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._scaled(columns, self.values)

    def _solve(self, columns: Tensor, damping: float) -> Tensor:
        if not self._null:
            return self._scaled(columns, 1 / (self.values + damping))
        return (columns - self._scaled(columns, self.values / (self.values + damping))) / damping

    def _scaled(self, columns: Tensor, values: Tensor) -> Tensor:
        """Columns (a p, k) with their coordinates in the basis multiplied by values (a, p)."""
        matrices = columns.mT.unflatten(1, self.row_shape)
        turned = matrices if self.left is None else self.left.mT @ matrices
        turned = (turned if self.right is None else turned @ self.right) * values
        back = turned if self.left is None else self.left @ turned
        return (back if self.right is None else back @ self.right.mT).flatten(1).mT

    def _eigenbasis(self) -> Eigenbasis:
        left, right = (None if basis is None else basis.double() for basis in (self.left, self.right))
        few, many = (*self.values.shape,), self.row_shape

        def turned(columns: Tensor, shape: Shape, rows: Tensor | None, others: Tensor | None) -> Tensor:
            cube = columns.reshape(*shape, -1)
            cube = cube if rows is None else torch.einsum("ij,jpc->ipc", rows, cube)
            cube = cube if others is None else torch.einsum("pq,iqc->ipc", others, cube)
            return cube.reshape(-1, columns.shape[1])

        transposed = [None if basis is None else basis.mT for basis in (left, right)]
        squared = [None if basis is None else basis.square() for basis in (left, right)]
        return Eigenbasis(
            self.values.double().flatten(),
            lambda v: turned(v, many, *transposed),
            lambda w: turned(w, few, left, right),
            lambda w: turned(w, few, *squared),
            self.shape[0],
        )

    def _ends(self) -> tuple[float, float]:
        ends = float(self.values.min()), float(self.values.max())
        return (min(0.0, ends[0]), max(0.0, ends[1])) if self._null else ends

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
        return torch.cat([self.values.flatten(), self.values.new_zeros(self._null)]).sort().values

    def quadratic(self, found: GradientFactors) -> Tensor:
        """gamma^T A gamma for each gradient, (n,)."""
        turned = found.turned(self.left, self.right).pieces()
        return torch.cat([some.gradients().square().flatten(1) @ self.values.flatten() for some in turned])
