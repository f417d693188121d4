"""One Krylov space: conjugate gradients or MINRES for some right-hand sides, a few steps at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from curvoscope.estimate.products import Products
from curvoscope.solve.conjugate_gradients import ConjugateGradients
from curvoscope.solve.lanczos import LanczosProcess, Lengths, Recurrence, Rows
from curvoscope.solve.minres import MinimumResidual

RECURRENCES: dict[str, Callable[[Tensor, Tensor, Lengths], Recurrence]] = {
    "cg": ConjugateGradients,
    "minres": MinimumResidual,
}
_AIM = 0.9  # of the target: the rest is for what rounding adds; another round makes up for more
_TINY = 1e-150  # whose square is a number


class KrylovRun:
    """Steps towards (B + damping) x = r for the columns of r (n, c).

    Args:
        products: with B.
        damping: the shift.
        recurrence: "cg" or "minres".
        residual: r.
        target: the residual norms (c,) to reach.
        inverse: of the preconditioner, for rows; None: without.
        dtype: of the recurrence.
    """

    def __init__(
        self,
        products: Products,
        damping: float,
        recurrence: str,
        residual: Tensor,
        target: Tensor,
        inverse: Rows | None,
        dtype: torch.dtype,
    ) -> None:
        self._products = products
        sizes = products.space.norm(residual, 0).double()
        self._scales = torch.where(sizes > 0, sizes, 1.0)
        rows = (residual.to(products.device).double() / self._scales).to(dtype).T.contiguous()
        if inverse is not None and not products.matvecs:
            products(rows[:1].T)  # for the unit
        self._process = LanczosProcess(products, damping, rows, inverse)
        self._recurrence = RECURRENCES[recurrence](rows, self._process.beta, self._row_lengths)
        self._goal = _AIM * target / self._scales
        self._known, self.steps = sizes / self._scales, 0
        self._smooth = self._known  # the least residual in the space
        self._is_least = recurrence == "minres"

    def _row_lengths(self, rows: Tensor) -> Tensor:
        return self._products.space.norm(rows.T, 0).double()

    @property
    def missing(self) -> float:
        """The largest residual that the recurrence believes to be left, relative to the target."""
        return float((self._known / self._goal.clamp_min(_TINY)).max())

    @property
    def least_missing(self) -> float:
        """The same for the least residual in the space, which falls with every step: that of conjugate gradients can
        rise first. The squares of its inverses add up to the one of the least: 1 / |r|² = sum_k 1 / |r_k|²."""
        return float((self._smooth / self._goal.clamp_min(_TINY)).max())

    @property
    def scale(self) -> float:
        """|B + damping|, as far as seen."""
        return self._process.scale * self._products.unit

    def advance(self, limit: int) -> None:
        """Take at most so many more steps; fewer if the target is reached or the space holds nothing better."""
        process, last = self._process, self.steps + limit
        while self.steps < last and bool(((self._known > self._goal) & (process.beta > 0)).any()):
            self._known = self._recurrence.advance(*process.step()) * process.lengths
            self.steps += 1
            both = (self._smooth.clamp_min(_TINY) ** -2 + self._known.clamp_min(_TINY) ** -2) ** -0.5
            self._smooth = self._known if self._is_least else both

    def found(self) -> Tensor:
        """x so far, rows (c, n) in float64."""
        return self._recurrence.x.double() * (self._scales / self._products.unit)[:, None]
