"""Hessians by autodiff as matrices of blocks: one block, and all of them together."""

from collections.abc import Callable

import torch
from torch import Tensor

from curvoscope.autodiff.engine import Autodiff
from curvoscope.blocks import Block, Blocks
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import BlockMatrix
from curvoscope.operators.matrix_free import MatrixFree


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
