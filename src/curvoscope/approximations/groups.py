"""`GroupForm`: a stand-in that is block-diagonal over equal groups of weights, each block symmetric and kept whole."""

from functools import cached_property

import torch
from torch import Tensor

from curvoscope.approximations.factors import GradientFactors, symmetric, total
from curvoscope.approximations.gradients import GradientSource
from curvoscope.approximations.roots import RootForm, cut
from curvoscope.magnitudes import norm


class GroupForm(RootForm):
    """A = the blocks B_g (groups, s, s) of equal parts of the rows (axis 0) or columns (axis 1) of W.

    A `RootForm` of a matrix that may have negative eigenvalues, so that its blocks have no roots.
    """

    @classmethod
    def of(cls, name: str, source: GradientSource, groups: int = 1, axis: int = 1) -> RootForm:
        """The blocks of `source`, whose gradients may count as negative."""
        blocks = total(
            sign * (parts.mT @ parts)
            for sign, gradients in source.signed_gradients()
            for parts in [cut(gradients, groups, axis).transpose(0, 1)]
        )
        return cls(name, source.shape, symmetric(blocks), axis)

    @cached_property
    def _eigenpairs_by_group(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self._roots)
        return values, vectors

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._joined(self._roots @ self._cut(columns))

    def _trace(self) -> float:
        return float(self._roots.diagonal(dim1=1, dim2=2).sum())

    def _diagonal(self) -> Tensor:
        return self._joined(self._roots.diagonal(dim1=1, dim2=2)[..., None])[:, 0]

    def _norm(self) -> float:
        return norm(self._roots)

    def quadratic(self, found: GradientFactors) -> Tensor:
        """gamma^T B gamma for each gradient, (n,)."""
        parts = (cut(some.gradients(), len(self._roots), self._axis).transpose(0, 1) for some in found.pieces())
        return torch.cat([((some @ self._roots) * some).sum((0, 2)) for some in parts])
