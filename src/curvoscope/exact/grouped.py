"""Matrices that couple only tokens of one group: Jacobians and Hessians between the outputs of layers.

A layer that treats each token alone has groups of one token, attention those of a sequence, a loss may couple the
whole batch. Groups are nested: a product of two such matrices has the groups of the coarser one.
"""

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.losses import Curvature, PairCurvature, PerToken, ScalarCurvature, TokenCurvature
from curvoscope.magnitudes import in_single, norm
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.eigenvalues import symmetric_eigenvalues

_ROUTES = 4  # matrices of the result's size that a product needs at once


class Grouped(LinearOperator):
    """Blocks (groups, g m, g d) over groups of g = `size` tokens; rows (T, m) and columns (T, d)."""

    def __init__(self, blocks: Tensor, size: int, symmetric: bool = False) -> None:
        groups, rows, columns = blocks.shape
        tokens = groups * size
        super().__init__((tokens, rows // size), (tokens, columns // size), blocks, symmetric)
        self.blocks = (blocks + blocks.mT) / 2 if symmetric else blocks
        self.size, self.groups = size, groups

    @classmethod
    def of(cls, curvature: Curvature, output: Tensor) -> "Grouped":
        """S of a loss at an output (N, L, m)."""
        tokens, width = output.shape[0] * output.shape[1], output.shape[2]
        if isinstance(curvature, PairCurvature):
            groups, size = curvature.blocks.shape[:2]
            return cls(curvature.blocks.reshape(groups, size * width, size * width), size, symmetric=True)
        fits(tokens, 1, width, width, output)
        if isinstance(curvature, PerToken):
            return cls(curvature.between(None, None, 0, tokens), 1, symmetric=True)
        assert isinstance(curvature, ScalarCurvature)
        identity = torch.eye(width, dtype=output.dtype, device=output.device)
        return cls((curvature.factor * identity).expand(tokens, -1, -1), 1, symmetric=True)

    def curvature(self, length: int) -> Curvature:
        """The same as the S of a loss, for sequences of `length` tokens."""
        width = self.row_shape[1]
        if self.size == 1:
            return TokenCurvature(self.blocks.view(-1, length, width, width))
        return PairCurvature(self.blocks.view(self.groups, self.size, width, self.size, width))

    def widened(self, size: int) -> "Grouped":
        """The same matrix over larger groups."""
        if size == self.size:
            return self
        factor = size // self.size
        _, rows, columns = self.blocks.shape
        fits(self.row_shape[0], size, self.row_shape[1], self.column_shape[1], self.blocks)
        wide = self.blocks.new_zeros(self.groups // factor, factor, rows, factor, columns)
        parts = self.blocks.view(self.groups // factor, factor, rows, columns)
        wide.diagonal(dim1=1, dim2=3).copy_(parts.permute(0, 2, 3, 1))
        return Grouped(wide.view(-1, factor * rows, factor * columns), size, self.symmetric)

    def __add__(self, other: LinearOperator) -> LinearOperator:
        return self.plus(other) if isinstance(other, Grouped) and other.shape == self.shape else super().__add__(other)

    def plus(self, other: "Grouped") -> "Grouped":
        """The sum, over the coarser groups."""
        size = max(self.size, other.size)
        blocks = self.widened(size).blocks + other.widened(size).blocks
        return Grouped(blocks, size, self.symmetric and other.symmetric)

    def plus_identity(self) -> "Grouped":
        """I + J: a layer with a residual connection."""
        return Grouped(self.blocks + torch.eye(self.blocks.shape[1], dtype=self.dtype, device=self.device), self.size)

    def after(self, first: "Grouped") -> "Grouped":
        """The product with `first` on the right: the Jacobian of this layer after that one."""
        if first.size > self.size:
            return first._transpose()._times_blocks(self._transpose())._transpose()
        return self._times_blocks(first)

    def sandwich(self, curvature: "Grouped") -> "Grouped":
        """J^T S J."""
        half = curvature.after(self)
        return Grouped(self._transpose().after(half).blocks, max(self.size, curvature.size), symmetric=True)

    def _times_blocks(self, right: "Grouped") -> "Grouped":
        """The product with a matrix of finer groups on the right: block columns one group at a time."""
        factor, rows = self.size // right.size, self.blocks.shape[1]
        fits(self.row_shape[0], self.size, self.row_shape[1], right.column_shape[1], self.blocks)
        turned = self.blocks.mT.reshape(self.groups, factor, -1, rows)
        blocks = right.blocks.mT.reshape(self.groups, factor, *right.blocks.shape[:0:-1])
        return Grouped((blocks @ turned).flatten(1, 2).mT, self.size)

    def _transpose(self) -> "Grouped":
        return self if self.symmetric else Grouped(self.blocks.mT, self.size)

    # ---- as an operator

    def _transposed(self) -> LinearOperator:
        return self._transpose()

    def _matmat(self, columns: Tensor) -> Tensor:
        return (self.blocks @ columns.reshape(self.groups, -1, columns.shape[1])).flatten(0, 1)

    def _write(self, out: Tensor) -> None:
        out.zero_()
        groups = (self.groups, self.size)
        cut = out.unflatten(2, groups).unflatten(0, groups)  # (groups, g, m, groups, g, d)
        parts = self.blocks.view(self.groups, self.size, self.row_shape[1], self.size, self.column_shape[1])
        cut.diagonal(dim1=0, dim2=3).copy_(parts.permute(1, 2, 3, 4, 0))

    def _workspace(self, room: int) -> int:
        return 0

    def _trace(self) -> float:
        return float(self._diagonal().sum())

    def _diagonal(self) -> Tensor:
        return self.blocks.diagonal(dim1=1, dim2=2).flatten()

    def _norm(self) -> float:
        return norm(self.blocks)

    def _spectral_norm(self) -> float:
        if self.symmetric:
            return float(symmetric_eigenvalues(self.blocks).abs().max())
        return float(torch.linalg.matrix_norm(in_single(self.blocks), 2).max())

    def _spectrum_is_cheap(self) -> bool:
        return True

    def _all_eigenvalues(self) -> Tensor:
        return symmetric_eigenvalues(self.blocks).flatten().sort().values


def fits(tokens: int, size: int, rows: int, columns: int, like: Tensor, budget: int | None = None) -> None:
    """Raise if matrices over groups of `size` tokens exceed the memory limit."""
    checks.fits(
        _ROUTES * tokens * size * rows * columns * like.element_size(),
        budget,
        f"a matrix between {tokens} tokens of width {rows} and {columns}, coupled in groups of {size}",
        "use fewer tokens, or products with @",
    )
