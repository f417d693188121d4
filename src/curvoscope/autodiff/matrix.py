"""Hessians by autodiff as matrices of blocks: one block, and all of them together."""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from curvoscope.autodiff.engine import Autodiff
from curvoscope.blocks import Block, Blocks
from curvoscope.operators.base import LinearOperator, Shape
from curvoscope.operators.block_matrix import BlockMatrix
from curvoscope.operators.compositions import MatrixFree
from curvoscope.solve import Eigenbasis, Solver
from curvoscope.solve.preconditioning import Candidate, StandIns


class AutodiffBlock(MatrixFree):
    """One block of the Hessian, or of its outer or functional part: rows of one named block, columns of another."""

    def __init__(
        self, engine: Autodiff, part: str, row: Block, column: Block, stand_ins: Callable[[], StandIns] | None = None
    ) -> None:
        like = torch.empty(0, dtype=engine.dtype, device=engine.device)
        super().__init__(row.shape, column.shape, like, symmetric=row == column)
        self._engine, self._part, self._row, self._column, self._stand_ins = engine, part, row, column, stand_ins

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._engine.product(self._part, [self._row], [self._column], columns.T).T

    def _transposed(self) -> LinearOperator:
        return AutodiffBlock(self._engine, self._part, self._column, self._row)

    @property
    def exact_products(self) -> bool:
        """Whether products are exact to rounding."""
        return self._engine.exact_products

    def steady(self) -> AbstractContextManager[None]:
        """While the weights are known not to change."""
        return self._engine.steady()

    def lower_bound(self) -> float:
        """0 for a diagonal block of the Gauss-Newton part of a convex loss; otherwise -inf."""
        return 0.0 if self.symmetric and self._engine.is_positive(self._part) else super().lower_bound()

    def _compared(self) -> tuple[Candidate, ...]:
        return super()._compared() if self._stand_ins is None else self._stand_ins().compared([self._row.name])

    def _stand_in(self, name: str) -> Candidate:
        if self._stand_ins is None:
            return super()._stand_in(name)
        return self._stand_ins().candidate(name, [self._row.name])


class AutodiffParts(MatrixFree):
    """Outer and functional part of a column of blocks, one below the other: (2R, C), both from one pass."""

    def __init__(self, engine: Autodiff, rows: Sequence[Block], column: Block) -> None:
        like = torch.empty(0, dtype=engine.dtype, device=engine.device)
        height = sum(block.size for block in rows)
        super().__init__((2 * height, 1), column.shape, like)
        self._engine, self._rows, self._column = engine, rows, column

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._engine.product("both", self._rows, [self._column], columns.T).T


class LazyBlock(LinearOperator):
    """A block whose shape is known now, and whose operator is chosen and made when it is first computed with.

    What a `LinearOperator` is asked is answered by `resolved`, the operator itself; transposes, sums and multiples are
    lazy as well. `named` gives the preconditioner of a name, which a closed form by itself does not know.
    """

    def __init__(
        self,
        make: Callable[[], LinearOperator],
        row_shape: Shape,
        column_shape: Shape,
        like: Tensor,
        symmetric: bool = False,
        named: Callable[[str], Candidate] | None = None,
    ) -> None:
        super().__init__(row_shape, column_shape, like, symmetric)
        self._make, self._named = make, named

    @functools.cached_property
    def resolved(self) -> LinearOperator:
        """The operator, from now on."""
        return self._make()

    @property
    def estimated(self) -> bool:
        """Of the operator itself."""
        return self.resolved.estimated

    @property
    def eigenbasis(self) -> Eigenbasis | None:
        """Of the operator itself."""
        return self.resolved.eigenbasis

    def _stand_in(self, name: str) -> Candidate:
        if self._named is None or name == "diagonal":  # that of a closed form is its own
            return self.resolved._stand_in(name)
        return self._named(name)

    def _solver(self, *arguments: Any) -> Solver:
        damping, tolerance, method, preconditioner, matvecs, seed = arguments
        if not isinstance(preconditioner, str) or preconditioner == "auto":
            return self.resolved._solver(*arguments)
        candidates = (self._stand_in(preconditioner),)
        return Solver(self.resolved, damping, tolerance, method, candidates, False, matvecs, seed)

    def _matmat(self, columns: Tensor) -> Tensor:
        return self.resolved._matmat(columns)

    def _transposed(self) -> LinearOperator:
        return LazyBlock(lambda: self.resolved.T, self.column_shape, self.row_shape, self.like)

    def __add__(self, other: LinearOperator) -> LinearOperator:
        def add() -> LinearOperator:
            return self.resolved + (other.resolved if isinstance(other, LazyBlock) else other)

        return LazyBlock(add, self.row_shape, self.column_shape, self.like, self.symmetric and other.symmetric)

    def __mul__(self, factor: float) -> LinearOperator:
        return LazyBlock(lambda: self.resolved * factor, self.row_shape, self.column_shape, self.like, self.symmetric)


def _delegate(name: str, method: Callable[..., Any]) -> None:
    @functools.wraps(method)
    def answer(self: LazyBlock, *arguments: Any, **options: Any) -> Any:
        return getattr(self.resolved, name)(*arguments, **options)

    setattr(LazyBlock, name, answer)


# Every other method is the operator's own, also what it overrides: a new question needs no line here.
_OWN = {*vars(LazyBlock), "__rmul__", "__neg__", "__sub__", "__repr__", "adjoint", "solve", "inverse"}
for _name, _method in inspect.getmembers(LinearOperator, inspect.isfunction):
    if _name not in _OWN:
        _delegate(_name, _method)


Known = Callable[[str, Block, Block], LinearOperator | None]  # part, row, column -> the block, if it is known better


class AutodiffMatrix(MatrixFree, BlockMatrix):
    """The Hessian over all blocks, or its outer or functional part. A product costs one pass, whatever the blocks.

    `known`: gives the blocks that need no autodiff, when one of them is first computed with. `stand_ins`: gives
    what makes preconditioners.
    """

    def __init__(
        self,
        engine: Autodiff,
        part: str,
        blocks: Blocks,
        known: Known | None = None,
        stand_ins: Callable[[], StandIns] | None = None,
    ) -> None:
        like = torch.empty(0, dtype=engine.dtype, device=engine.device)
        self._engine, self._part, self._blocks, self._known = engine, part, blocks, known
        self._stand_ins = stand_ins
        BlockMatrix.__init__(self, blocks.shapes, self._single, like)

    def _single(self, row: str, column: str) -> LinearOperator:
        first, second, known = self._blocks[row], self._blocks[column], self._known

        def choose() -> LinearOperator:
            found = None if known is None else known(self._part, first, second)
            return AutodiffBlock(self._engine, self._part, first, second, self._stand_ins) if found is None else found

        if known is None:
            return choose()
        make, symmetric = self._stand_ins, first == second
        named = None if make is None or not symmetric else lambda kind: make().candidate(kind, [row])
        return LazyBlock(choose, first.shape, second.shape, self.like, symmetric, named)

    def _matmat(self, columns: Tensor) -> Tensor:
        blocks = list(self._blocks.values())
        return self._engine.product(self._part, blocks, blocks, columns.T).T

    @property
    def exact_products(self) -> bool:
        """Whether products are exact to rounding."""
        return self._engine.exact_products

    def steady(self) -> AbstractContextManager[None]:
        """While the weights are known not to change."""
        return self._engine.steady()

    def lower_bound(self) -> float:
        """0 for the Gauss-Newton part of a convex loss; otherwise -inf."""
        return 0.0 if self._engine.is_positive(self._part) else super().lower_bound()

    def _compared(self) -> tuple[Candidate, ...]:
        return super()._compared() if self._stand_ins is None else self._stand_ins().compared(self.names)

    def _stand_in(self, name: str) -> Candidate:
        return super()._stand_in(name) if self._stand_ins is None else self._stand_ins().candidate(name, self.names)

    def _write(self, out: Tensor) -> None:
        LinearOperator._write(self, out)

    def _workspace(self, room: int) -> int:
        return LinearOperator._workspace(self, room)

    def select(self, names: "list[str] | tuple[str, ...]") -> "AutodiffMatrix":  # type: ignore[override]
        """The part of the matrix on some of the blocks, in the order given."""
        chosen = Blocks(self._blocks[name] for name in names)
        return AutodiffMatrix(self._engine, self._part, chosen, self._known, self._stand_ins)
