"""Krylov iterations with true residuals: rounds of CG or MINRES, each started from what the last one left over."""

import math
from functools import partial

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import CurvoscopeError
from curvoscope.estimate.products import Products
from curvoscope.solve.choice import RACE, PreconditionerChoice
from curvoscope.solve.krylov_run import KrylovRun
from curvoscope.solve.lanczos import RowMap
from curvoscope.solve.preconditioning import Preconditioner, applied

_COPIES = 16  # vectors of a right-hand side in memory at once
_TOGETHER = 32  # right-hand sides that advance together
_TINY = 1e-300


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
        self.ended = False  # whether the last round stopped because no step makes the residual smaller
        self._left: list[Tensor] = []  # residuals of the columns that are done

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
                self._left.append(self._rounds(b[:, part], x[:, part], start is not None))
        except KeyboardInterrupt:
            self.interrupted = True
        return x

    def left_over(self, b: Tensor, x: Tensor) -> Tensor:
        """b - (B + damping) x of the final x: as the iterations left it, or from a product if Ctrl-C ended them."""
        known = self._left and not self.interrupted
        return torch.cat(self._left, 1) if known else self.residual(b, x)

    def residual(self, b: Tensor, x: Tensor) -> Tensor:
        """b - (B + damping) x, from a product."""
        products = self._products
        x = x.to(products.device, products.dtype)
        product = products(x)
        return b.to(x) - (product * products.unit + self._damping * x)

    def norm(self) -> float:
        """|B + damping|, as far as seen. The few vectors of a well preconditioned run have little of the large
        eigenvalues: then a random vector tells, by one product."""
        if self.interrupted or self._choice.used == "none" or not 0 < self.steps < RACE:
            return self.scale
        products = self._products
        vector = torch.randn(products.space.length, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        vector = vector.to(products.device, products.dtype)
        try:
            image = self.residual(torch.zeros_like(vector), vector)
        except KeyboardInterrupt:
            self.interrupted = True
            return self.scale
        return max(self.scale, float(self._lengths(image) / self._lengths(vector)))

    def candidate(self, residual: Tensor) -> Tensor:
        """M^-1 r (n, 1) of unit length: an eigenvector with eigenvalue -damping if MINRES cannot reduce r (n, 1)."""
        preconditioner = self._choice.get(self._choice.used)
        found = residual if preconditioner is None else self._inverse(preconditioner)(residual.T).T
        return found / self._lengths(found).to(found)

    def _inverse(self, preconditioner: Preconditioner) -> RowMap:
        """(M / unit)^-1 of rows."""
        products = self._products
        like = torch.empty(0, dtype=products.operator.dtype, device=products.operator.device)
        return partial(applied, preconditioner, damping=self._damping, unit=products.unit, like=like)

    def _rounds(self, b: Tensor, x: Tensor, warm: bool) -> Tensor:
        """Write the solutions to x, in rounds until the true residuals are small, or a round does not halve them.

        Returns the true residuals.
        """
        sizes = self._lengths(b).clamp_min(_TINY)
        target, left, before = self._tolerance * sizes, self._limit, math.inf
        residual = self.residual(b, x) if warm else b
        relative = float((self._lengths(residual) / sizes).max())
        while left > 0 and self._tolerance < relative <= before / 2:
            kept, known = x.clone(), residual
            steps, ended, rest = self._round(residual, x, target, left)
            left, before = left - steps - 1, 0.0 if ended else relative
            residual = self.residual(b, x) if warm or rest is None else rest
            warm = True
            relative = float((self._lengths(residual) / sizes).max())
            if relative > before > 0:
                x.copy_(kept)  # rounding made it worse
                residual = known
        return residual

    def _round(self, residual: Tensor, x: Tensor, target: Tensor, limit: int) -> tuple[int, bool, Tensor | None]:
        """Add the solution for a residual to x, the best so far also on Ctrl-C.

        Returns the steps, whether none is better, and what is left of the residual, if it is known to rounding.
        """
        runs: list[KrylovRun] = []
        try:
            run = self._first_steps(residual, target, limit, runs)
            run.advance(limit - sum(one.steps for one in runs))
        finally:
            steps = sum(one.steps for one in runs)
            self.steps += steps
            self.scale = max([self.scale, *(one.scale for one in runs)])
            if runs:
                best = min(runs, key=lambda one: one.missing)
                x += best.found().T.to(x)
        self.ended = steps < limit and run.missing > 1
        return steps, self.ended, best.residual()

    def _first_steps(self, residual: Tensor, target: Tensor, limit: int, runs: list[KrylovRun]) -> KrylovRun:
        """The run to continue: that of the chosen preconditioner, or the one that the first steps of all speak for."""
        choice, by_name = self._choice, dict[str, KrylovRun]()

        def start(preconditioner: Preconditioner | None) -> KrylovRun:
            inverse = None if preconditioner is None else self._inverse(preconditioner)
            runs.append(
                KrylovRun(self._products, self._damping, self._recurrence, residual, target, inverse, self._dtype)
            )
            return runs[-1]

        if choice.name is not None:
            return start(choice.get(choice.name))
        for name in choice.entrants():
            try:
                by_name[name] = run = start(choice.get(name))
            except CurvoscopeError as error:
                choice.refused(name, error)
                continue
            before = run.missing
            run.advance(min(RACE, limit - sum(one.steps for one in runs)))
            if run.missing <= 1:
                choice.finished(name)
                return run
            choice.observe(name, run.steps, before, run.missing)
        chosen, plain = by_name[choice.decide()], by_name["none"]
        plain.advance(max(0, min(choice.patience - plain.steps, limit - sum(one.steps for one in runs))))
        if plain is not chosen and plain.missing <= 1:
            choice.plain_was_enough(plain.steps)
            return plain
        return chosen

    def _lengths(self, columns: Tensor) -> Tensor:
        return self._products.space.norm(columns, 0).double()
