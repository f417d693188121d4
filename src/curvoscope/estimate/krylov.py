"""Extreme eigenvalues by Lanczos: blocks, full re-orthogonalisation done twice, thick restarts, residual bounds."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError, ShapeError
from curvoscope.estimate.products import COLUMNS, MOST, Matrix, Probes, Products, check_budget, check_symmetric
from curvoscope.estimate.result import Estimate
from curvoscope.estimate.space import Space

DEFAULT_TOLERANCE = 1e-6
WHICH = ("LM", "LA", "SA")
_STRAY = 0.1  # the random part of a warm start
_CHUNK = 2**16  # columns of the basis rotated at once in a restart
_ROUNDING = 16  # units of rounding below which a vector is no new direction


@dataclass(frozen=True, eq=False)
class Eigenvalues:
    """Eigenvalues in ascending order, each with its residual |B x - θ x| as error bar.

    A symmetric B has an eigenvalue within the residual of θ. That it is the first, second, ... of its kind is not
    certain, only likelier the longer the run: an eigenvector nearly orthogonal to all starting vectors may be missed.
    """

    values: tuple[Estimate, ...]
    converged: tuple[bool, ...]  # residual within the tolerance, or within 1e-6 of the norm where none was given
    vectors: Tensor | None  # (n, k), columns in the order of the values
    matvecs: int
    method: str
    orthogonality: float  # the largest entry of |V V^T - I| of the basis: what is lost to rounding

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Estimate]:
        return iter(self.values)

    def __getitem__(self, index: int) -> Estimate:
        return self.values[index]

    def tensor(self) -> Tensor:
        """The values alone, (k,) in float64."""
        return torch.tensor([float(value) for value in self.values], dtype=torch.float64)


def lanczos(
    operator: Matrix,
    k: int = 1,
    which: str = "LM",
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int = 0,
    start: Tensor | None = None,
    block: int | None = None,
    vectors: bool = False,
    memory_limit: int | None = None,
) -> Eigenvalues:
    """The k eigenvalues of largest magnitude (LM), largest (LA) or smallest (SA) of a symmetric operator.

    The basis V grows by the part of B V_last outside V, orthogonalised twice against all of V; the projection V B V^T
    is kept and diagonalised in float64. When V fills its memory, the best Ritz vectors and the last block make a new V.
    A block of b starting vectors finds eigenvalues of multiplicity up to b. When V becomes an invariant subspace, new
    random vectors join, until they change nothing.

    Args:
        operator: (n, n), symmetric.
        k: how many.
        which: "LM", "LA" or "SA".
        matvecs: the budget of products.
        tolerance: the residual, relative to the largest eigenvalue found, at which to stop; 1e-6 when neither this nor
            a budget is given.
        seed: of the starting vectors.
        start: (n,) or (n, p) approximate eigenvectors, of an earlier point in training for example. A random tenth is
            added, so that an eigenvalue that has overtaken theirs is found too.
        block: vectors a product; the number of starting vectors, or min(k, 8).
        vectors: whether to return eigenvectors.
        memory_limit: bytes for the basis.
    """
    check_symmetric(operator, "an eigenvalue")
    size = operator.shape[0]
    if not 1 <= k <= size:
        raise RangeError("k", f"got {k}, expected 1 to {size}")
    if block is not None and block < 1:
        raise RangeError("block", f"got {block}, expected at least 1")
    checks.choice("which", which, WHICH)
    with Products(operator, "eigenvalues", matvecs) as products:
        probes = Probes(products, seed)
        first = _first_block(products, probes, start, min(block or min(k, COLUMNS), size))
        check_budget(matvecs, tolerance, least=max(2, -(-k // len(first)) * len(first)))
        rounding = _ROUNDING * products.epsilon
        run = _Run(products, probes, k, which, first, matvecs, memory_limit)
        run.go(matvecs or MOST, max(rounding, tolerance or (0.0 if matvecs else DEFAULT_TOLERANCE)))
        return run.result(max(rounding, tolerance or DEFAULT_TOLERANCE), vectors)


def _first_block(products: Products, probes: Probes, start: Tensor | None, block: int) -> Tensor:
    """The starting vectors as rows (b, n): those given, each with a random part, and random ones up to the block."""
    rows, space, length = probes.normal(block).T, products.space, products.space.length
    if start is not None:
        checks.floating("start", start)
        if start.ndim not in (1, 2) or start.shape[0] != length or start.numel() > length * products.size:
            raise ShapeError("start", f"got {tuple(start.shape)}, expected ({length},) or ({length}, p)")
        known = start.reshape(length, -1).T.to(products.device, torch.float64)
        stray = probes.normal(len(known)).T
        known = _normalised(space, known) + _STRAY * _normalised(space, stray)
        rows = torch.cat([known, rows[len(known) :]])
    return _normalised(space, rows)


def _normalised(space: Space, rows: Tensor) -> Tensor:
    return rows / space.norm(rows, 1)[:, None].clamp_min(1e-300)


class _Run:
    """The basis V (rows), how many of its rows have been multiplied, and the projection H = V B V^T of those."""

    def __init__(
        self,
        products: Products,
        probes: Probes,
        k: int,
        which: str,
        first: Tensor,
        matvecs: int | None,
        memory_limit: int | None,
    ) -> None:
        self._products, self._probes, self._k, self._which = products, probes, k, which
        self._size, self._block, self._space = products.size, len(first), products.space
        wanted = min(self._size, matvecs or max(256, 8 * (k + self._block)))
        self._limit, dtype = self._room(wanted, memory_limit)
        rows = self._limit + 2 * self._block
        self._V = torch.empty(rows, self._space.length, dtype=dtype, device=products.device)
        self._H = torch.zeros(rows, rows, dtype=torch.float64, device=products.device)
        self._done = self._joined = 0  # rows that have been multiplied, and rows
        self._scale = 0.0  # the largest |B v| so far
        self._settled: Tensor | None = None
        self._join(first.to(dtype), 1e-8)
        # B V_last = (H V)_last + coupling^T V_new: the rows of V not yet multiplied, against the last that were
        self._coupling = self._H[:0, :0]

    def _room(self, wanted: int, memory_limit: int | None) -> tuple[int, torch.dtype]:
        """Rows that V may have, and in which precision: float64, unless the operator has less and memory is short."""
        length, budget = self._space.longest, self._products.budget(memory_limit)
        beside = 4 * self._block  # new rows, their products and projections
        least = min(self._size, self._k + 2 * self._block + 2)
        short = 8 * length * (4 * least + beside) > budget
        dtype = torch.float32 if short and self._products.operator.dtype != torch.float64 else torch.float64
        one = dtype.itemsize * length
        rows = max(least, min(budget // one - beside, wanted))
        checks.fits(
            one * (rows + beside),
            budget,
            f"a basis of {rows} vectors of length {length}",
            "ask for fewer eigenvalues, or give a smaller block",
        )
        return rows, dtype

    def go(self, matvecs: int, tolerance: float) -> None:
        """Multiply and extend, until the residuals are within the tolerance or the budget is spent."""
        look = self._k
        while self._done < self._size:
            if self._joined == self._done and not self._inject():
                return
            if self._products.matvecs + self._joined - self._done > matvecs:
                return
            self._step()
            if self._done >= look and self._joined > self._done:
                values, _, residuals = self._ritz()
                if float(residuals.max()) <= tolerance * self._norm(values):
                    return
                look = self._done + max(1, self._done // 10)
            if self._joined > self._limit:
                self._restart()
                look = self._k

    def _step(self) -> None:
        """Multiply the new rows; their projections go to H, what is outside V becomes the next rows."""
        basis, fresh = self._V[: self._joined], self._V[self._done : self._joined]
        products = self._products if self._V.dtype == torch.float64 else self._products.at_once  # memory is short
        outside = products(fresh.T).T.to(self._V.device, self._V.dtype).contiguous()
        self._scale = max(self._scale, float(self._space.norm(outside, 1).max()))
        inside = torch.zeros(self._joined, len(fresh), dtype=torch.float64, device=self._V.device)
        for _ in range(2):
            part = self._space.total(basis @ outside.T)
            outside -= part.T @ basis
            inside += part
        inside[self._done :] = (inside[self._done :] + inside[self._done :].T) / 2
        self._H[: self._joined, self._done : self._joined] = inside
        self._H[self._done : self._joined, : self._joined] = inside.T
        self._done = self._joined
        self._coupling = self._join(outside, _ROUNDING * self._products.epsilon * self._scale)

    def _join(self, rows: Tensor, least: float) -> Tensor:
        """Append rows (b, n), made orthonormal among themselves, unless shorter than `least`; the factor (b', b)."""
        first = self._joined
        factor = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
        for i, row in enumerate(rows):
            others, count = self._V[first : self._joined], self._joined - first
            for _ in range(2):
                part = self._space.total(others @ row)
                row = row - part @ others
                factor[:count, i] += part
            length = float(self._space.norm(row, 0))
            if length > least and self._joined < self._size:
                self._V[self._joined] = row / length
                factor[count, i] = length
                self._joined += 1
        return factor[: self._joined - first]

    def _inject(self) -> bool:
        """V is invariant under B: random rows join it. False once the wanted values did not change since last time."""
        if self._done >= self._k:
            values, _, _ = self._ritz()
            limit = 4 * _ROUNDING * self._products.epsilon * self._scale
            if self._settled is not None and float((values - self._settled).abs().max()) <= limit:
                return False
            self._settled = values
        rows = self._probes.normal(self._block).T.to(self._V.dtype)
        for _ in range(2):
            rows -= self._space.total(rows @ self._V[: self._done].T) @ self._V[: self._done]
        self._join(rows, 1e-8)
        self._coupling = self._coupling.new_zeros(self._joined - self._done, self._coupling.shape[1])
        return self._joined > self._done

    def _ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """The wanted values (k,) in ascending order, their vectors (done, k) in the basis V, their residuals (k,)."""
        values, vectors = torch.linalg.eigh(self._H[: self._done, : self._done])
        wanted = _best(values, self._which)[: self._k].sort().values
        values, vectors = values[wanted], vectors[:, wanted]
        last = self._coupling.shape[1]
        return values, vectors, (self._coupling @ vectors[self._done - last :]).norm(dim=0)

    def _norm(self, values: Tensor) -> float:
        """An estimate of |B|: no Ritz value nor product of a unit vector is larger."""
        return max(self._scale, float(values.abs().max()))

    def _restart(self) -> None:
        """Keep the best Ritz vectors and the rows not yet multiplied."""
        values, vectors = torch.linalg.eigh(self._H[: self._done, : self._done])
        count = min(self._done - 1, max(self._k + self._block, (self._limit - self._block) // 2))
        kept = _best(values, self._which)[:count]
        turn = vectors[:, kept].T.to(self._V.dtype)
        for start in range(0, self._space.length, _CHUNK):
            part = self._V[: self._done, start : start + _CHUNK]
            self._V[:count, start : start + _CHUNK] = turn @ part
        fresh = self._joined - self._done
        self._V[count : count + fresh] = self._V[self._done : self._joined].clone()
        last = self._coupling.shape[1]
        self._coupling = self._coupling @ vectors[self._done - last :, kept]
        self._H.zero_()
        self._H[:count, :count] = values[kept].diag()
        self._done, self._joined = count, count + fresh

    def result(self, tolerance: float, vectors: bool) -> Eigenvalues:
        """The wanted values, with residuals that are never below rounding."""
        values, turn, residuals = self._ritz()
        basis, norm = self._V[: self._done], self._norm(values)
        matvecs, rounding = self._products.matvecs, _ROUNDING * self._products.epsilon * norm
        estimates = [
            Estimate(float(value), max(float(residual), rounding), matvecs, "lanczos")
            for value, residual in zip(values, residuals, strict=True)
        ]
        unit = self._products.unit
        found: Tensor | None = None
        if vectors:
            operator = self._products.operator
            found = (turn.T.to(basis.dtype) @ basis).T.to(operator.device, operator.dtype)
        loss = self._space.total(basis @ basis.T) - torch.eye(self._done, dtype=basis.dtype, device=basis.device)
        return Eigenvalues(
            tuple(estimate.scaled(unit).checked("eigenvalues") for estimate in estimates),
            tuple(bool(estimate.stderr <= tolerance * norm) for estimate in estimates),
            found,
            matvecs,
            "lanczos",
            float(loss.abs().max()),
        )


def _best(values: Tensor, which: str) -> Tensor:
    """Indices, the most wanted first."""
    return {"LM": -values.abs(), "LA": -values, "SA": values}[which].argsort(stable=True)
