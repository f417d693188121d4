"""Linear operators: what a Hessian block can be asked, whatever computes it.

A block maps the row-major vec of one weight (b, q) to that of another (a, p). Its entries are written
`B[ap, bq]`; `row_shape = (a, p)` and `column_shape = (b, q)`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
import scipy.sparse.linalg
import torch
from torch import Tensor

from curvoscope import checks, estimate
from curvoscope.errors import NonFiniteError, RangeError, ShapeError
from curvoscope.estimate import Density, DiagonalEstimate, Eigenvalues, Estimate
from curvoscope.magnitudes import norm, power_of_two

Shape = tuple[int, int]
Multiplication = Callable[[Tensor], Tensor]  # columns (C, n) -> (R, n)
ProductPair = tuple[Multiplication, Multiplication]  # with an operator and with its transpose

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_DENSE_EIGENVALUES = 2048  # up to this size all eigenvalues at once are faster than a Krylov method
_BESIDE = 6  # vectors beside a Lanczos basis
_FACTORED = 2  # matrices in memory while LAPACK finds eigenvalues or singular values: the entries, and its copy


class LinearOperator(ABC):
    """A real matrix known by its products. Subclasses give `_matmat` and, unless symmetric, `_transposed`."""

    def __init__(self, row_shape: Shape, column_shape: Shape, like: Tensor, symmetric: bool = False) -> None:
        self.row_shape, self.column_shape = row_shape, column_shape
        self.shape: Shape = (row_shape[0] * row_shape[1], column_shape[0] * column_shape[1])
        self.dtype, self.device = like.dtype, like.device
        self.symmetric = symmetric

    @property
    def like(self) -> Tensor:
        """An empty tensor of the operator's dtype, on its device."""
        return torch.empty(0, dtype=self.dtype, device=self.device)

    # ---- what subclasses say

    @abstractmethod
    def _matmat(self, columns: Tensor) -> Tensor:
        """(C, n) -> (R, n)."""

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

    def _trace(self, memory_limit: int | None) -> float:
        return float(self._diagonal(memory_limit).sum())

    def _diagonal(self, memory_limit: int | None) -> Tensor:
        return torch.cat([part[start:].diagonal() for start, part in self._columns(memory_limit)])

    def _norm(self, memory_limit: int | None) -> float:
        return math.hypot(*(norm(part) for _, part in self._columns(memory_limit)))

    def _columns(self, memory_limit: int | None) -> Iterator[tuple[int, Tensor]]:
        """The entries, (R, c) from a column on: all of them where they fit, else a few columns at a time."""
        rows, columns = self.shape
        budget = checks.memory_budget(memory_limit)
        if self._bytes(2, budget) <= budget:
            yield 0, self.dense(memory_limit=budget)
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

    def dense(self, memory_limit: int | None = None) -> Tensor:
        """All entries, (R, C)."""
        rows, columns = self.shape
        room = self._fits(1, memory_limit)
        out = _empty(rows, columns, self.dtype, self.device)
        with checks.limited(max(1, room)):
            self._write(out.view(*self.row_shape, *self.column_shape))
        return checks.finite("dense", out)

    def _fits(self, copies: int, memory_limit: int | None) -> int:
        """The bytes beside the entries, once it is known that `copies` of them fit, and one with what makes it."""
        rows, columns = self.shape
        budget = checks.memory_budget(memory_limit)
        checks.fits(
            self._bytes(copies, budget),
            budget,
            f"a dense block of {rows} x {columns}",
            "ask for trace(), diagonal(), frobenius_norm(), eigenvalues(k=...) or products with @ instead",
        )
        return budget - rows * columns * self.dtype.itemsize

    def _bytes(self, copies: int, budget: int) -> int:
        """What the entries take while they are made, or `copies` of them, whichever is more."""
        entries = self.shape[0] * self.shape[1] * self.dtype.itemsize
        return max(copies * entries, entries + self._workspace(max(0, budget - entries)))

    def to_scipy(self) -> scipy.sparse.linalg.LinearOperator:
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

    def trace(
        self,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int = 0,
        memory_limit: int | None = None,
    ) -> float | Estimate:
        """The trace: exact, or an Estimate when `matvecs` or `tolerance` ask for one."""
        self._square("trace")
        if matvecs is None and tolerance is None:
            return _answered("trace", memory_limit, self._trace)
        with checks.limited(memory_limit):
            return estimate.trace(self, matvecs=matvecs, tolerance=tolerance, seed=seed)

    def diagonal(
        self,
        memory_limit: int | None = None,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> Tensor | DiagonalEstimate:
        """The diagonal, (R,): exact, or a DiagonalEstimate when `matvecs` or `tolerance` ask for one."""
        self._square("diagonal")
        if matvecs is None and tolerance is None:
            return _answered("diagonal", memory_limit, self._diagonal)
        with checks.limited(memory_limit):
            return estimate.diagonal(self, matvecs=matvecs, tolerance=tolerance, seed=seed)

    def frobenius_norm(
        self,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int = 0,
        memory_limit: int | None = None,
    ) -> float | Estimate:
        """The Frobenius norm: exact, or an Estimate when `matvecs` or `tolerance` ask for one."""
        if matvecs is None and tolerance is None:
            return _answered("frobenius_norm", memory_limit, self._norm)
        with checks.limited(memory_limit):
            return estimate.frobenius_norm(self, matvecs=matvecs, tolerance=tolerance, seed=seed)

    def density(
        self,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int = 0,
        steps: int | None = None,
        memory_limit: int | None = None,
    ) -> Density:
        """The density of the eigenvalues, by stochastic Lanczos quadrature: exact where the budget reaches the size."""
        return estimate.density(
            self, matvecs=matvecs, tolerance=tolerance, seed=seed, steps=steps, memory_limit=memory_limit
        )

    def spectral_norm(
        self,
        memory_limit: int | None = None,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int = 0,
    ) -> float | Estimate:
        """The largest singular value: to machine precision, or an Estimate when `matvecs` or `tolerance` ask for it."""
        if matvecs is None and tolerance is None:
            return _answered("spectral_norm", memory_limit, self._spectral_norm)
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
        """Eigenvalues in ascending order: all, or the `k` of largest magnitude (LM), largest (LA), smallest (SA).

        `matvecs` and `tolerance` ask for the k as Estimates.
        """
        self._square("eigenvalues")
        if not self.symmetric:
            raise ShapeError("eigenvalues", "this block is not symmetric; use spectral_norm()")
        if k is not None and not 1 <= k <= self.shape[0]:
            raise RangeError("k", f"got {k}, expected 1 to {self.shape[0]}")
        checks.choice("which", which, ("LM", "LA", "SA"))
        if k is None or (matvecs is None and tolerance is None):
            return _answered("eigenvalues", memory_limit, lambda limit: self._eigenvalues(k, which, limit))
        return estimate.lanczos(
            self, k, which, matvecs=matvecs, tolerance=tolerance, seed=seed, memory_limit=memory_limit
        )

    def _spectral_norm(self, memory_limit: int | None) -> float:
        from curvoscope.operators.compositions import Gram

        if self.symmetric:
            return float(self._eigenvalues(1, "LM", memory_limit).abs().max())
        if min(self.shape) <= _DENSE_EIGENVALUES:
            self._fits(_FACTORED, memory_limit)
            return float(torch.linalg.matrix_norm(self.dense(memory_limit=memory_limit), 2))
        gram = Gram(self)
        return float(gram._eigenvalues(1, "LM", memory_limit).clamp_min(0).sqrt().max()) * gram.unit

    def _lanczos_norm(
        self, memory_limit: int | None, matvecs: int | None, tolerance: float | None, seed: int
    ) -> Estimate:
        from curvoscope.operators.compositions import Gram

        operator = self if self.symmetric else Gram(self)
        found = estimate.lanczos(
            operator, 1, "LM", matvecs=matvecs, tolerance=tolerance, seed=seed, memory_limit=memory_limit
        )[0]
        if isinstance(operator, Gram):
            return found.root().scaled(operator.unit)
        return Estimate(abs(found.value), found.stderr, found.matvecs, found.method)

    def _eigenvalues(self, k: int | None, which: str, memory_limit: int | None) -> Tensor:
        size = self.shape[0]
        if k is None or size <= _DENSE_EIGENVALUES or k >= size - 1 or self._spectrum_is_cheap():
            values = self._all_eigenvalues(memory_limit)
            if k is None:
                return values
            order = {"LM": -values.abs(), "LA": -values, "SA": values}[which].argsort(stable=True)
            return values[order[:k]].sort().values
        checks.fits(
            8 * size * (max(2 * k + 1, 20) + _BESIDE),
            memory_limit,
            f"a Lanczos basis for {k} eigenvalues of a block of {size} x {size}",
            "ask for fewer, or for estimates with tolerance=",
        )
        start = np.random.default_rng(0).standard_normal(size)
        operator = self.to_scipy()
        first = checks.finite("product", torch.from_numpy(operator.matvec(start.astype(operator.dtype))))
        if not bool(first.any()):  # eigsh cannot start on a zero matrix
            return torch.zeros(k, dtype=self.dtype, device=self.device)
        unit = power_of_two(first)  # the thresholds of eigsh are for norms near one
        found = scipy.sparse.linalg.eigsh(operator * (1 / unit), k, which=which, v0=start, return_eigenvectors=False)
        return torch.as_tensor(np.sort(found), dtype=self.dtype, device=self.device) * unit

    def norm_bound(self, memory_limit: int | None = None) -> float:
        """An upper bound on the spectral norm that costs no eigenvalue problem of the block's size where possible."""
        return self._spectral_norm(memory_limit)

    def _spectrum_is_cheap(self) -> bool:
        """Whether all eigenvalues cost less than a Krylov method."""
        return False

    def _all_eigenvalues(self, memory_limit: int | None) -> Tensor:
        self._fits(_FACTORED, memory_limit)
        return torch.linalg.eigvalsh(self.dense(memory_limit=memory_limit))

    def _square(self, question: str) -> None:
        if self.shape[0] != self.shape[1]:
            raise ShapeError(question, f"needs a square block, this one is {self.shape[0]} x {self.shape[1]}")

    def __repr__(self) -> str:
        kind = "symmetric " if self.symmetric else ""
        return f"{type(self).__name__}({kind}{self.shape[0]} x {self.shape[1]}, {self.dtype})"


def _answered(question: str, memory_limit: int | None, compute: Callable[[int | None], checks.Answer]) -> checks.Answer:
    """What `compute(memory_limit)` finds, once it is known to be finite; the limit holds for all that it calls."""
    try:
        with checks.limited(memory_limit):
            return checks.finite(question, compute(memory_limit))
    except (NonFiniteError, torch.linalg.LinAlgError) as error:  # the latter is what LAPACK says
        raise NonFiniteError(
            question, "the entries overflow; scale the weights and inputs down, or convert them to float64"
        ) from error


def _empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised matrix. On the CPU from numpy, which asks for huge pages: large results are written faster."""
    if device.type == "cpu" and dtype in _NUMPY:
        return torch.from_numpy(np.empty((rows, columns), _NUMPY[dtype]))
    return torch.empty(rows, columns, dtype=dtype, device=device)
