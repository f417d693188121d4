"""Norms, traces and diagonals of several matrices from the same products.

The matrices B_1 ... B_p (n, n) stand one below the other in a stack (p n, n): one product multiplies with all of them,
and those with their sums cost nothing more. For random signs z and symmetric B

    tr B = E z^T B z,    |B|_F² = E |B z|²,    diag B = E z * B z,

and if B is the top of a taller matrix, a column of blocks, E |(B z)_c|² = |B(c, b)|_F² for the rows c. Error bars are
those of `sampling`; in the variance of |B z|², sum_i (B²)_ii² is the mean over pairs of the inner products of (B z)²
and (B z')². When few eigenvectors hold a norm, the products so far make a sketch Q (see `deflation`). With Z = B Q and
P = I - Q Q^T,

    tr B = tr Q^T Z + tr P B P,    |B|_F² = 2 |Z|_F² - |Q^T Z|_F² + |P B P|_F²,

and only P B P is sampled.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from curvoscope.errors import ShapeError
from curvoscope.estimate.deflation import basis_beyond, projected
from curvoscope.estimate.diagonals import DiagonalSamples, diagonal_of
from curvoscope.estimate.products import LEAST, MOST, Matrix, Probes, Products, budget_of
from curvoscope.estimate.result import DiagonalEstimate, Estimate
from curvoscope.estimate.sampling import Sample, Tally, norm_form, trace_form

_COPIES = 3  # of probes and products of a sketch, in memory at once
_ROUNDING = 8  # units of rounding in a sum of products
_SHARE = 3  # a third of a budget makes a sketch, a third multiplies its span, a third samples the rest
_ROUNDED = 1e-10  # of the largest squared direction of a sketch, below which one is rounding


@dataclass(frozen=True)
class JointEstimate:
    """What `measure` finds of one matrix.

    Args:
        trace: tr B.
        frobenius_norm: |B|_F.
        diagonal: the diagonal (n,), if it was asked for.
        rows: the norms of other rows of the same columns, by name.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> found = estimate.measure(torch.eye(4).double(), {"identity": (0,)})
        >>> print(found["identity"].trace, found["identity"].frobenius_norm)
        4.0 2.0
    """

    trace: Estimate
    frobenius_norm: Estimate
    diagonal: DiagonalEstimate | None = None
    rows: dict[str, Estimate] = field(default_factory=dict)


def measure(
    stack: Matrix,
    parts: Mapping[str, tuple[int, ...]],
    *,
    stripe: Matrix | None = None,
    rows: Mapping[str, slice] | None = None,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    diagonal: bool = False,
) -> dict[str, JointEstimate]:
    """Trace, Frobenius norm and diagonal of several symmetric matrices, all from the same products.

    Args:
        stack: (p n, n), the matrices one below the other.
        parts: what to measure, by name: the sum of which matrices of the stack.
        stripe: (p R, n), taller matrices one below the other; the first n rows of each are those of the stack. The
            first 16 probes, or a third of the budget, are multiplied with it instead.
        rows: which of the R rows to take the norm of, by name.
        matvecs: the budget of products; 64 when neither this nor a tolerance is given.
        tolerance: the relative standard error of every part's norm at which to stop; norms of `rows` have no say.
        seed: of the probes; by default that of `cv.settings`.
        diagonal: whether diagonals are wanted: they take three vectors of memory for each part.

    Returns:
        By name of the part. `matvecs` of every number are the products that were made for all of them together.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> one, two = torch.eye(50).double(), torch.diag(torch.arange(50.0)).double()
        >>> found = estimate.measure(torch.cat([one, two]), {"one": (0,), "sum": (0, 1)}, matvecs=24)
        >>> print(round(found["one"].trace, 9), round(found["sum"].trace, 9), found["sum"].trace.matvecs)
        50.0 1275.0 24
    """
    budget = budget_of(matvecs, tolerance)
    height, size = stack.shape
    if height % size or max(member for members in parts.values() for member in members) >= height // size:
        raise ShapeError("stack", f"got {height} x {size}, expected a square matrix for each member of a part")
    with Products(stack, "norm, trace and diagonal", budget) as products:
        joint = _Joint(products, Probes(products, seed), parts, stripe, dict(rows or {}), diagonal)
        if size <= (LEAST if budget is None else budget):
            return joint.exact()
        return joint.answers() if joint.sample(budget, tolerance) else joint.exact()


class _Part:
    """One matrix: which of the stack make it up, what is known of it in the span of Q, and what the probes tell."""

    def __init__(self, members: tuple[int, ...], dimension: int, rows: Mapping[str, slice]) -> None:
        self.members, self.rows = members, {name: Tally(dimension) for name in rows}
        self.held_trace = self.held_square = self.length = 0.0  # what Q holds, and the lengths of the columns of B Q
        self.restart(dimension)

    def restart(self, dimension: int) -> None:
        """Forget the probes, but for those of the other rows."""
        self.traces, self.norms = Tally(dimension), Tally(dimension)
        self.samples: DiagonalSamples | None = None

    def trace(self) -> Sample:
        """tr B."""
        return self.traces.summary().shifted(self.held_trace)

    def square(self) -> Sample:
        """|B|_F²."""
        return self.norms.summary().shifted(self.held_square)


class _Joint:
    """One set of probes for all parts."""

    def __init__(
        self,
        products: Products,
        probes: Probes,
        parts: Mapping[str, tuple[int, ...]],
        stripe: Matrix | None,
        rows: Mapping[str, slice],
        diagonal: bool,
    ) -> None:
        self._products, self._probes, self._space = products, probes, products.space
        self._stripe, self._rows, self._diagonal = stripe, rows, diagonal
        self._count = products.rows // products.size  # of matrices in the stack
        self._Q, self._Z = products.memory(0), products.memory(0, products.row_space)
        self._parts = {name: _Part(members, products.size, rows) for name, members in parts.items()}

    # ---- probes

    def sample(self, budget: int | None, tolerance: float | None) -> bool:
        """Probes until the budget is spent or the tolerance met; False if the exact answer is cheaper than that."""
        products, size = self._products, self._products.size
        most, first = (MOST, LEAST) if budget is None else (budget, max(2, budget // _SHARE))
        kept = self._probe(first, striped=True)
        while products.matvecs < most:
            left = most - products.matvecs
            worst = max(self._parts.values(), key=lambda part: part.square().relative)
            found, needed = worst.square(), left
            if tolerance is not None:
                if found.meets(2 * tolerance):
                    break
                needed = found.needed(worst.norms.count, 2 * tolerance) - worst.norms.count
            # from fewer than 8 products a sketch cannot be judged
            if kept is not None and (count := kept.shape[1]) >= LEAST // 2 and left - count > 1:
                if self._pays(worst, count, tolerance):
                    if self._Q.shape[1] + 4 * count > size:
                        return False
                    self._deflate(kept)
                    kept = self._probe(min(left - count, count if tolerance is None else 2 * count))
                    continue
                if tolerance is not None and needed > count:
                    self._forget_half()
            if needed > size and tolerance is not None:
                return False
            kept = None
            self._probe(min(left, max(products.columns, min(needed, products.matvecs // 4))))
        return True

    def _pays(self, worst: _Part, count: int, tolerance: float | None) -> bool:
        """Whether a sketch from `count` products holds the norm that is known worst: fewer eigenvectors do than that.
        For a tolerance it must also save products.

        Then half of the probes decide, and are lost either way, to the sketch or by `_forget_half`: if they stayed, a
        norm that comes out too large would be replaced by a better one, and one that is too small would not.
        """
        if tolerance is None:
            return worst.norms.participation() < count
        first = worst.norms.halves()[0]
        needed = first.summary().shifted(worst.held_square).needed(first.count, 2 * tolerance)
        return needed > 3 * count and first.participation() < count

    def _forget_half(self) -> None:
        """Forget the probes that decided."""
        for part in self._parts.values():
            traces, norms = (tally.halves()[1] for tally in (part.traces, part.norms))
            if norms.count > 1:
                part.traces, part.norms = traces, norms

    def _probe(self, count: int, striped: bool = False) -> Tensor | None:
        """Tally so many more probes; return their products if there is memory for a sketch of them."""
        products = self._products
        keeps = products.fits(_COPIES * (1 + self._count) * count)
        memory = products.memory(count if keeps else min(count, products.columns), products.row_space)
        probes = products.memory(min(count, products.columns))
        for start in range(0, count, products.columns):
            several = min(products.columns, count - start)
            z, place = probes[:, :several], start if keeps else 0
            product = memory[:, place : place + several]
            self._probes.signs(several, z)
            inner = self._space.inner(z, z)
            if striped and self._stripe is not None:
                self._tally_rows(products(z, taller=self._stripe), inner, product)
            else:
                products(self._outside(self._outside(z)), out=product)
            self._tally(z, product, inner)
        return memory if keeps else None

    def _tally_rows(self, tall: Tensor, inner: Tensor, out: Tensor) -> None:
        """The norms of other rows from products (p R, c) with the stripe; the rows of the stack go to `out`."""
        for target, member in zip(out.T.chunk(self._count, 1), tall.T.chunk(self._count, 1), strict=True):
            target.copy_(member[:, : target.shape[1]])
        for part, product in self._by_part(tall):
            for name, where in self._rows.items():
                part.rows[name].add(self._space.inner(product[where], product[where]), inner)

    def _tally(self, z: Tensor, product: Tensor, inner: Tensor) -> None:
        """Probes (n, c), the products (p n, c) of the stack with P z, and z^T z."""
        dot = self._space.inner
        for part, found in self._by_part(product):
            found = self._outside(found)
            traces, norms = (form(dot, z, found) for form in (trace_form, norm_form))
            along, squares = z * found, found.square()
            part.traces.add(traces, inner, dot(along, along))
            part.norms.add(norms, inner, dot(squares, squares))
            if self._diagonal:
                if part.samples is None:
                    part.samples = DiagonalSamples(self._products)
                part.samples.add(along)

    def _outside(self, columns: Tensor) -> Tensor:
        """P applied to columns (n, c)."""
        return projected(self._space, self._Q, columns)

    def _by_part(self, product: Tensor) -> Iterator[tuple[_Part, Tensor]]:
        """Each part with its own products (R, c), from those of the stack (p R, c)."""
        members = product.T.chunk(self._count, 1)
        for part in self._parts.values():
            yield part, reduce(torch.add, [members[member] for member in part.members]).T

    def _deflate(self, product: Tensor) -> None:
        """Add to Q as many directions as there are products, those in which all matrices together are largest.

        The probes behind them are used up: Q depends on them.
        """
        space, count = self._space, product.shape[1]
        columns = self._products.memory(count * self._count)
        for target, member in zip(columns.T.chunk(self._count), product.T.chunk(self._count, 1), strict=True):
            size = float(space.norm(member.T, 0).double().square().mean()) ** 0.5
            torch.div(member, size or 1.0, out=target)
        values, vectors = torch.linalg.eigh(space.inner(columns, columns))
        best = (values > _ROUNDED * values[-1]).nonzero().flatten()[-count:]
        turn = (vectors[:, best] / values[best].sqrt()).T.to(columns.dtype)
        fresh = basis_beyond(space, self._Q, (turn @ columns.T).T)
        self._Z = torch.cat([self._Z.T, self._products(fresh).T]).T
        self._Q = torch.cat([self._Q.T, fresh.T]).T
        for part, Z in self._by_part(self._Z):
            part.restart(self._products.size)
            inside = space.inner(self._Q, Z)
            part.held_trace = float(inside.trace())
            part.held_square = 2 * float(space.inner(Z, Z).trace()) - float(inside.square().sum())
            part.length = float(space.norm(Z, 0).sum())
            part.samples = DiagonalSamples(self._products, self._Q, Z) if self._diagonal else None

    # ---- answers

    def answers(self) -> dict[str, JointEstimate]:
        """From the probes so far."""
        return {
            name: JointEstimate(
                self._estimate(part.trace(), part.length).scaled(self._products.unit).checked("trace"),
                self._norm(part.square()),
                None if part.samples is None else part.samples.result(),
                {other: self._norm(tally.summary(), tally.count) for other, tally in part.rows.items()},
            )
            for name, part in self._parts.items()
        }

    def _norm(self, square: Sample, matvecs: int | None = None) -> Estimate:
        found = self._estimate(square, 0.0, matvecs).root()
        return found.scaled(self._products.unit).checked("frobenius_norm")

    def _estimate(self, sample: Sample, length: float, matvecs: int | None = None) -> Estimate:
        """With a standard error that is never below the rounding of the products."""
        method = "hutch++" if self._Q.shape[1] and matvecs is None else "hutchinson"
        stderr = max(sample.stderr, _ROUNDING * self._products.epsilon * max(abs(sample.value), length))
        matvecs = self._products.matvecs if matvecs is None else matvecs
        return Estimate(sample.value, stderr, matvecs, method, sample.degrees, sample.skewness)

    def exact(self) -> dict[str, JointEstimate]:
        """From all columns."""
        products, space = self._products, self._space
        sums = {name: dict.fromkeys((None, *self._rows), 0.0) for name in self._parts}  # squares, also of other rows
        traces, diagonals = dict.fromkeys(self._parts, 0.0), dict[str, Tensor]()
        for unit, columns in products.identity(self._stripe):
            for (name, _), (_, found) in zip(self._parts.items(), self._by_part(columns), strict=True):
                top = found[: len(unit)]
                traces[name] += float(trace_form(space.inner, unit, top).trace())
                sums[name][None] += float(norm_form(space.inner, unit, top).trace())
                for other, where in self._rows.items():
                    sums[name][other] += float(found[where].square().sum())
                if self._diagonal:
                    diagonals[name] = diagonals.get(name, 0) + (unit * top).sum(1)

        def number(value: float) -> Estimate:
            return Estimate(value, 0.0, products.matvecs).scaled(products.unit).checked("measure")

        def diagonal(values: Tensor) -> DiagonalEstimate:
            return diagonal_of(products, values, torch.zeros_like(values), "exact", math.inf)

        return {
            name: JointEstimate(
                number(traces[name]),
                number(squares.pop(None) ** 0.5),
                diagonal(diagonals[name]) if self._diagonal else None,
                {other: number(square**0.5) for other, square in squares.items() if other is not None},
            )
            for name, squares in sums.items()
        }
