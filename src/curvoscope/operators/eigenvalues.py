"""What an operator answers about its eigenvalues and singular values: all of them, a few, their density, their size."""

from numbers import Integral
from typing import Literal, TypedDict, Unpack, overload

import numpy as np
import scipy
import torch
from torch import Tensor

from curvoscope import checks, estimate
from curvoscope.errors import ConvergenceError, RangeError, ShapeError
from curvoscope.estimate import Density, Eigenvalues, Estimate
from curvoscope.magnitudes import in_single, power_of_two
from curvoscope.operators.solving import Solvable

_DENSE_EIGENVALUES = 2048  # up to this size all eigenvalues at once are faster than a Krylov method
_LEAST_RESTARTS = 100
_BESIDE = 6  # vectors beside a Lanczos basis
_FACTORED = 2  # matrices in memory while LAPACK finds singular values: the entries, and its copy
_DOUBLES = 2  # matrices in double precision beside the entries while it finds eigenvalues


class _Effort(TypedDict, total=False):
    """What an estimate may cost, as the overloads of `eigenvalues` take it."""

    matvecs: int | None
    tolerance: float | None
    seed: int | None


class Spectral(Solvable):
    """The questions about eigenvalues and singular values that every `LinearOperator` answers.

    Subclasses that know more say so in `_all_eigenvalues`, with `_spectrum_is_cheap`, `_spectral_norm` or `norm_bound`.

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.arange(6.0).double().view(3, 2)
        >>> H = cv.exact.LinearMLP([torch.eye(2).double()]).hessian(X, cv.losses.MSE(X))
        >>> values = H.outer["W1"].eigenvalues(2, "LA")
        >>> bool(torch.allclose(values.value, torch.linalg.eigvalsh(H.outer["W1"].dense())[-2:]))
        True
        >>> abs(H.outer["W1"].spectral_norm() - values[-1]) < 1e-12
        True
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    symmetric: bool

    def spectral_norm(
        self, *, matvecs: int | None = None, tolerance: float | None = None, seed: int | None = None
    ) -> Estimate:
        """The largest singular value: to machine precision, or estimated if `matvecs` or `tolerance` is given.

        Args:
            matvecs: the budget of matrix-vector products of a Lanczos run.
            tolerance: the error bar, relative to the largest eigenvalue found (of B^T B if B is not symmetric), at
                which the run stops.
            seed: of the starting vectors; by default that of `cv.settings`.

        Returns:
            An `Estimate`, with the error bar of Lanczos if it is estimated.
        """
        if self._whole._estimated(matvecs, tolerance):
            return self._lanczos_norm(matvecs, tolerance, seed)
        return Estimate(checks.answered("spectral_norm", self._spectral_norm))

    def density(
        self,
        *,
        matvecs: int | None = None,
        tolerance: float | None = None,
        seed: int | None = None,
        steps: int | None = None,
    ) -> Density:
        """The density of the eigenvalues, by stochastic Lanczos quadrature: exact if the budget reaches the size.

        Args:
            matvecs: the budget of products, probes times steps; 512 if neither it nor `tolerance` is given.
            tolerance: the standard error of the cumulative function, averaged over the spread, at which to stop.
            seed: of the random probes; by default that of `cv.settings`.
            steps: Lanczos steps per probe; None: 64, or a quarter of a smaller budget.

        Returns:
            A `Density`, one sum of point masses per probe.
        """
        return estimate.density(self._whole, matvecs=matvecs, tolerance=tolerance, seed=seed, steps=steps)

    @overload
    def eigenvalues(
        self, k: int | None = None, which: str = "LM", *, vectors: Literal[False] = False, **effort: Unpack[_Effort]
    ) -> Eigenvalues: ...

    @overload
    def eigenvalues(
        self, k: int | None = None, which: str = "LM", *, vectors: Literal[True], **effort: Unpack[_Effort]
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
        self._whole._square("eigenvalues")
        if not self.symmetric:
            raise ShapeError("eigenvalues", "this block is not symmetric; use spectral_norm()")
        if k is not None and (not isinstance(k, Integral) or not 1 <= k <= self.shape[0]):
            raise RangeError("k", f"got {k}, expected a whole number from 1 to {self.shape[0]}")
        checks.choice("which", which, ("LM", "LA", "SA"))
        if k is not None and self._whole._estimated(matvecs, tolerance):
            found = estimate.lanczos(
                self._whole, k, which, matvecs=matvecs, tolerance=tolerance, seed=seed, vectors=vectors
            )
        elif vectors:
            pairs = checks.answered("eigenvalues", lambda: self._eigenpairs(k, which))
            found = Eigenvalues(pairs[0], vectors=pairs[1:])
        else:
            found = Eigenvalues(checks.answered("eigenvalues", lambda: self._eigenvalues(k, which)))
        return found if found.vectors is None else (found, found.vectors)

    # ---- how they are found

    def _spectral_norm(self) -> float:
        from curvoscope.operators.compositions import Gram

        if self.symmetric:
            return float(self._eigenvalues(1, "LM").abs().max())
        if min(self.shape) <= _DENSE_EIGENVALUES:
            half = self.dtype.itemsize < torch.float32.itemsize
            self._whole._fits(1 + 2 * _FACTORED if half else _FACTORED)
            return float(torch.linalg.matrix_norm(in_single(self._whole.dense()), 2))
        gram = Gram(self._whole)
        return float(gram._eigenvalues(1, "LM").clamp_min(0).sqrt().max()) * gram.unit

    def _lanczos_norm(self, matvecs: int | None, tolerance: float | None, seed: int | None) -> Estimate:
        from curvoscope.operators.compositions import Gram

        operator = self._whole if self.symmetric else Gram(self._whole)
        found = estimate.lanczos(operator, 1, "LM", matvecs=matvecs, tolerance=tolerance, seed=seed)[0]
        if isinstance(operator, Gram):
            return found.root().scaled(operator.unit)
        return Estimate(abs(found), found.stderr, found.matvecs, found.method)

    def _eigenvalues(self, k: int | None, which: str) -> Tensor:
        found = None
        if k is not None and not (self._takes_all_eigenvalues(k) or self._spectrum_is_cheap()):
            found = self._krylov(k, which, vectors=False)
        if found is not None:
            return found[0]
        values = self._all_eigenvalues()
        return values[_wanted(values, k, which)]

    def _eigenpairs(self, k: int | None, which: str) -> Tensor:
        """(1 + n, k): the eigenvalues, and below each its unit eigenvector."""
        if k is not None and not self._takes_all_eigenvalues(k):
            found = self._krylov(k, which, vectors=True)
            if found is not None:
                return found
        self._whole._fits(self._copies(_DOUBLES + 1))
        pairs = torch.linalg.eigh(self._whole.dense().double())
        table = torch.cat([part.view(-1, self.shape[0]) for part in pairs]).to(self.dtype)
        return table[:, _wanted(table[0], k, which)]

    def _takes_all_eigenvalues(self, k: int | None) -> bool:
        """Whether k eigenvalues are found among all of them."""
        return k is None or self.shape[0] <= _DENSE_EIGENVALUES or k >= self.shape[0] - 1

    def _krylov(self, k: int, which: str, vectors: bool) -> Tensor | None:
        """(1 + n, k) as `_eigenpairs`, or the eigenvalues (1, k) alone, by ARPACK; None if all eigenvalues cost less,
        as they do at an end of the spectrum where many lie close together."""
        size = self.shape[0]
        basis = max(2 * k + 1, 20)
        checks.fits(
            8 * size * (basis + _BESIDE),
            None,
            f"a Lanczos basis for {k} eigenvalues of a block of {size} x {size}",
            "ask for fewer, or for estimates with tolerance=",
        )
        start = np.random.default_rng(0).standard_normal(size)
        operator = self._whole.to_scipy()
        first = checks.finite("product", torch.from_numpy(operator.matvec(start.astype(operator.dtype))))
        if not bool(first.any()):  # eigsh cannot start on a zero matrix
            zero = torch.zeros(1, k, dtype=self.dtype, device=self.device)
            return torch.cat([zero, torch.eye(size, k, dtype=self.dtype, device=self.device)]) if vectors else zero
        unit = power_of_two(first)  # the thresholds of eigsh are for norms near one
        restarts = _LEAST_RESTARTS + 2 * size // (basis - k)  # as many products as twice all columns
        try:
            found = scipy.sparse.linalg.eigsh(
                operator * (1 / unit), k, which=which, v0=start, maxiter=restarts, return_eigenvectors=vectors
            )
        except scipy.sparse.linalg.ArpackNoConvergence as error:
            if self._whole._bytes(self._copies(_DOUBLES + vectors), checks.memory_budget()) <= checks.memory_budget():
                return None
            cure = "give tolerance= for estimates, or a memory_limit for all eigenvalues"
            raise ConvergenceError(
                "eigenvalues", f"{k} did not converge to rounding; {cure}", error.eigenvalues
            ) from error
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
        self._whole._fits(self._copies(_DOUBLES))
        return symmetric_eigenvalues(self._whole.dense())

    def _copies(self, doubles: int) -> int:
        """The entries and so many matrices in double precision, in units of the entries' memory."""
        beside = doubles if self.dtype != torch.float64 else doubles - 1  # float64 is not converted
        return 1 + beside * torch.float64.itemsize // self.dtype.itemsize


def symmetric_eigenvalues(matrices: Tensor) -> Tensor:
    """Eigenvalues (..., n) of symmetric matrices (..., n, n), ascending, in their dtype.

    Computed in double precision: in single, LAPACK returns NaN for some matrices of tiny entries on some CPUs.
    """
    return torch.linalg.eigvalsh(matrices.double()).to(matrices.dtype)


def _wanted(values: Tensor, k: int | None, which: str) -> Tensor:
    """Indices of the k wanted among ascending values, ascending."""
    order = {"LM": -values.abs(), "LA": -values, "SA": values}[which].argsort(stable=True)
    return order[:k].sort().values
