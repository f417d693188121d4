"""Extreme eigenvalues by Lanczos: blocks, full re-orthogonalisation, thick restarts and their bounds."""

from typing import Any

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError, ShapeError
from curvoscope.estimate.missed import Projection, Starts
from curvoscope.estimate.products import COLUMNS, MOST, Matrix, Probes, Products, check_budget, check_symmetric
from curvoscope.estimate.result import EstimatedVector

DEFAULT_TOLERANCE = 1e-6
WHICH = ("LM", "LA", "SA")
_STRAY = 0.1  # the random part of a warm start
_CHUNK = 2**16  # columns of the basis rotated at once in a restart
_ROUNDING = 16  # units of rounding below which a vector is not a new direction
_INDEPENDENT = 1e-8  # the length of what a random vector adds, at least
_SHRUNK = 0.1  # of its length, below which a vector is made orthogonal again
_ENOUGH = 4  # random vectors, after which an invariant subspace is believed to hold the ends
_PATIENCE, _STUBBORN = 16, 512  # times the products for the residuals, and more, before bars are given up
_TINY = 1e-30  # a length that no random vector has
_RECORDS = 2**26  # bytes of records of restarts, if the basis itself does not take more
_SIGNS = {"LM": (1, -1), "LA": (1,), "SA": (-1,)}


class Eigenvalues(EstimatedVector):
    """Eigenvalues (k,) in ascending order. An error bar is the larger of the residual and of what may be missed.

    A symmetric B has an eigenvalue within the residual |B x - θ x| of θ. It need not be the first, second, ... of its
    kind: an eigenvector nearly orthogonal to the random start is seen late. How far out its eigenvalue may be has a
    bound that holds with a given probability (`estimate.missed`): the 95 % interval of a value holds the eigenvalue
    with at least that probability, ten error bars hold it with 99.99 %. For the largest magnitudes (LM) this is said of
    the magnitude. Multiplicities above the number of starting vectors are not seen.

    Args:
        value: the eigenvalues.
        stderr: their error bars (k,).
        matvecs: matrix-vector products that they took together.
        method: how they were found; "exact" for eigenvalues without an error.
        others: the attributes below; by default those of exact eigenvalues.

    Attributes:
        converged: whether each error bar is within the tolerance, or within 1e-6 of the norm if none was given.
        vectors: unit eigenvectors (n, k), columns in the order of the values, if they were asked for.
        orthogonality: the largest entry of |V V^T - I| of the Lanczos basis: what is lost to rounding.
        residuals: |B x - θ x|, not below rounding.

    Example:
        >>> import torch, curvoscope as cv
        >>> H = cv.exact.LinearMLP([torch.eye(2).double()]).hessian(torch.eye(2).double(), torch.sum)
        >>> values = H.eigenvalues(3)
        >>> values.tolist(), values[0], values.exact
        ([0.0, 0.0, 0.0], Estimate(0.0, exact), True)
    """

    converged: tuple[bool, ...]
    vectors: Tensor | None
    orthogonality: float
    residuals: tuple[float, ...]

    def __new__(
        cls, value: Tensor, stderr: Tensor | None = None, matvecs: int = 0, method: str = "exact", **others: Any
    ) -> "Eigenvalues":
        """By default those of exact eigenvalues."""
        count = len(value)
        exact = {"converged": (True,) * count, "vectors": None, "orthogonality": 0.0, "residuals": (0.0,) * count}
        return super().__new__(cls, value, stderr, matvecs, method, **exact | others)


def lanczos(
    operator: Matrix,
    k: int = 1,
    which: str = "LM",
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    start: Tensor | None = None,
    block: int | None = None,
    vectors: bool = False,
) -> Eigenvalues:
    """The k eigenvalues of largest magnitude (LM), largest (LA) or smallest (SA) of a symmetric operator.

    The basis V grows by the part of B V_last outside V, orthogonalised against the rows that B couples with V_last,
    then against all of V; the projection V B V^T is kept and diagonalised in float64. When V fills its memory, the best
    Ritz vectors and the last block make a new V. A block of b starting vectors finds eigenvalues of multiplicity up to
    b. When V becomes an invariant subspace, new random vectors join, until they change nothing. A run goes on until the
    residuals are small and an eigenvalue further out is improbable (`estimate.missed`); with a budget the error bars
    say what may have been missed.

    Args:
        operator: (n, n), symmetric.
        k: how many.
        which: "LM", "LA" or "SA".
        matvecs: the budget of products.
        tolerance: the error bar, relative to the largest eigenvalue found, at which to stop; 1e-6 when neither this nor
            a budget is given.
        seed: of the starting vectors; by default that of `cv.settings`.
        start: (n,) or (n, p) approximate eigenvectors, of an earlier point in training for example. A random tenth is
            added, so that an eigenvalue that has overtaken theirs is found too. They make residuals small sooner; to
            rule out that an eigenvalue has overtaken takes as many products as without them.
        block: vectors per product; the number of starting vectors, or min(k, 8).
        vectors: whether to return eigenvectors.

    Returns:
        The eigenvalues (k,) in ascending order, a tensor of Estimates; with their `vectors` (n, k) if asked for.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> found = estimate.lanczos(torch.diag(torch.arange(100.0)).double(), 2, "LA")
        >>> [round(value, 3) for value in found]
        [98.0, 99.0]
    """
    check_symmetric(operator, "an eigenvalue")
    size = operator.shape[0]
    if not 1 <= k <= size:
        raise RangeError("k", f"got {k}, expected 1 to {size}")
    checks.at_least(1, block=block)
    checks.choice("which", which, WHICH)
    with Products(operator, "eigenvalues", matvecs) as products:
        probes = Probes(products, seed)
        first, lengths = _first_block(products, probes, start, min(block or min(k, COLUMNS), size))
        check_budget(matvecs, tolerance, least=max(2, -(-k // len(first)) * len(first)))
        rounding = _ROUNDING * products.epsilon
        run = _Run(products, probes, k, which, first, lengths, matvecs)
        run.go(matvecs or MOST, max(rounding, tolerance or (0.0 if matvecs else DEFAULT_TOLERANCE)))
        return run.result(max(rounding, tolerance or DEFAULT_TOLERANCE), vectors)


def _first_block(products: Products, probes: Probes, start: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
    """Unit starting vectors as rows (b, n): those given, each with a random part, and random ones up to the block.

    Also the lengths (b,) that they have when their random parts are standard normal.
    """
    rows, space, length = probes.normal(block).T, products.space, products.space.length
    if start is not None:
        checks.floating("start", start)
        if start.ndim not in (1, 2) or start.shape[0] != length or start.numel() > length * products.size:
            raise ShapeError("start", f"got {tuple(start.shape)}, expected ({length},) or ({length}, p)")
        known = start.reshape(length, -1).T.to(products.device, products.dtype)
        known = known / space.norm(known, 1)[:, None].clamp_min(_TINY)
        stray = probes.normal(len(known)).T
        rows = torch.cat([products.size**0.5 / _STRAY * known + stray, rows[len(known) :]])
    lengths = space.norm(rows, 1)
    return rows / lengths[:, None].clamp_min(_TINY), lengths


class _Run:
    """The basis V (rows), how many of its rows have been multiplied, and the projection H = V B V^T of those."""

    def __init__(
        self,
        products: Products,
        probes: Probes,
        k: int,
        which: str,
        first: Tensor,
        lengths: Tensor,
        matvecs: int | None,
    ) -> None:
        self._products, self._probes, self._k, self._which = products, probes, k, which
        self._size, self._block, self._space = products.size, len(first), products.space
        wanted = min(self._size, matvecs + self._block if matvecs else max(256, 8 * (k + self._block)))
        self._limit = self._room(wanted)
        rows = self._limit + 2 * self._block
        self._V = products.basis(rows).T
        self._H = torch.zeros(rows, rows, dtype=torch.float64, device=products.device)
        self._done = self._joined = 0  # rows that have been multiplied, and rows
        self._coupled = 0  # the first row that B couples with those not yet multiplied, but for rounding
        self._scale = 0.0  # the largest |B v| so far
        self._found = 0  # products at which the residuals first were within the tolerance
        self._settled: Tensor | None = None
        self._starts = Starts()
        self._starts.add(self._join(first, _INDEPENDENT)[0].T * lengths[:, None])
        self._last_bars: Tensor | None = None  # once there were too many restarts for all to be recorded
        # B V_last = (H V)_last + coupling^T V_new: the rows of V not yet multiplied, against the last that were
        self._coupling = self._H[:0, :0]

    def _room(self, wanted: int) -> int:
        """Rows that V may have."""
        length, budget = self._space.longest, self._products.budget()
        beside = 4 * self._block  # new rows, their products and projections
        least = min(self._size, self._k + 2 * self._block + 2)
        one = self._products.dtype.itemsize * length
        on_disk = self._products.scratch is not None
        rows = max(least, wanted if on_disk else min(budget // one - beside, wanted))
        checks.fits(
            one * (beside if on_disk else rows + beside),
            budget,
            f"a basis of {rows} vectors of length {length}",
            "ask for fewer eigenvalues, give a smaller block, or a folder: cv.settings(scratch=...)",
        )
        return rows

    def go(self, matvecs: int, tolerance: float) -> None:
        """Multiply and extend, until the error bars are within the tolerance or the budget is spent."""
        look = self._k
        while self._done < self._size:
            next_rows = self._joined - self._done or min(self._block, self._size - self._done)
            if self._products.matvecs + next_rows > matvecs:
                return
            if self._joined == self._done and not self._inject(tolerance):
                return
            self._step()
            if self._done >= look and self._joined > self._done:
                if self._converged(tolerance):
                    return
                look = self._done + max(1, self._done // 10)
            if self._joined > self._limit:
                self._restart()
                look = self._k

    def _converged(self, tolerance: float) -> bool:
        """Whether the residuals and, if so, what may have been missed are within the tolerance. Also if many more
        products than the residuals took have not brought the latter there: noise in products does not let them."""
        projection = self._project()
        wanted = self._wanted(projection)
        limit = tolerance * self._norm(projection.values[wanted])
        if float(self._residuals(projection, wanted).max()) > limit:
            return False
        made = self._products.matvecs
        self._found = self._found or made
        return float(self._missed(projection, wanted).max()) <= limit or made > _PATIENCE * self._found + _STUBBORN

    def _step(self) -> None:
        """Multiply the new rows; their projections go to H, what is outside V becomes the next rows."""
        basis, fresh = self._V[: self._joined], self._V[self._done : self._joined]
        rows = self._V[self._joined : self._joined + len(fresh)].copy_(self._products(fresh.T).T)
        self._scale = max(self._scale, float(self._space.norm(rows, 1).max()))
        inside = self._take(basis, rows, self._coupled)
        inside[self._done :] = (inside[self._done :] + inside[self._done :].T) / 2
        self._H[: self._joined, self._done : self._joined] = inside
        self._H[self._done : self._joined, : self._joined] = inside.T
        self._coupled, self._done = self._done, self._joined
        self._coupling, lost = self._join(rows, _ROUNDING * self._products.epsilon * self._scale)
        self._starts.lost += lost

    def _take(self, basis: Tensor, rows: Tensor, first: int = 0) -> Tensor:
        """Take away, in place, the part of rows (b, n) in the span of the basis (j, n); returns it, (j, b).

        This is done twice, first from row `first` of the basis on: earlier ones must have a part of rounding alone.
        """
        inside = torch.zeros(len(basis), len(rows), dtype=torch.float64, device=rows.device)
        for start in (first, 0) if len(basis) else ():
            part = self._space.inner(basis[start:].T, rows.T)
            rows.addmm_(part.T.to(basis.dtype), basis[start:], alpha=-1)
            inside[start:] += part
        return inside

    def _join(self, rows: Tensor, least: float) -> tuple[Tensor, float]:
        """Append rows (b, n), made orthonormal among themselves in place, unless shorter than `least`.

        Returns the factor (b', b), and the sum of squares of what was too short.
        """
        first, lost = self._joined, 0.0
        factor = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
        for i, row in enumerate(rows):
            others, count = self._V[first : self._joined], self._joined - first
            length = before = float(self._space.norm(row, 0))
            if count:
                factor[:count, i] = self._take(others, row[None])[:, 0]
                length = float(self._space.norm(row, 0))
            if least < length < _SHRUNK * before:  # its rounding errors have grown with it, also along older rows
                factor[:count, i] += self._take(self._V[: self._joined], row[None])[first:, 0]
                length = float(self._space.norm(row, 0))
            if length > least and self._joined < self._size:
                torch.div(row, length, out=self._V[self._joined])
                factor[count, i] = length
                self._joined += 1
            else:
                lost += length**2
        return factor[: self._joined - first], lost

    def _inject(self, tolerance: float) -> bool:
        """V is invariant under B: random rows join it. False if the wanted values did not change since last time, and
        what may hide in the rounding of V is within the tolerance or has been sought often."""
        if self._done >= self._k:
            projection = self._project()
            wanted = self._wanted(projection)
            values = projection.values[wanted]
            limit = 4 * _ROUNDING * self._products.epsilon * self._scale
            if self._settled is not None and float((values - self._settled).abs().max()) <= limit:
                bars = self._missed(projection, wanted)
                if self._starts.count >= _ENOUGH or float(bars.max()) <= tolerance * self._norm(values):
                    return False
            self._settled = values
        basis = self._V[: self._done]
        rows = self._probes.normal(self._block).T
        inside = self._take(basis, rows)
        factor, _ = self._join(rows, _INDEPENDENT)
        self._starts.add(torch.cat([inside.T, factor.T], 1))
        self._coupling = self._coupling.new_zeros(self._joined - self._done, self._coupling.shape[1])
        return self._joined > self._done

    def _project(self) -> Projection:
        """All Ritz values, their vectors, and the coupling of the rows that have not been multiplied."""
        values, vectors = torch.linalg.eigh(self._H[: self._done, : self._done])
        return Projection(values, vectors, self._coupling @ vectors[self._done - self._coupling.shape[1] :])

    def _wanted(self, projection: Projection) -> Tensor:
        """Indices (k,) of the wanted Ritz values, which ascend."""
        return _best(projection.values, self._which)[: self._k].sort().values

    def _residuals(self, projection: Projection, wanted: Tensor) -> Tensor:
        return projection.coupling[:, wanted].norm(dim=0)

    def _missed(self, projection: Projection, wanted: Tensor) -> Tensor:
        """Error bars (k,) for eigenvalues that may have been missed."""
        if self._last_bars is not None:
            return self._last_bars
        values = projection.values[wanted]
        order, norm = _best(values, self._which), self._norm(values)
        outward = _outward(values[order], self._which).cpu()
        bars = torch.empty_like(outward)
        rounding = _ROUNDING * self._products.epsilon * norm
        bars[order.cpu()] = self._starts.bars(projection, outward, _SIGNS[self._which], norm, rounding)
        return bars

    def _norm(self, values: Tensor) -> float:
        """An estimate of |B|: no Ritz value nor product of a unit vector is larger."""
        return max(self._scale, float(values.abs().max()))

    def _restart(self) -> None:
        """Keep the best Ritz vectors and the rows not yet multiplied."""
        projection = self._project()
        values, vectors = projection.values, projection.vectors
        count = min(self._done - 1, max(self._k + self._block, (self._limit - self._block) // 2))
        kept = _best(values, self._which)[:count]
        if self._last_bars is None:
            if self._starts.bytes + vectors.nbytes > max(_RECORDS, self._V.nbytes // 8):
                self._last_bars = self._missed(projection, self._wanted(projection))  # Ritz values only move outwards
            else:
                self._starts.restart(projection, kept)
        turn = vectors[:, kept].T.to(self._V.dtype)
        for start in range(0, self._space.length, _CHUNK):
            part = self._V[: self._done, start : start + _CHUNK]
            self._V[:count, start : start + _CHUNK] = turn @ part
        fresh = self._joined - self._done
        self._V[count : count + fresh] = self._V[self._done : self._joined].clone()
        self._coupling = projection.coupling[:, kept]
        self._H.zero_()
        self._H[:count, :count] = values[kept].diag()
        self._coupled, self._done, self._joined = 0, count, count + fresh

    def result(self, tolerance: float, vectors: bool) -> Eigenvalues:
        """The wanted values, with residuals that are never below rounding."""
        projection = self._project()
        wanted = self._wanted(projection)
        values, turn = projection.values[wanted], projection.vectors[:, wanted]
        basis, norm = self._V[: self._done], self._norm(values)
        matvecs, rounding = self._products.matvecs, _ROUNDING * self._products.epsilon * norm
        residuals = self._residuals(projection, wanted).clamp_min(rounding).tolist()
        stderr = torch.tensor(residuals, dtype=torch.float64).maximum(self._missed(projection, wanted).cpu())
        unit = self._products.unit
        found: Tensor | None = None
        if vectors:
            operator = self._products.operator
            found = (turn.T.to(basis.dtype) @ basis).T.to(operator.device, operator.dtype)
        loss = self._space.inner(basis.T, basis.T) - torch.eye(self._done, dtype=torch.float64, device=basis.device)
        return Eigenvalues(
            checks.finite("eigenvalues", values.cpu() * unit),
            checks.finite("eigenvalues", stderr * unit),
            matvecs,
            "lanczos",
            converged=tuple((stderr <= tolerance * norm).tolist()),
            vectors=found,
            orthogonality=float(loss.abs().max()),
            residuals=tuple(residual * unit for residual in residuals),
        )


def _outward(values: Tensor, which: str) -> Tensor:
    """Numbers that are larger the more a value is wanted."""
    return {"LM": values.abs(), "LA": values, "SA": -values}[which]


def _best(values: Tensor, which: str) -> Tensor:
    """Indices, the most wanted first."""
    return (-_outward(values, which)).argsort(stable=True)
