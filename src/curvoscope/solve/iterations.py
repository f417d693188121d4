"""Krylov iterations with true residuals: rounds of CG or MINRES, each started from what the last one left over."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.estimate.products import Products
from curvoscope.solve.conjugate_gradients import ConjugateGradients
from curvoscope.solve.lanczos import LanczosProcess, Lengths, Recurrence, Rows
from curvoscope.solve.minres import MinimumResidual
from curvoscope.solve.preconditioning import Preconditioner, applied

RECURRENCES: dict[str, Callable[[Tensor, Tensor, Lengths], Recurrence]] = {
    "cg": ConjugateGradients,
    "minres": MinimumResidual,
}
_COPIES = 14  # vectors of a right-hand side in memory at once
_TOGETHER = 32  # right-hand sides that advance together
_RACE = 8  # steps after which preconditioners are compared
_BETTER = 10  # times smaller must a residual be than without one: plain steps become faster on the way
_TINY = 1e-300


@dataclass
class PreconditionerChoice:
    """The preconditioner of an operator: which there are, and which one is used from now on, once it is known.

    Without `race` the first is used. With it, none as long as eight steps are enough; then the one with the smallest
    residual after eight steps, if that is ten times smaller than without.
    """

    makers: Mapping[str, Callable[[], Preconditioner]] = field(default_factory=dict)
    race: bool = False
    made: dict[str, Preconditioner | None] = field(default_factory=dict)
    name: str | None = None

    def __post_init__(self) -> None:
        if not self.race or not self.makers:
            self.name = next(iter(self.makers), "none")

    def get(self, name: str) -> Preconditioner | None:
        """The one of a name, made when it is first asked for."""
        if name not in self.made:
            self.made[name] = self.makers[name]() if name in self.makers else None
        return self.made[name]


class KrylovIterations:
    """(B + damping) x = b for the columns of b (n, c), by the recurrence of a name.

    Args:
        products: with B.
        damping: the shift.
        recurrence: "cg" or "minres".
        choice: of the preconditioner; a race is decided by the first columns.
        tolerance: of the relative residual.
        limit: steps for each column.
    """

    def __init__(
        self,
        products: Products,
        damping: float,
        recurrence: str,
        choice: PreconditionerChoice,
        tolerance: float,
        limit: int,
    ) -> None:
        self._products, self._damping, self._recurrence, self._choice = products, damping, recurrence, choice
        self._tolerance, self._limit = tolerance, limit
        self._dtype = products.dtype
        self.steps, self.scale, self.interrupted = 0, 0.0, False

    def solve(self, b: Tensor, start: Tensor | None) -> Tensor:
        """x, a few columns at a time; what is known by then if Ctrl-C is pressed."""
        count, length = b.shape[1], self._products.space.longest
        budget, length = self._products.budget(), max(1, length)
        # recurrences in float64 lose no more than the products of a float32 operator do
        fits = 2 * _COPIES * torch.float64.itemsize * length <= budget
        self._dtype = torch.float64 if fits else self._products.dtype
        one = _COPIES * self._dtype.itemsize * length
        checks.fits(one, budget, f"{_COPIES} vectors of length {length}", "give a larger memory_limit")
        together = max(1, min(_TOGETHER, budget // (2 * one)))
        checks.predict(min(count, together) * one)
        x = torch.zeros_like(b) if start is None else start.clone()
        try:
            for first in range(0, count, together):
                part = slice(first, first + together)
                self._rounds(b[:, part], x[:, part], start is not None)
        except KeyboardInterrupt:
            self.interrupted = True
        return x

    def residual(self, b: Tensor, x: Tensor) -> Tensor:
        """b - (B + damping) x, from a product."""
        products = self._products
        x = x.to(products.device, products.dtype)
        product = products(x)
        return b.to(x) - (product * products.unit + self._damping * x)

    def candidate(self, residual: Tensor) -> Tensor:
        """M^-1 r (n, 1) of unit length: an eigenvector with eigenvalue -damping if MINRES cannot reduce r (n, 1)."""
        preconditioner = self._choice.get(self._choice.name or "none")
        found = residual if preconditioner is None else self._inverse(preconditioner)(residual.T).T
        return found / self._lengths(found).to(found)

    def _inverse(self, preconditioner: Preconditioner) -> Rows:
        """(M / unit)^-1 of rows."""
        products = self._products
        like = torch.empty(0, dtype=products.operator.dtype, device=products.operator.device)
        return partial(applied, preconditioner, damping=self._damping, unit=products.unit, like=like)

    def _rounds(self, b: Tensor, x: Tensor, warm: bool) -> None:
        """Write the solutions to x: rounds until the true residuals are small, or a round does not halve them."""
        sizes = self._lengths(b).clamp_min(_TINY)
        target, left, before = self._tolerance * sizes, self._limit, math.inf
        residual = self.residual(b, x) if warm else b
        relative = float((self._lengths(residual) / sizes).max())
        while left > 0 and self._tolerance < relative <= before / 2:
            name, kept = self._choice.name, x.clone()
            if name is None:
                left, before = left - self._race(residual, x, target, left), math.inf
            else:
                steps, missing = self._krylov(residual, x, target, left, self._choice.get(name))
                ended = steps < left and missing > 1  # the Krylov space holds nothing better
                left, before = left - steps, 0.0 if ended else relative
            residual = self.residual(b, x)
            left -= 1
            relative = float((self._lengths(residual) / sizes).max())
            if relative > before > 0:
                x.copy_(kept)  # rounding made it worse

    def _race(self, residual: Tensor, x: Tensor, target: Tensor, limit: int) -> int:
        """Compare the preconditioners for a few steps each, and choose one; return the steps of all.

        x is changed only if the first, plain steps are enough: the run that follows starts afresh, as a restart would
        lose more than it saves.
        """
        choice, steps, best, chosen = self._choice, 0, math.inf, "none"
        for name in ("none", *choice.makers):
            tried = x.clone()
            more, missing = self._krylov(residual, tried, target, min(_RACE, limit - steps), choice.get(name))
            steps += more
            if missing <= 1 and name == "none":
                x.copy_(tried)
                return steps  # nothing is known about longer runs
            if missing < best:
                best, chosen = missing if name != "none" else missing / _BETTER, name
        choice.name = chosen
        return steps

    def _krylov(
        self, residual: Tensor, x: Tensor, target: Tensor, limit: int, preconditioner: Preconditioner | None
    ) -> tuple[int, float]:
        """One Krylov space: its steps, and the largest residual it believes to be left, relative to the target."""
        products = self._products
        sizes = self._lengths(residual)
        scales = torch.where(sizes > 0, sizes, 1.0)
        rows = (residual.to(products.device).double() / scales).to(self._dtype).T.contiguous()
        inverse = None
        if preconditioner is not None:
            if not products.matvecs:
                products(rows[:1].T)  # for the unit
            inverse = self._inverse(preconditioner)
        process = LanczosProcess(products, self._damping, rows, inverse)
        recurrence = RECURRENCES[self._recurrence](rows, process.beta, lambda found: self._lengths(found.T))
        goal = target / scales / 2  # the half is for what rounding adds
        known, steps = sizes / scales, 0
        try:
            while steps < limit and bool(((known > goal) & (process.beta > 0)).any()):
                known = recurrence.advance(*process.step()) * process.lengths
                steps += 1
        finally:  # also on Ctrl-C
            found = recurrence.x.double() * (scales / products.unit)[:, None]
            x += found.T.to(x)
            self.steps += steps
            self.scale = max(self.scale, process.scale * products.unit)
        return steps, float((known / goal.clamp_min(_TINY)).max())

    def _lengths(self, columns: Tensor) -> Tensor:
        return self._products.space.norm(columns, 0).double()
