"""Blocks of a Hessian that is known by its products only: what is asked of them is answered by an Estimate."""

from collections.abc import Callable

import torch
from torch import Tensor

from curvoscope import checks, estimate
from curvoscope.blocks import Block, Blocks
from curvoscope.estimate import DiagonalEstimate, Eigenvalues, Estimate
from curvoscope.operators.autodiff import Autodiff
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import BlockMatrix


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
        seed: int = 0,
        memory_limit: int | None = None,
    ) -> Estimate:
        """The trace."""
        self._square("trace")
        with checks.limited(memory_limit):
            return estimate.trace(self, matvecs=matvecs, tolerance=tolerance, seed=seed)

    def diagonal(
        self,
        memory_limit: int | None = None,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> DiagonalEstimate:
        """The diagonal, (R,)."""
        self._square("diagonal")
        with checks.limited(memory_limit):
            return estimate.diagonal(self, matvecs=matvecs, tolerance=tolerance, seed=seed)

    def frobenius_norm(
        self,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int = 0,
        memory_limit: int | None = None,
    ) -> Estimate:
        """The Frobenius norm."""
        with checks.limited(memory_limit):
            return estimate.frobenius_norm(self, matvecs=matvecs, tolerance=tolerance, seed=seed)

    def spectral_norm(
        self,
        memory_limit: int | None = None,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> Estimate:
        """The largest singular value, by Lanczos."""
        return self._lanczos_norm(memory_limit, matvecs, tolerance, seed)

    def eigenvalues(
        self,
        k: int | None = None,
        which: str = "LM",
        memory_limit: int | None = None,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> Tensor | Eigenvalues:
        """The `k` of largest magnitude (LM), largest (LA) or smallest (SA), by Lanczos; all of them from `dense()`."""
        if k is None:
            return super().eigenvalues(None, which, memory_limit)
        self._square("eigenvalues")
        return estimate.lanczos(
            self, k, which, matvecs=matvecs, tolerance=tolerance, seed=seed, memory_limit=memory_limit
        )

    def norm_bound(self, memory_limit: int | None = None) -> float:
        """|B|_2 <= |B|_F: with all products, so for small blocks."""
        return float(self.dense(memory_limit=memory_limit).norm())


class AutodiffBlock(MatrixFree):
    """One block of the Hessian, or of its outer or functional part: rows of one named block, columns of another."""

    def __init__(self, engine: Autodiff, part: str, row: Block, column: Block) -> None:
        like = torch.empty(0, dtype=engine.dtype, device=engine.device)
        super().__init__(row.shape, column.shape, like, symmetric=row == column)
        self._engine, self._part, self._row, self._column = engine, part, row, column

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._engine.product(self._part, [self._row], [self._column], columns.T).T

    def _transposed(self) -> LinearOperator:
        return AutodiffBlock(self._engine, self._part, self._column, self._row)


Known = Callable[[str, Block, Block], LinearOperator | None]  # part, row, column -> the block, where it is known better


class AutodiffMatrix(MatrixFree, BlockMatrix):
    """The Hessian over all blocks, or its outer or functional part. A product costs one pass, whatever the blocks.

    `known`: gives the blocks that need no autodiff when they are asked for one by one.
    """

    def __init__(self, engine: Autodiff, part: str, blocks: Blocks, known: Known | None = None) -> None:
        like = torch.empty(0, dtype=engine.dtype, device=engine.device)
        self._engine, self._part, self._blocks, self._known = engine, part, blocks, known
        BlockMatrix.__init__(self, blocks.shapes, self._single, like)

    def _single(self, row: str, column: str) -> LinearOperator:
        pair = self._blocks[row], self._blocks[column]
        found = None if self._known is None else self._known(self._part, *pair)
        return AutodiffBlock(self._engine, self._part, *pair) if found is None else found

    def _matmat(self, columns: Tensor) -> Tensor:
        blocks = list(self._blocks.values())
        return self._engine.product(self._part, blocks, blocks, columns.T).T

    def _write(self, out: Tensor) -> None:
        LinearOperator._write(self, out)

    def _workspace(self, room: int) -> int:
        return LinearOperator._workspace(self, room)

    def select(self, names: "list[str] | tuple[str, ...]") -> "AutodiffMatrix":  # type: ignore[override]
        """The part of the matrix on some of the blocks, in the order given."""
        chosen = Blocks(self._blocks[name] for name in names)
        return AutodiffMatrix(self._engine, self._part, chosen, self._known)
