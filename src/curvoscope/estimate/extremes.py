"""Extreme eigenvalues by the method of one's choice: our Lanczos, or scipy's through `to_scipy`."""

import warnings

import numpy as np
import scipy
import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import NonFiniteError, RangeError
from curvoscope.estimate.krylov import DEFAULT_TOLERANCE, WHICH, Eigenvalues, lanczos
from curvoscope.estimate.products import Matrix, check_budget, check_symmetric
from curvoscope.magnitudes import power_of_two
from curvoscope.settings import chosen_seed

METHODS = ("lanczos", "eigsh", "lobpcg")
_ITERATIONS = 1000


def eigenvalues(
    operator: Matrix,
    k: int = 1,
    which: str = "LM",
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    start: Tensor | None = None,
    method: str = "lanczos",
    vectors: bool = False,
) -> Eigenvalues:
    """The k eigenvalues of largest magnitude (LM), largest (LA) or smallest (SA) of a symmetric operator.

    `lanczos` is the function of that name. `eigsh` (ARPACK's restarted Lanczos) and `lobpcg` (block conjugate
    gradients) are scipy's, for operators with `to_scipy()`. They say nothing of what they may have missed. So a run of
    `lanczos` from a random start follows, to the same tolerance or with a third of the budget: the error bar is the
    residual (from k more products), or what that run leaves possible if it is more. Its products are counted.

    Args:
        operator: (n, n), symmetric.
        k: how many; fewer than n for "eigsh", at most n/5 for "lobpcg".
        which: "LM", "LA" or "SA".
        matvecs: the budget of products, kept by "eigsh" and "lobpcg" to within their last iteration.
        tolerance: the error bar, relative to the largest eigenvalue found, at which to stop.
        seed: of the starting vectors; by default that of `cv.settings`.
        start: (n,) or (n, p) approximate eigenvectors.
        method: "lanczos", "eigsh" or "lobpcg".
        vectors: whether to return eigenvectors.

    Returns:
        The eigenvalues (k,) in ascending order, a tensor of Estimates; with their `vectors` (n, k) if asked for.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> found = estimate.eigenvalues(torch.diag(torch.arange(100.0)).double(), 1, "SA")
        >>> abs(found[0]) < 1e-4
        True
    """
    checks.choice("method", method, METHODS)
    if method == "lanczos":
        return lanczos(
            operator, k, which, matvecs=matvecs, tolerance=tolerance, seed=seed, start=start, vectors=vectors
        )
    check_symmetric(operator, "an eigenvalue")
    checks.choice("which", which, WHICH)
    check_budget(matvecs, tolerance, least=max(4, 4 * k))
    if not hasattr(operator, "to_scipy"):
        raise RangeError("method", f"{method!r} needs an operator with to_scipy(); use 'lanczos'")
    size = operator.shape[0]
    most = size - 1 if method == "eigsh" else size // 5
    if not 1 <= k <= most:
        raise RangeError("k", f"got {k}, expected 1 to {most} for {method!r} at size {size}")
    checked = None if matvecs is None else max(2, k, matvecs // 3)
    left = None if matvecs is None or checked is None else matvecs - checked
    counted = _Counted(operator.to_scipy())
    seed = chosen_seed(seed)
    first = _start(start, size, k, seed).astype(counted.dtype)
    if not counted.matmat(first).any():  # a zero matrix, on which neither can start
        found = first
    elif method == "eigsh":
        found = _eigsh(counted, k, which, left, tolerance or DEFAULT_TOLERANCE, first[:, 0])
    else:
        found = _lobpcg(counted, which, left, tolerance or DEFAULT_TOLERANCE, first)
    check = lanczos(operator, k, which, matvecs=checked, tolerance=tolerance, seed=seed + 1)
    return _rayleigh_ritz(
        counted, found, check, which, tolerance or DEFAULT_TOLERANCE, operator if vectors else None, method
    )


class _Counted:
    """An operator of scipy, `for_scipy`, that counts its products, refuses NaN, and divides by the size of its first
    product: ARPACK and LOBPCG have thresholds for matrices of norm one."""

    def __init__(self, inner: "scipy.sparse.linalg.LinearOperator") -> None:
        self._inner, self.shape, self.dtype = inner, inner.shape, inner.dtype
        self.products = 0
        self.unit = 0.0  # a power of two, once known
        self.for_scipy = scipy.sparse.linalg.LinearOperator(
            self.shape, matvec=lambda vector: self.matmat(vector.reshape(-1, 1)), matmat=self.matmat, dtype=self.dtype
        )

    def matmat(self, columns: np.ndarray) -> np.ndarray:
        """The product with columns (n, p)."""
        product: np.ndarray = self._inner.matmat(columns)
        if not np.isfinite(product).all():
            raise NonFiniteError("operator", "a product has entries that are NaN or infinite")
        self.products += columns.shape[1]
        self.unit = self.unit or power_of_two(torch.from_numpy(np.ascontiguousarray(product)))
        return product / self.unit


def _start(start: Tensor | None, size: int, k: int, seed: int) -> np.ndarray:
    """Starting vectors (n, k): those given, then random ones."""
    columns: np.ndarray = np.random.default_rng(seed).standard_normal((size, k))
    if start is not None:
        checks.floating("start", start)
        if start.ndim not in (1, 2) or start.shape[0] != size:
            raise RangeError("start", f"got shape {tuple(start.shape)}, expected ({size},) or ({size}, p)")
        given = start.reshape(size, -1)[:, :k].double().cpu().numpy()
        columns[:, : given.shape[1]] = given
    return columns


def _eigsh(
    operator: _Counted, k: int, which: str, matvecs: int | None, tolerance: float, first: np.ndarray
) -> np.ndarray:
    size = operator.shape[0]
    basis = min(size, max(2 * k + 1, 20)) if matvecs is None else min(size, max(k + 1, min(20 + 2 * k, matvecs - k)))
    restarts = _ITERATIONS if matvecs is None else max(1, (matvecs - k - basis) // (basis - k))
    try:
        _, vectors = scipy.sparse.linalg.eigsh(
            operator.for_scipy, k, which=which, v0=first, ncv=basis, maxiter=restarts, tol=tolerance
        )
    except scipy.sparse.linalg.ArpackNoConvergence as error:
        vectors = error.eigenvectors
        if vectors.shape[1] < k:
            raise RangeError(
                "matvecs",
                f"eigsh found {vectors.shape[1]} of {k} eigenvalues in {operator.products} products; give more, or use "
                "'lanczos', which returns what it has with its error bar",
            ) from None
    return np.asarray(vectors)


def _lobpcg(operator: _Counted, which: str, matvecs: int | None, tolerance: float, first: np.ndarray) -> np.ndarray:
    """One end of the spectrum, or both for the largest magnitudes."""
    ends = {"LM": (True, False), "LA": (True,), "SA": (False,)}[which]
    k = first.shape[1]
    iterations = _ITERATIONS if matvecs is None else max(1, matvecs // (k * len(ends)) - 3)
    scale = float(np.linalg.norm(operator.matmat(first), axis=0).max() / np.linalg.norm(first, axis=0).min())
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what has not converged says so by its residual
        for largest in ends:
            _, vectors = scipy.sparse.linalg.lobpcg(
                operator.for_scipy, first.copy(), largest=largest, tol=tolerance * scale, maxiter=iterations
            )
            found.append(vectors)
    return np.concatenate(found, 1)


def _rayleigh_ritz(
    operator: _Counted,
    found: np.ndarray,
    check: Eigenvalues,
    which: str,
    tolerance: float,
    like: Matrix | None,
    method: str,
) -> Eigenvalues:
    """The wanted values of the span of `found` (n, p), their error bars, and how orthonormal the vectors were."""
    basis, _ = np.linalg.qr(found.astype(np.float64))
    product = operator.matmat(basis.astype(operator.dtype)).astype(np.float64)
    projected = basis.T @ product
    values, turn = np.linalg.eigh((projected + projected.T) / 2)
    wanted = np.sort(np.argsort(-_outward(values, which), kind="stable")[: len(check)])
    values, vectors = values[wanted], basis @ turn[:, wanted]
    residuals = np.linalg.norm(product @ turn[:, wanted] - vectors * values, axis=0)
    norm = float(np.abs(values).max())
    residuals = np.maximum(residuals, np.finfo(operator.dtype).eps * norm)
    stderr = np.maximum(residuals, _missed(values, check, which, operator.unit))
    return Eigenvalues(
        checks.finite("eigenvalues", torch.from_numpy(values * operator.unit)),
        checks.finite("eigenvalues", torch.from_numpy(stderr * operator.unit)),
        operator.products + check.matvecs,
        method,
        converged=tuple((stderr <= tolerance * norm).tolist()),
        vectors=None if like is None else torch.as_tensor(vectors, dtype=like.dtype, device=like.device),
        orthogonality=float(np.abs(basis.T @ basis - np.eye(basis.shape[1])).max()),
        residuals=tuple((residuals * operator.unit).tolist()),
    )


def _missed(values: np.ndarray, check: Eigenvalues, which: str, unit: float) -> np.ndarray:
    """How much further out than `values` (k,), in `unit`, the eigenvalues may be that `check` bounds."""
    unit = unit or 1.0  # that of a zero matrix is 0
    seen, bars = check.value.numpy() / unit, check.stderr.numpy() / unit
    mine, theirs = (_outward(part, which) for part in (values, seen))
    found = np.empty_like(bars)
    order = theirs.argsort(kind="stable")  # of equal size and different signs, the two may not stand in one order
    found[mine.argsort(kind="stable")] = bars[order] + np.maximum(np.sort(theirs) - np.sort(mine), 0)
    return found


def _outward(values: np.ndarray, which: str) -> np.ndarray:
    """Numbers that are larger the more a value is wanted."""
    return {"LM": np.abs(values), "LA": values, "SA": -values}[which]
