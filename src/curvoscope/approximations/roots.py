"""`RootForm`: a stand-in that is block-diagonal over equal groups of weights, each block R^T R."""

from functools import cached_property

import torch
from torch import Tensor

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.factors import GradientFactors, total
from curvoscope.approximations.gradients import GradientSource
from curvoscope.magnitudes import norm
from curvoscope.operators.base import Shape


class RootForm(Approximation):
    """A = the sum over groups of R_g^T R_g, for `groups` equal parts of the rows (axis 0) or columns (axis 1) of W.

    Samples are such roots: A of n samples needs n gradients, not the entries. `floats` counts the entries of the
    blocks, as an optimizer would store them.

    Args:
        name: of the approximation.
        shape: (a, p).
        roots: R (groups, r, s), with s = a p / groups.
        axis: the side of W that is cut.
    """

    def __init__(self, name: str, shape: Shape, roots: Tensor, axis: int) -> None:
        groups, _, size = roots.shape
        super().__init__(name, shape, roots, groups * size**2)
        self._roots, self._axis = roots, axis

    @classmethod
    def of(cls, name: str, source: GradientSource, groups: int = 1, axis: int = 1) -> "RootForm":
        """Those of the gradients; of many gradients a root of the sum of their squares."""
        size = source.shape[0] * source.shape[1] // groups
        parts = (cut(gradients, groups, axis).transpose(0, 1) for gradients in source.gradients())
        if len(source) <= size:
            roots = torch.cat(list(parts), 1) * source.weight**0.5
        else:
            squares = total(some.mT @ some for some in parts) * source.weight
            values, vectors = torch.linalg.eigh(squares)
            roots = values.clamp_min(0).sqrt()[..., None] * vectors.mT
        return cls(name, source.shape, roots, axis)

    @cached_property
    def _eigenpairs_by_group(self) -> tuple[Tensor, Tensor]:
        """Nonzero eigenvalues (groups, k) and their vectors (groups, s, k), k the smaller of r and s."""
        _, values, vectors = torch.linalg.svd(self._roots, full_matrices=False)
        return values.square(), vectors.mT

    @property
    def _is_full(self) -> bool:
        return self._roots.shape[1] >= self._roots.shape[2]

    def _matmat(self, columns: Tensor) -> Tensor:
        parts = self._cut(columns)
        return self._joined(self._roots.mT @ (self._roots @ parts))

    def _solve(self, columns: Tensor, damping: float) -> Tensor:
        parts = self._cut(columns)
        values, vectors = self._eigenpairs_by_group
        if self._is_full:
            return self._joined(vectors @ ((vectors.mT @ parts) / (values + damping)[..., None]))
        shares = values / (values + damping)
        return self._joined((parts - vectors @ (shares[..., None] * (vectors.mT @ parts))) / damping)

    def _cut(self, columns: Tensor) -> Tensor:
        """(a p, k) -> (groups, s, k)."""
        return cut(columns.mT.unflatten(1, self.row_shape), len(self._roots), self._axis).permute(1, 2, 0)

    def _joined(self, parts: Tensor) -> Tensor:
        """(groups, s, k) -> (a p, k)."""
        (rows, columns), groups = self.row_shape, len(self._roots)
        if self._axis == 0:
            return parts.flatten(0, 1)
        return parts.unflatten(1, (rows, columns // groups)).transpose(0, 1).flatten(0, 2)

    def _ends(self) -> tuple[float, float]:
        values = self._eigenpairs_by_group[0]
        return float(values.min()) if self._is_full else 0.0, float(values.max())

    def _trace(self) -> float:
        return float(self._roots.square().sum())

    def _diagonal(self) -> Tensor:
        return self._joined(self._roots.square().sum(1)[..., None])[:, 0]

    def _norm(self) -> float:
        roots = self._roots
        return norm(roots.mT @ roots if self._is_full else roots @ roots.mT)

    def _spectrum_is_cheap(self) -> bool:
        return True

    def _all_eigenvalues(self) -> Tensor:
        known = self._eigenpairs_by_group[0].flatten()
        zeros = known.new_zeros(self.shape[0] - len(known))
        return torch.cat([known, zeros]).sort().values

    def quadratic(self, found: GradientFactors) -> Tensor:
        """|R gamma|² for each gradient, (n,)."""
        groups = len(self._roots)
        parts = (cut(some.gradients(), groups, self._axis).transpose(0, 1) for some in found.pieces())
        return torch.cat([(some @ self._roots.mT).square().sum((0, 2)) for some in parts])


def cut(matrices: Tensor, groups: int, axis: int) -> Tensor:
    """Equal groups of the rows (axis 0) or columns (axis 1) of matrices: (n, a, p) -> (n, groups, s)."""
    n, rows, columns = matrices.shape
    if axis == 0:
        return matrices.reshape(n, groups, -1)
    return matrices.view(n, rows, groups, columns // groups).transpose(1, 2).flatten(2)
