"""Linear operators: what a Hessian block can be asked, whatever computes it.

A block maps the row-major vec of one weight (b, q) to that of another (a, p). Its entries are written
`B[ap, bq]`; `row_shape = (a, p)` and `column_shape = (b, q)`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, overload

import numpy as np
import scipy
import torch
from torch import Tensor

from curvoscope import checks, estimate
from curvoscope.errors import NonFiniteError, RangeError, ShapeError
from curvoscope.estimate import Density, DiagonalEstimate, Eigenvalues, Estimate
from curvoscope.estimate.space import empty
from curvoscope.magnitudes import norm, power_of_two
from curvoscope.operators.solving import Solvable
from curvoscope.settings import settings

Shape = tuple[int, int]
Multiplication = Callable[[Tensor], Tensor]  # columns (C, n) -> (R, n)
ProductPair = tuple[Multiplication, Multiplication]  # with an operator and with its transpose

_DENSE_EIGENVALUES = 2048  # up to this size all eigenvalues at once are faster than a Krylov method
_BESIDE = 6  # vectors beside a Lanczos basis
_FACTORED = 2  # matrices in memory while LAPACK finds singular values: the entries, and its copy
_DOUBLES = 2  # matrices in double precision beside the entries while it finds eigenvalues


class LinearOperator(Solvable, ABC):
    """A real matrix (R, C) known by its products; what a Hessian block can be asked.

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
        for start, stop in checks.chunks(columns, 1, 2 * (rows + columns) * self.dtype.itemsize, budget):
            yield start, self._matmat(self._units(start, stop))

    def _units(self, start: int, stop: int) -> Tensor:
        """Columns `start` to `stop` of the identity."""
        units = torch.zeros(self.shape[1], stop - start, dtype=self.dtype, device=self.device)
        units[start:stop].fill_diagonal_(1)
        return units

    # ---- what everyone asks

    def __matmul__(self, other: Tensor) -> Tensor:
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

        return Sum(self, other)

    def __mul__(self, factor: float) -> "LinearOperator":
        from curvoscope.operators.compositions import Scaled

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
        """The same operator for scipy.sparse.linalg, on the CPU."""

        def product(operator: LinearOperator) -> Callable[[np.ndarray], np.ndarray]:
            def apply(columns: np.ndarray) -> np.ndarray:
                tensor = torch.as_tensor(columns.reshape(operator.shape[1], -1), dtype=self.dtype)
                result: np.ndarray = operator._matmat(tensor.to(self.device)).cpu().numpy()
                return result.reshape(operator.shape[0], *columns.shape[1:])

            return apply

        forward, backward = product(self), product(self.T)
        numpy_dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
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
        return Estimate(_answered("trace", self._trace))

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
        return DiagonalEstimate(_answered("diagonal", self._diagonal))

    def frobenius_norm(
        self, *, matvecs: int | None = None, tolerance: float | None = None, seed: int | None = None
    ) -> Estimate:
        """The Frobenius norm, sqrt(sum_ij B_ij²): exact, or estimated if `matvecs` or `tolerance` is given.

        Args and returns as for `trace`.
        """
        if self._estimated(matvecs, tolerance):
            return estimate.frobenius_norm(self, matvecs=matvecs, tolerance=tolerance, seed=seed)
        return Estimate(_answered("frobenius_norm", self._norm))

    def spectral_norm(
        self, *, matvecs: int | None = None, tolerance: float | None = None, seed: int | None = None
    ) -> Estimate:
        """The largest singular value: to machine precision, or estimated if `matvecs` or `tolerance` is given.

        Args and returns as for `trace`; the error bar is that of Lanczos.
        """
        if self._estimated(matvecs, tolerance):
            return self._lanczos_norm(matvecs, tolerance, seed)
        return Estimate(_answered("spectral_norm", self._spectral_norm))

    def density(
        self,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int | None = None,
        steps: int | None = None,
    ) -> Density:
        """The density of the eigenvalues, by stochastic Lanczos quadrature: exact if the budget reaches the size.

        Args and returns as for `curvoscope.estimate.density`.
        """
        return estimate.density(self, matvecs=matvecs, tolerance=tolerance, seed=seed, steps=steps)

    @overload
    def eigenvalues(
        self,
        k: int | None = None,
        which: str = "LM",
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int | None = None,
        vectors: Literal[False] = False,
    ) -> Eigenvalues: ...

    @overload
    def eigenvalues(
        self,
        k: int | None = None,
        which: str = "LM",
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int | None = None,
        vectors: Literal[True],
    ) -> tuple[Eigenvalues, Tensor]: ...

    def eigenvalues(
        self,
        k: int | None = None,
        which: str = "LM",
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int | None = None,
        vectors: bool = False,
    ) -> Eigenvalues | tuple[Eigenvalues, Tensor]:
        """The eigenvalues of a symmetric block, in ascending order: exact, or by Lanczos.

        Args:
            k: how many; None: all of them, from the entries.
            which: the k of largest magnitude ("LM"), the largest ("LA") or the smallest ("SA").
            matvecs: the budget of matrix-vector products of a Lanczos run.
            tolerance: the error bar, relative to the largest eigenvalue found, at which a Lanczos run stops.
            seed: of the starting vectors; by default that of `cv.settings`.
            vectors: whether to return eigenvectors too.

        Returns:
            A tensor (k,) of Estimates with `.stderr`, `.exact`, `.matvecs`, `.method` and `.interval()`;
            with `vectors`, the pair of it and the unit eigenvectors (n, k), its columns.
        """
        self._square("eigenvalues")
        if not self.symmetric:
            raise ShapeError("eigenvalues", "this block is not symmetric; use spectral_norm()")
        if k is not None and not 1 <= k <= self.shape[0]:
            raise RangeError("k", f"got {k}, expected 1 to {self.shape[0]}")
        checks.choice("which", which, ("LM", "LA", "SA"))
        if k is not None and self._estimated(matvecs, tolerance):
            found = estimate.lanczos(self, k, which, matvecs=matvecs, tolerance=tolerance, seed=seed, vectors=vectors)
        elif vectors:
            pairs = _answered("eigenvalues", lambda: self._eigenpairs(k, which))
            found = Eigenvalues(pairs[0], vectors=pairs[1:])
        else:
            found = Eigenvalues(_answered("eigenvalues", lambda: self._eigenvalues(k, which)))
        return found if found.vectors is None else (found, found.vectors)

    def _estimated(self, matvecs: int | None, tolerance: float | None) -> bool:
        return self.estimated or matvecs is not None or tolerance is not None

    def _spectral_norm(self) -> float:
        from curvoscope.operators.compositions import Gram

        if self.symmetric:
            return float(self._eigenvalues(1, "LM").abs().max())
        if min(self.shape) <= _DENSE_EIGENVALUES:
            self._fits(_FACTORED)
            return float(torch.linalg.matrix_norm(self.dense(), 2))
        gram = Gram(self)
        return float(gram._eigenvalues(1, "LM").clamp_min(0).sqrt().max()) * gram.unit

    def _lanczos_norm(self, matvecs: int | None, tolerance: float | None, seed: int | None) -> Estimate:
        from curvoscope.operators.compositions import Gram

        operator = self if self.symmetric else Gram(self)
        found = estimate.lanczos(operator, 1, "LM", matvecs=matvecs, tolerance=tolerance, seed=seed)[0]
        if isinstance(operator, Gram):
            return found.root().scaled(operator.unit)
        return Estimate(abs(found), found.stderr, found.matvecs, found.method)

    def _eigenvalues(self, k: int | None, which: str) -> Tensor:
        if self._takes_all_eigenvalues(k) or self._spectrum_is_cheap():
            values = self._all_eigenvalues()
            return values[_wanted(values, k, which)]
        return self._krylov(k or 1, which, vectors=False)[0]

    def _eigenpairs(self, k: int | None, which: str) -> Tensor:
        """(1 + n, k): the eigenvalues, and below each its unit eigenvector."""
        if self._takes_all_eigenvalues(k):
            self._fits(self._copies(_DOUBLES + 1))
            pairs = torch.linalg.eigh(self.dense().double())
            found = torch.cat([part.view(-1, self.shape[0]) for part in pairs]).to(self.dtype)
            return found[:, _wanted(found[0], k, which)]
        return self._krylov(k or 1, which, vectors=True)

    def _takes_all_eigenvalues(self, k: int | None) -> bool:
        """Whether k eigenvalues are found among all of them."""
        return k is None or self.shape[0] <= _DENSE_EIGENVALUES or k >= self.shape[0] - 1

    def _krylov(self, k: int, which: str, vectors: bool) -> Tensor:
        """(1 + n, k) as `_eigenpairs`, or the eigenvalues (1, k) alone, by ARPACK."""
        size = self.shape[0]
        checks.fits(
            8 * size * (max(2 * k + 1, 20) + _BESIDE),
            None,
            f"a Lanczos basis for {k} eigenvalues of a block of {size} x {size}",
            "ask for fewer, or for estimates with tolerance=",
        )
        start = np.random.default_rng(0).standard_normal(size)
        operator = self.to_scipy()
        first = checks.finite("product", torch.from_numpy(operator.matvec(start.astype(operator.dtype))))
        if not bool(first.any()):  # eigsh cannot start on a zero matrix
            zero = torch.zeros(1, k, dtype=self.dtype, device=self.device)
            return torch.cat([zero, torch.eye(size, k, dtype=self.dtype, device=self.device)]) if vectors else zero
        unit = power_of_two(first)  # the thresholds of eigsh are for norms near one
        found = scipy.sparse.linalg.eigsh(operator * (1 / unit), k, which=which, v0=start, return_eigenvectors=vectors)
        values, *rest = found if vectors else (found,)
        order = np.argsort(values)
        table = np.concatenate([values[None, order] * unit, *(columns[:, order] for columns in rest)])
        return torch.as_tensor(table, dtype=self.dtype, device=self.device)

    def norm_bound(self) -> float:
        """An upper bound on the spectral norm that costs no eigenvalue problem of the block's size if possible."""
        return self._spectral_norm()

    def _spectrum_is_cheap(self) -> bool:
        """Whether all eigenvalues cost less than a Krylov method."""
        return False

    def _all_eigenvalues(self) -> Tensor:
        self._fits(self._copies(_DOUBLES))
        return symmetric_eigenvalues(self.dense())

    def _copies(self, doubles: int) -> int:
        """The entries and so many matrices in double precision, in units of the entries' memory."""
        beside = doubles if self.dtype != torch.float64 else doubles - 1  # float64 is not converted
        return 1 + beside * torch.float64.itemsize // self.dtype.itemsize

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


def symmetric_eigenvalues(matrices: Tensor) -> Tensor:
    """Eigenvalues (..., n) of symmetric matrices (..., n, n), ascending, in their dtype.

    Computed in double precision: in single, LAPACK returns NaN for some matrices of tiny entries on some CPUs.
    """
    return torch.linalg.eigvalsh(matrices.double()).to(matrices.dtype)


def _wanted(values: Tensor, k: int | None, which: str) -> Tensor:
    """Indices of the k wanted among ascending values, ascending."""
    order = {"LM": -values.abs(), "LA": -values, "SA": values}[which].argsort(stable=True)
    return order[:k].sort().values


def _answered(question: str, compute: Callable[[], checks.Answer]) -> checks.Answer:
    """Check that the result of `compute()` is finite and return it."""
    try:
        return checks.finite(question, compute())
    except (NonFiniteError, torch.linalg.LinAlgError) as error:  # the latter is what LAPACK says
        raise NonFiniteError(
            question, "the entries overflow; scale the weights and inputs down, or convert them to float64"
        ) from error
