"""Matrices of blocks: heads inside one weight (`Tiles`), weights of a layer (`BlockMatrix`), and its Hessian."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.estimate import Density, DiagonalEstimate, Estimate
from curvoscope.operators.base import LinearOperator, Multiplication, ProductPair, Shape, summed
from curvoscope.operators.strips import write_transposed
from curvoscope.solve import Solution
from curvoscope.text_table import ShownAsTable, TextTable

Part = Literal["outer", "functional", "total"]
PARTS: tuple[Part, ...] = ("outer", "functional", "total")
Entries = dict[tuple[str, str], Tensor]  # (a, p, b, q) for each pair of blocks


@dataclass(frozen=True)
class Slot:
    """Where a tile stands in a weight: entries `start` to `stop` of `axis` (0: rows, 1: columns)."""

    axis: int
    start: int
    stop: int

    def of(self, tensor: Tensor, first: int = 0) -> Tensor:
        """The view of the tile; the weight's axes are `first` and `first + 1` of the tensor."""
        return tensor.narrow(first + self.axis, self.start, self.stop - self.start)


class Tiles(LinearOperator):
    """A block of two weights that are cut into heads: `entries[i, j]` is the block of tile i and tile j."""

    def __init__(
        self,
        row_shape: Shape,
        column_shape: Shape,
        rows: Sequence[Slot],
        columns: Sequence[Slot],
        entries: dict[tuple[int, int], LinearOperator],
        like: Tensor,
        symmetric: bool = False,
        products: ProductPair | None = None,
    ) -> None:
        super().__init__(row_shape, column_shape, like, symmetric)
        self.rows, self.columns, self.entries = tuple(rows), tuple(columns), entries
        self._products = products

    def _write(self, out: Tensor) -> None:
        for (i, j), entry in self.entries.items():
            target = self.columns[j].of(self.rows[i].of(out), 2)
            if not self.symmetric or i <= j:
                entry._write(target)
            if self.symmetric and i < j:  # the mirrored tile is a copy, so that symmetry is exact
                self.columns[i].of(self.rows[j].of(out), 2).copy_(target.permute(2, 3, 0, 1))

    def _workspace(self, room: int) -> int:
        return max(entry._workspace(room) for entry in self.entries.values())

    def _matmat(self, columns: Tensor) -> Tensor:
        if self._products is not None:
            return self._products[0](columns)
        n = columns.shape[1]
        result = columns.new_zeros(*self.row_shape, n)
        source = columns.reshape(*self.column_shape, n)
        parts = [slot.of(source).reshape(-1, n) for slot in self.columns]
        for (i, j), entry in self.entries.items():
            target = self.rows[i].of(result)
            target += entry._matmat(parts[j]).view(target.shape)
        return result.view(self.shape[0], n)

    def _transposed(self) -> LinearOperator:
        entries = {(j, i): entry.T for (i, j), entry in self.entries.items()}
        products = self._products and (self._products[1], self._products[0])
        return Tiles(
            self.column_shape, self.row_shape, self.columns, self.rows, entries, self.like, self.symmetric, products
        )

    def __add__(self, other: LinearOperator) -> LinearOperator:
        if not isinstance(other, Tiles) or (self.rows, self.columns) != (other.rows, other.columns):
            return super().__add__(other)
        entries = {key: entry + other.entries[key] for key, entry in self.entries.items()}
        symmetric = self.symmetric and other.symmetric
        products = summed(self._products, other._products)
        return Tiles(
            self.row_shape, self.column_shape, self.rows, self.columns, entries, self.like, symmetric, products
        )

    def norm_bound(self) -> float:
        """The spectral norm of the matrix of the tiles' bounds."""
        bounds = torch.zeros(len(self.rows), len(self.columns), dtype=torch.float64)
        for key, entry in self.entries.items():
            bounds[key] = entry.norm_bound()
        return float(torch.linalg.matrix_norm(bounds, 2))

    def _trace(self) -> float:
        if self.rows != self.columns:
            return super()._trace()
        return sum(self.entries[i, i]._trace() for i in range(len(self.rows)))

    def _diagonal(self) -> Tensor:
        if self.rows != self.columns:
            return super()._diagonal()
        result = torch.empty(self.row_shape, dtype=self.dtype, device=self.device)
        for i, slot in enumerate(self.rows):
            target = slot.of(result)
            target.copy_(self.entries[i, i]._diagonal().view(target.shape))
        return result.flatten()

    def _norm(self) -> float:
        if not self.symmetric:
            return math.hypot(*(entry._norm() for entry in self.entries.values()))
        upper = ((key, entry) for key, entry in self.entries.items() if key[0] <= key[1])
        return math.hypot(*(_twice(i != j, entry._norm()) for (i, j), entry in upper))


class BlockMatrix(LinearOperator):
    """A symmetric matrix over named blocks. `M["Q", "K"]` is an operator, `M["Q"]` the diagonal block.

    Args:
        shapes: the shape (a, p) of each block's weight, by name, in the order of rows and columns.
        entry: makes the block of a row and a column, on or above the diagonal, when it is first asked for.
        like: a tensor of the dtype of the blocks, on their device.
        product: multiplies with the whole matrix at once.
        entries: makes the entries of several blocks at once.
        aliases: other names under which blocks can be asked for, each with the block's own name.

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.arange(6.0).double().view(3, 2)
        >>> H = cv.exact.LinearMLP([torch.eye(2).double(), torch.eye(2).double()]).hessian(X, cv.losses.MSE(X))
        >>> H.outer.names, H.outer["W1", "W2"].shape, H.outer["W1"].symmetric
        (['W1', 'W2'], (4, 4), True)
    """

    def __init__(
        self,
        shapes: dict[str, Shape],
        entry: Callable[[str, str], LinearOperator],
        like: Tensor,
        product: Multiplication | None = None,
        entries: Callable[[], Entries] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.shapes = dict(shapes)
        self.names = list(shapes)
        self.aliases = {alias: name for alias, name in (aliases or {}).items() if name in shapes}
        sizes = [a * p for a, p in shapes.values()]
        super().__init__((sum(sizes), 1), (sum(sizes), 1), like, symmetric=True)
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self.ranges = {name: slice(end - size, end) for name, size, end in zip(self.names, sizes, ends, strict=True)}
        self._entry, self._product, self._entries = entry, product, entries
        self._made: dict[tuple[str, str], LinearOperator] = {}

    def __getitem__(self, key: str | tuple[str, str]) -> LinearOperator:
        row, column = (self.aliases.get(name, name) for name in checks.block_pair("block", key))
        for name in (row, column):
            checks.block_named("block", name, self.shapes)
        if self.names.index(row) > self.names.index(column):
            return self[column, row].T
        if (row, column) not in self._made:
            self._made[row, column] = self._entry(row, column)
        return self._made[row, column]

    def select(self, names: Sequence[str]) -> "BlockMatrix":
        """The matrix on some of the blocks, as a `BlockMatrix` with these `names`, in the order given."""
        checks.different_blocks("names", names, self.aliases)
        shapes = {name: self[name].row_shape for name in names}
        return BlockMatrix(shapes, lambda row, column: self[row, column], self.like)

    def _pairs(self) -> list[tuple[str, str]]:
        return [(row, column) for i, row in enumerate(self.names) for column in self.names[i:]]

    def _write(self, out: Tensor) -> None:
        known = self._entries() if self._entries is not None else {}
        for row, column in self._pairs():
            target, mirror = self._region(out, row, column), self._region(out, column, row)
            if (row, column) in known:
                target.copy_(known[row, column])
                if row != column:
                    write_transposed(mirror, target)
            elif row == column:
                self[row]._write(target)
            else:
                self[row, column]._write_both(target, mirror)

    def _region(self, out: Tensor, row: str, column: str) -> Tensor:
        """The place of a block in the whole, (a, p, b, q)."""
        region = out[self.ranges[row], 0, self.ranges[column], 0]
        return region.unflatten(1, self.shapes[column]).unflatten(0, self.shapes[row])

    def _workspace(self, room: int) -> int:
        entries = self.shape[0] * self.shape[1] * self.dtype.itemsize
        if self._entries is not None:  # half of them, of either part
            return entries
        sizes = [
            (self[pair].shape[0] * self[pair].shape[1] * self.dtype.itemsize, self[pair]) for pair in self._pairs()
        ]
        return max(size + block._workspace(max(0, room - size)) for size, block in sizes)

    def _matmat(self, columns: Tensor) -> Tensor:
        if self._product is not None:
            return self._product(columns)
        result = torch.zeros_like(columns)
        for row, column in self._pairs():
            result[self.ranges[row]] += self[row, column]._matmat(columns[self.ranges[column]])
            if row != column:
                result[self.ranges[column]] += self[column, row]._matmat(columns[self.ranges[row]])
        return result

    def _trace(self) -> float:
        return sum(self[name]._trace() for name in self.names)

    def _diagonal(self) -> Tensor:
        return torch.cat([self[name]._diagonal() for name in self.names])

    def _norm(self) -> float:
        return math.hypot(*(_twice(row != column, self[row, column]._norm()) for row, column in self._pairs()))

    def norm_bound(self) -> float:
        """The spectral norm of the matrix of the blocks' bounds."""
        bounds = torch.zeros(len(self.names), len(self.names), dtype=torch.float64)
        for row, column in self._pairs():
            i, j = self.names.index(row), self.names.index(column)
            bounds[i, j] = bounds[j, i] = self[row, column].norm_bound()
        return float(torch.linalg.matrix_norm(bounds, 2))


class BlockHessian(ShownAsTable):
    """A Hessian over named blocks: `total = outer + functional`, three `BlockMatrix` of the same names.

    `H["Q", "K"]` is a block of the total, `H["Q"]` a diagonal block. Whatever a block answers, `H` answers for the
    whole total.

    Args:
        outer: the outer-product (Gauss-Newton) part.
        functional: the functional part.
        product: multiplies with the whole total at once.
        entries: makes the entries of several blocks of the total at once.

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.arange(6.0).double().view(3, 2)
        >>> H = cv.exact.LinearMLP([torch.eye(2).double()]).hessian(X, cv.losses.MSE(X))
        >>> H.names, H.shape, H.trace() == H["W1"].trace()
        (['W1'], (4, 4), True)
        >>> values, vectors = H.eigenvalues(1, vectors=True)
        >>> values[0], vectors.shape
        (Estimate(18.186..., exact), torch.Size([4, 1]))
    """

    def __init__(
        self,
        outer: BlockMatrix,
        functional: BlockMatrix,
        product: Multiplication | None = None,
        entries: Callable[[], Entries] | None = None,
    ) -> None:
        self.outer, self.functional = outer, functional
        self.total = BlockMatrix(
            outer.shapes,
            lambda row, column: outer[row, column] + functional[row, column],
            outer.like,
            product,
            entries,
            outer.aliases,
        )

    @property
    def names(self) -> list[str]:
        """Names of the blocks, in the order of rows and columns."""
        return self.total.names

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of each block's weight."""
        return self.total.shapes

    @property
    def shape(self) -> Shape:
        """Shape of the whole matrix."""
        return self.total.shape

    def __getitem__(self, key: str | tuple[str, str]) -> LinearOperator:
        return self.total[key]

    def __matmul__(self, vector: Tensor) -> Tensor:
        return self.total @ vector

    def dense(self) -> Tensor:
        """All entries of the total, in the order of `names`."""
        return self.total.dense()

    def trace(self, **options: Any) -> Estimate:
        """The trace of the total.

        Args:
            **options: `matvecs`, `tolerance` and `seed`, as for `LinearOperator.trace`.

        Returns:
            An `Estimate`; `stderr` is 0 if it is exact.
        """
        return self.total.trace(**options)

    def diagonal(self, **options: Any) -> DiagonalEstimate:
        """The diagonal (n,) of the total, in the order of `names`; options as for `LinearOperator.diagonal`."""
        return self.total.diagonal(**options)

    def frobenius_norm(self, **options: Any) -> Estimate:
        """The Frobenius norm of the total; options as for `LinearOperator.frobenius_norm`."""
        return self.total.frobenius_norm(**options)

    def spectral_norm(self, **options: Any) -> Estimate:
        """The largest singular value of the total; options as for `LinearOperator.spectral_norm`."""
        return self.total.spectral_norm(**options)

    def eigenvalues(self, k: int | None = None, which: str = "LM", **options: Any) -> Any:
        """Eigenvalues of the total, in ascending order.

        Args:
            k: how many; None: all of them.
            which: the k of largest magnitude ("LM"), the largest ("LA") or the smallest ("SA").
            **options: `vectors`, `matvecs`, `tolerance` and `seed`, as for `LinearOperator.eigenvalues`.

        Returns:
            A tensor (k,) of Estimates; with `vectors=True`, the pair of it and the unit eigenvectors (n, k).
        """
        return self.total.eigenvalues(k, which, **options)

    def density(self, **options: Any) -> Density:
        """The density of the eigenvalues of the total.

        Args:
            **options: `matvecs`, `tolerance`, `seed` and `steps`, as for `LinearOperator.density`.

        Returns:
            A `Density`: moments, the cumulative function and the ends of the spectrum, with error bars.
        """
        return self.total.density(**options)

    def solve(self, b: Tensor, damping: float = 1e-3, tolerance: float = 1e-6, **options: Any) -> Solution:
        """x = (total + damping)^-1 b, with a bound on its error.

        Args:
            b: (n,), or (n, c) for several right-hand sides.
            damping: a number ≥ 0.
            tolerance: the relative residual at which to stop.
            **options: `method`, `preconditioner`, `start`, `matvecs` and `seed`, as for `LinearOperator.solve`.

        Returns:
            A `Solution`: the `value` x, its `residual` and `error_bound`, and whether it `converged`.
        """
        return self.total.solve(b, damping, tolerance, **options)

    def inverse(self, damping: float = 1e-3, **options: Any) -> LinearOperator:
        """(total + damping)^-1 as an operator, for damping ≥ 0; options as for `LinearOperator.inverse`."""
        return self.total.inverse(damping, **options)

    def logdet(self, damping: float = 1e-3, **options: Any) -> Estimate:
        """log det(total + damping), for a total + damping that is positive definite.

        Args:
            damping: a number ≥ 0.
            **options: `matvecs`, `tolerance`, `seed` and `steps`, as for `LinearOperator.logdet`.

        Returns:
            An `Estimate`.
        """
        return self.total.logdet(damping, **options)

    def effective_dimension(self, damping: float = 1e-3, **options: Any) -> Estimate:
        """tr total (total + damping)^-1; arguments and result as for `logdet`."""
        return self.total.effective_dimension(damping, **options)

    def inverse_diagonal(self, damping: float = 1e-3, **options: Any) -> DiagonalEstimate:
        """The diagonal (n,) of (total + damping)^-1; options as for `LinearOperator.inverse_diagonal`."""
        return self.total.inverse_diagonal(damping, **options)

    def __repr__(self) -> str:
        blocks = ", ".join(f"{name} {a}x{p}" for name, (a, p) in self.shapes.items())
        return f"{type(self).__name__}({self.shape[0]} x {self.shape[1]}: {blocks})"

    def _shown(self) -> TextTable:
        """Name, shape and size of every block: nothing that needs computing."""
        rows = [(name, f"{a} × {p}", f"{a * p:,}") for name, (a, p) in self.shapes.items()]
        size, dtype = self.shape[0], str(self.total.dtype).removeprefix("torch.")
        title = f"{type(self).__name__}, {size:,} × {size:,}, {dtype}: total = outer + functional"
        return TextTable(("block", "shape", "size"), rows, title, right=("size",))


def _twice(mirrored: bool, norm: float) -> float:
    """The norm of a block, with its mirror image if it has one."""
    return math.sqrt(2) * norm if mirrored else norm
