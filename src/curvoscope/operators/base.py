"""Linear operators: what a Hessian block can be asked, whatever computes it.

A block maps the row-major vec of one weight (b, q) to that of another (a, p). Its entries are written
`B[ap, bq]`; `row_shape = (a, p)` and `column_shape = (b, q)`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import scipy
import torch
from torch import Tensor

from curvoscope import checks, estimate
from curvoscope.errors import DtypeError, ShapeError
from curvoscope.estimate import DiagonalEstimate, Estimate
from curvoscope.estimate.space import empty
from curvoscope.magnitudes import in_single, norm
from curvoscope.operators.eigenvalues import Spectral
from curvoscope.operators.strips import write_transposed
from curvoscope.settings import settings

Shape = tuple[int, int]
Multiplication = Callable[[Tensor], Tensor]  # columns (C, n) -> (R, n)
ProductPair = tuple[Multiplication, Multiplication]  # with an operator and with its transpose


class LinearOperator(Spectral, ABC):
    """A real matrix (R, C) known by its products, with everything that can be asked of a Hessian block.

    `B @ v`, `B.T`, `B + C`, `2 * B`, `B.dense()`, `B.to_scipy()`; every number that it answers is an `Estimate`.
    Symmetric ones also answer `solve`, `inverse`, `logdet`, `effective_dimension` and `inverse_diagonal`.
    Subclasses give `_matmat` and, unless symmetric, `_transposed`.

    Args:
        row_shape: (a, p), the shape of the weight of the rows; R = a p.
        column_shape: (b, q), that of the columns; C = b q.
        like: a tensor of the operator's dtype, on its device.
        symmetric: whether the matrix is symmetric.

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.arange(6.0).double().view(3, 2)
        >>> H = cv.exact.LinearMLP([torch.eye(2).double()]).hessian(X, cv.losses.MSE(X))
        >>> block = H.outer["W1"]
        >>> block.shape, (block @ torch.ones(4).double()).shape
        ((4, 4), torch.Size([4]))
        >>> block.trace(), block.diagonal()[0]
        (Estimate(36.666..., exact), Estimate(6.666..., exact))
    """

    def __init__(self, row_shape: Shape, column_shape: Shape, like: Tensor, symmetric: bool = False) -> None:
        self.row_shape, self.column_shape = row_shape, column_shape
        self.shape: Shape = (row_shape[0] * row_shape[1], column_shape[0] * column_shape[1])
        self.dtype, self.device = like.dtype, like.device
        self.symmetric = symmetric

    @property
    def like(self) -> Tensor:
        """An empty tensor of the operator's dtype, on its device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    @property
    def estimated(self) -> bool:
        """Whether numbers are estimates also if neither `matvecs` nor `tolerance` asks for one."""
        return False

    # ---- what subclasses say

    @abstractmethod
    def _matmat(self, columns: Tensor) -> Tensor:
        """(C, n) -> (R, n)."""

    def steady(self) -> AbstractContextManager[None]:
        """A context for several products: what the operator is made of need not be examined for each of them."""
        return nullcontext()

    def _transposed(self) -> "LinearOperator":
        """The transpose of an operator that is not symmetric."""
        raise NotImplementedError(f"{type(self).__name__} has no transpose")

    def _write(self, out: Tensor) -> None:
        """Write the entries to `out`, a view of shape (a, p, b, q) into some larger matrix."""
        size = self.shape[1]
        if self.shape[0] < size:
            self._transposed()._write(out.permute(2, 3, 0, 1))  # fewer products
            return
        step = max(1, min(size, 2**24 // max(self.shape)))
        flat = out.new_empty(self.shape) if not out.is_contiguous() else out.view(self.shape)
        for start in range(0, size, step):
            stop = min(start + step, size)
            flat[:, start:stop] = self._matmat(self._units(start, stop))
        if self.symmetric:
            flat.copy_((flat + flat.T).mul_(0.5))
        if not out.is_contiguous():
            out.copy_(flat.view(out.shape))

    def _write_both(self, out: Tensor, mirror: Tensor) -> None:
        """Write the entries to `out`, and their transpose to `mirror`, a view of shape (b, q, a, p)."""
        self._write(out)
        write_transposed(mirror, out)

    def _workspace(self, room: int) -> int:
        """Bytes that `_write` needs beside the entries, `room` being left for it: what can be cut into chunks is."""
        rows, columns = self.shape
        step = max(1, min(columns, 2**24 // max(rows, columns)))
        return self.dtype.itemsize * max(2 * step * (rows + columns), rows * columns if self.symmetric else 0)

    def _trace(self) -> float:
        return float(self._diagonal().sum())

    def _diagonal(self) -> Tensor:
        return torch.cat([part[start:].diagonal() for start, part in self._columns()])

    def _norm(self) -> float:
        return math.hypot(*(norm(part) for _, part in self._columns()))

    def _columns(self) -> Iterator[tuple[int, Tensor]]:
        """The entries, (R, c) from a column on: all of them if they fit, otherwise a few columns at a time."""
        rows, columns = self.shape
        budget = self._budget()
        if self._bytes(2, budget) <= budget:
            yield 0, self.dense()
            return
        for start, stop in checks.chunks(columns, 1, 2 * (rows + columns) * self.dtype.itemsize, budget, "a column"):
            yield start, self._matmat(self._units(start, stop))

    def _units(self, start: int, stop: int) -> Tensor:
        """Columns `start` to `stop` of the identity."""
        units = torch.zeros(self.shape[1], stop - start, dtype=self.dtype, device=self.device)
        units[start:stop].fill_diagonal_(1)
        return units

    # ---- what everyone asks

    def __matmul__(self, other: Tensor) -> Tensor:
        if not isinstance(other, Tensor):
            raise DtypeError("vector", f"expected a torch.Tensor, got {type(other).__name__}")
        if other.ndim not in (1, 2) or other.shape[0] != self.shape[1]:
            raise ShapeError(
                "vector",
                f"got shape {tuple(other.shape)}, expected ({self.shape[1]},) or ({self.shape[1]}, n)",
            )
        checks.floating("vector", other, like=self.like)
        columns = other if other.ndim == 2 else other[:, None]
        product = checks.finite("product", self._matmat(columns))
        return product if other.ndim == 2 else product[:, 0]

    @property
    def T(self) -> "LinearOperator":
        """The transposed operator."""
        return self if self.symmetric else self._transposed()

    def adjoint(self) -> "LinearOperator":
        """The same, by the name that estimators of other packages ask for."""
        return self.T

    def __add__(self, other: "LinearOperator") -> "LinearOperator":
        from curvoscope.operators.compositions import Sum

        if not isinstance(other, LinearOperator):
            raise DtypeError("operator", f"expected a LinearOperator to add, got {type(other).__name__}")
        return Sum(self, other)

    def __mul__(self, factor: float) -> "LinearOperator":
        from curvoscope.operators.compositions import Scaled

        checks.real("factor", factor)
        return Scaled(self, factor)

    def __rmul__(self, factor: float) -> "LinearOperator":
        return self * factor

    def __neg__(self) -> "LinearOperator":
        return self * -1.0

    def __sub__(self, other: "LinearOperator") -> "LinearOperator":
        return self + -other

    def dense(self) -> Tensor:
        """All entries, (R, C)."""
        rows, columns = self.shape
        room = self._fits(1)
        out = empty(rows, columns, self.dtype, self.device)
        with settings(memory_limit=max(1, room)):
            self._write(out.view(*self.row_shape, *self.column_shape))
        return checks.finite("dense", out)

    def _fits(self, copies: int) -> int:
        """The bytes beside the entries, once it is known that `copies` of them fit, and one with what makes it."""
        rows, columns = self.shape
        budget = self._budget()
        checks.fits(
            self._bytes(copies, budget),
            budget,
            f"a dense block of {rows} x {columns}",
            "ask for trace(), diagonal(), frobenius_norm(), eigenvalues(k=...) or products with @ instead",
        )
        return budget - rows * columns * self.dtype.itemsize

    def _budget(self) -> int:
        """Bytes that an answer may take."""
        return checks.memory_budget()

    def _bytes(self, copies: int, budget: int) -> int:
        """What the entries take while they are made, or `copies` of them, whichever is more."""
        entries = self.shape[0] * self.shape[1] * self.dtype.itemsize
        return max(copies * entries, entries + self._workspace(max(0, budget - entries)))

    def to_scipy(self) -> "scipy.sparse.linalg.LinearOperator":
        """The same operator for scipy.sparse.linalg, on the CPU, in at least single precision."""
        outside = in_single(self.like).dtype

        def product(operator: LinearOperator) -> Callable[[np.ndarray], np.ndarray]:
            def apply(columns: np.ndarray) -> np.ndarray:
                tensor = torch.as_tensor(columns.reshape(operator.shape[1], -1), dtype=self.dtype)
                product = checks.finite("product", operator._matmat(tensor.to(self.device)))
                result: np.ndarray = product.to("cpu", outside).numpy()
                return result.reshape(operator.shape[0], *columns.shape[1:])

            return apply

        forward, backward = product(self), product(self.T)
        numpy_dtype = torch.empty(0, dtype=outside).numpy().dtype
        return scipy.sparse.linalg.LinearOperator(
            self.shape, matvec=forward, matmat=forward, rmatvec=backward, rmatmat=backward, dtype=numpy_dtype
        )

    def trace(self, *, matvecs: int | None = None, tolerance: float | None = None, seed: int | None = None) -> Estimate:
        """The trace of a square block, sum_i B_ii: exact, or estimated if `matvecs` or `tolerance` is given.

        Args:
            matvecs: the budget of matrix-vector products.
            tolerance: the relative standard error at which to stop.
            seed: of the random probes; by default that of `cv.settings`.

        Returns:
            An `Estimate`; `stderr` is 0 if it is exact. A block that is known by its products alone (a model's, if it
            has no closed form) is always estimated.
        """
        self._square("trace")
        if self._estimated(matvecs, tolerance):
            return estimate.trace(self, matvecs=matvecs, tolerance=tolerance, seed=seed)
        return Estimate(checks.answered("trace", self._trace))

    def diagonal(
        self, *, matvecs: int | None = None, tolerance: float | None = None, seed: int | None = None
    ) -> DiagonalEstimate:
        """The diagonal (R,) of a square block: exact, or estimated if `matvecs` or `tolerance` is given.

        Args:
            matvecs: the budget of matrix-vector products.
            tolerance: the relative standard error of the diagonal as a whole at which to stop.
            seed: of the random probes; by default that of `cv.settings`.

        Returns:
            A tensor with `.stderr`, `.exact`, `.matvecs`, `.method` and `.interval()`; its entries are Estimates.
        """
        self._square("diagonal")
        if self._estimated(matvecs, tolerance):
            return estimate.diagonal(self, matvecs=matvecs, tolerance=tolerance, seed=seed)
        return DiagonalEstimate(checks.answered("diagonal", self._diagonal))

    def frobenius_norm(
        self, *, matvecs: int | None = None, tolerance: float | None = None, seed: int | None = None
    ) -> Estimate:
        """The Frobenius norm, sqrt(sum_ij B_ij²): exact, or estimated if `matvecs` or `tolerance` is given.

        Args:
            matvecs: the budget of matrix-vector products.
            tolerance: the relative standard error at which to stop.
            seed: of the random probes; by default that of `cv.settings`.

        Returns:
            An `Estimate`; `stderr` is 0 if it is exact.
        """
        if self._estimated(matvecs, tolerance):
            return estimate.frobenius_norm(self, matvecs=matvecs, tolerance=tolerance, seed=seed)
        return Estimate(checks.answered("frobenius_norm", self._norm))

    def _estimated(self, matvecs: int | None, tolerance: float | None) -> bool:
        return self.estimated or matvecs is not None or tolerance is not None

    def _square(self, question: str) -> None:
        if self.shape[0] != self.shape[1]:
            raise ShapeError(question, f"needs a square block, this one is {self.shape[0]} x {self.shape[1]}")

    def __repr__(self) -> str:
        kind = "symmetric " if self.symmetric else ""
        return f"{type(self).__name__}({kind}{self.shape[0]} x {self.shape[1]}, {self.dtype})"


def summed(first: ProductPair | None, second: ProductPair | None) -> ProductPair | None:
    """The products with a sum, if those with both summands are known."""
    if first is None or second is None:
        return None
    (one, one_t), (two, two_t) = first, second
    return lambda columns: one(columns) + two(columns), lambda columns: one_t(columns) + two_t(columns)
