"""Operators on vectors that are spread over ranks like the parameters of a model, and the space that they live in."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.autodiff.matrix import AutodiffBlock, AutodiffMatrix, AutodiffParts
from curvoscope.blocks import Block, Blocks
from curvoscope.distributed.mesh import Mesh
from curvoscope.distributed.ranks import RankError
from curvoscope.distributed.sharded import Sharded
from curvoscope.errors import CurvoscopeError, ShapeError
from curvoscope.estimate import Estimate, lanczos
from curvoscope.estimate.space import RandomFill, Space
from curvoscope.operators.base import LinearOperator, ProductPair
from curvoscope.operators.compositions import MatrixFree

_CHUNK = 2**20  # random numbers drawn at once; a multiple of 64, so that none is drawn and not used


class Spread(Space):
    """R^n whose vectors are spread over ranks: this one has the entries with the given numbers, which ascend."""

    def __init__(self, size: int, numbers: Tensor, ranks: Mesh) -> None:
        self.size, self.length = size, len(numbers)
        self.longest = max(ranks.exchange(self.length))
        self._numbers, self._ranks = numbers, ranks

    def total(self, sums: Tensor) -> Tensor:
        """One all-reduce."""
        return self._ranks.add(sums)

    def _qr(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Q R of each part, and of the R of all parts one below the other."""
        own, triangle = torch.linalg.qr(columns)
        outer, R = torch.linalg.qr(self._stacked(triangle))
        start = self._ranks.rank * columns.shape[1]
        return own @ outer[start : start + own.shape[1]], R.double()

    def _qr_triangle(self, columns: Tensor) -> Tensor:
        """R of the R of all parts."""
        return torch.linalg.qr(self._stacked(torch.linalg.qr(columns, mode="r").R), mode="r").R.double()

    def _stacked(self, triangle: Tensor) -> Tensor:
        """All parts' R (k, k), those of parts with fewer rows filled with zeros."""
        width = triangle.shape[1]
        stacked = triangle.new_zeros(self._ranks.size, width, width)
        stacked[self._ranks.rank, : len(triangle)] = triangle
        return self.total(stacked).flatten(0, 1)

    def random(self, draw: RandomFill, out: Tensor) -> None:
        """The numbers that a single process would draw, a chunk at a time; each rank keeps its own."""
        found, start = list[Tensor](), 0
        while start < self.size:
            stop = self.size if self.size - start < 2 * _CHUNK else start + _CHUNK  # no chunk is short
            some = draw(torch.empty(stop - start))
            first, last = torch.searchsorted(self._numbers, torch.tensor([start, stop])).tolist()
            found.append(some[self._numbers[first:last] - start])
            start = stop
        out.copy_(torch.cat(found))

    def units(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Zeros, and those ones of the unit vectors that this rank holds."""
        unit = torch.zeros(self.length, stop - start, dtype=torch.float64, device=device)
        first, last = torch.searchsorted(self._numbers, torch.tensor([start, stop])).tolist()
        unit[torch.arange(first, last), self._numbers[first:last] - start] = 1
        return unit

    def whole(self, columns: Tensor) -> Tensor:
        """All ranks' entries in their places."""
        found = columns.new_zeros(self.size, columns.shape[1])
        found[self._numbers.to(columns.device)] = columns
        return self.total(found)

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return self._ranks.least(number)


class SpreadOperator(MatrixFree):
    """An operator whose products take and give this rank's parts of vectors. `spaces` are those of rows and columns.

    All ranks ask the same of it at once, and get the same Estimates.
    """

    spaces: tuple[Spread, Spread]
    _ranks: Mesh

    def __matmul__(self, other: Tensor) -> Tensor:
        columns = other[:, None] if other.ndim == 1 else other
        try:
            length = self.spaces[1].length
            if other.ndim not in (1, 2) or len(other) != length:
                raise ShapeError(
                    "vector",
                    f"got shape {tuple(other.shape)}, expected ({length},) or ({length}, n): the entries whose "
                    f"parameters rank {self._ranks.rank} holds, of {self.shape[1]}",
                )
            if other.numel():
                checks.floating("vector", other, like=self.like)
        except CurvoscopeError as failure:
            self._ranks.refuse(failure, torch.empty(0, 0, dtype=self.dtype, device=self.device))
        product = self._matmat(columns)
        return product if other.ndim == 2 else product[:, 0]

    def __add__(self, other: LinearOperator) -> LinearOperator:
        if not isinstance(other, SpreadOperator) or other.shape != self.shape:
            raise ShapeError("operator", f"cannot add {other!r} to an operator that is spread over ranks")
        mine, theirs = (self._matmat, self.T._matmat), (other._matmat, other.T._matmat)
        products = (lambda x: mine[0](x) + theirs[0](x)), (lambda x: mine[1](x) + theirs[1](x))
        return _Derived(self, products, self.spaces, self.symmetric and other.symmetric)

    def __mul__(self, factor: float) -> LinearOperator:
        products = (lambda x: factor * self._matmat(x)), (lambda x: factor * self.T._matmat(x))
        return _Derived(self, products, self.spaces, self.symmetric)

    def _lanczos_norm(self, matvecs: int | None, tolerance: float | None, seed: int | None) -> Estimate:
        if self.symmetric:
            return super()._lanczos_norm(matvecs, tolerance, seed)

        narrow = self if self.shape[1] <= self.shape[0] else self.T
        assert isinstance(narrow, SpreadOperator)

        def gram(x: Tensor) -> Tensor:
            return narrow.T._matmat(narrow._matmat(x))

        squared = _Derived(narrow, (gram, gram), (narrow.spaces[1], narrow.spaces[1]), symmetric=True)
        return lanczos(squared, 1, "LM", matvecs=matvecs, tolerance=tolerance, seed=seed)[0].root()

    # ---- what would need whole vectors or all entries

    def dense(self) -> NoReturn:
        """Raise: it would need whole vectors."""
        self._refuse("dense")

    def _eigenbasis(self) -> None:
        """None: entries are refused, so solves iterate."""

    def to_scipy(self) -> NoReturn:
        """Raise: it would need whole vectors."""
        self._refuse("to_scipy")

    def norm_bound(self) -> NoReturn:
        """Raise: it would need whole vectors."""
        self._refuse("norm_bound")

    def diagonal(self, **options: Any) -> NoReturn:
        """Raise: it would need whole vectors."""
        self._refuse("diagonal")

    def _all_eigenvalues(self) -> NoReturn:
        self._refuse("eigenvalues without k")

    def _refuse(self, question: str) -> NoReturn:
        raise RankError(
            question,
            "needs whole vectors, and those of a sharded model are spread over ranks; ask for trace(), "
            "frobenius_norm(), eigenvalues(k=...), density() or products with @, or load the model unsharded",
        )


class _Derived(SpreadOperator):
    """A sum, a multiple or a square of such operators, by its products and those of its transpose."""

    def __init__(
        self, of: SpreadOperator, products: ProductPair, spaces: tuple[Spread, Spread], symmetric: bool = False
    ) -> None:
        shapes = of.row_shape if spaces[0] is of.spaces[0] else of.column_shape, of.column_shape
        super().__init__(*shapes, of.like, symmetric)
        self._of, self._products, self.spaces, self._ranks = of, products, spaces, of._ranks

    def _matmat(self, columns: Tensor) -> Tensor:
        return self._products[0](columns)

    def _transposed(self) -> LinearOperator:
        return _Derived(self._of.T, self._products[::-1], self.spaces[::-1])  # type: ignore[arg-type]


def _spaces(engine: Sharded, rows: Sequence[Block], columns: Sequence[Block]) -> tuple[Spread, Spread]:
    return _space(engine, rows), _space(engine, columns)


def _space(engine: Sharded, blocks: Sequence[Block]) -> Spread:
    """One for each selection of blocks: the numbers of its entries take as much memory as a vector."""
    names = tuple(block.name for block in blocks)
    if names not in engine.spaces:
        size = sum(block.size for block in blocks)
        engine.spaces[names] = Spread(size, engine.numbers(blocks), engine.ranks)
    found = engine.spaces[names]
    assert isinstance(found, Spread)
    return found


class ShardedBlock(SpreadOperator, AutodiffBlock):
    """One block of the Hessian of a sharded model, or of a part of it."""

    def __init__(self, engine: Sharded, part: str, row: Block, column: Block) -> None:
        AutodiffBlock.__init__(self, engine, part, row, column)
        self.spaces, self._ranks, self._sharded = _spaces(engine, [row], [column]), engine.ranks, engine

    def _transposed(self) -> LinearOperator:
        return ShardedBlock(self._sharded, self._part, self._column, self._row)


class ShardedParts(SpreadOperator, AutodiffParts):
    """Outer and functional part of a column of blocks of a sharded model, one below the other."""

    def __init__(self, engine: Sharded, rows: Sequence[Block], column: Block) -> None:
        AutodiffParts.__init__(self, engine, rows, column)
        size, numbers = self.shape[0] // 2, engine.numbers(rows)
        twice = Spread(2 * size, torch.cat([numbers, size + numbers]), engine.ranks)
        self.spaces, self._ranks = (twice, _space(engine, [column])), engine.ranks


class ShardedMatrix(SpreadOperator, AutodiffMatrix):
    """The Hessian of a sharded model over all blocks, or a part of it."""

    def __init__(self, engine: Sharded, part: str, blocks: Blocks) -> None:
        AutodiffMatrix.__init__(self, engine, part, blocks)
        several = list(blocks.values())
        self.spaces, self._ranks, self._sharded = _spaces(engine, several, several), engine.ranks, engine

    def _single(self, row: str, column: str) -> LinearOperator:
        return ShardedBlock(self._sharded, self._part, self._blocks[row], self._blocks[column])

    def select(self, names: "list[str] | tuple[str, ...]") -> "ShardedMatrix":  # type: ignore[override]
        """The part of the matrix on some of the blocks, in the order given."""
        return ShardedMatrix(self._sharded, self._part, Blocks(self._blocks[name] for name in names))
