"""One Krylov space: conjugate gradients or MINRES for some right-hand sides, a few steps at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from curvoscope.estimate.products import Products
from curvoscope.solve.conjugate_gradients import ConjugateGradients
from curvoscope.solve.lanczos import LanczosProcess, Recurrence, RowMap
from curvoscope.solve.minres import MinimumResidual

RECURRENCES: dict[str, Callable[[Tensor, LanczosProcess], Recurrence]] = {
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
        inverse: RowMap | None,
        dtype: torch.dtype,
    ) -> None:
        self._products = products
        sizes = products.space.norm(residual, 0).double()
        self._scales = torch.where(sizes > 0, sizes, 1.0)
        rows = (residual.to(products.device).double() / self._scales).to(dtype).T.contiguous()
        self._process = LanczosProcess(products, damping, rows, inverse)
        self._recurrence = RECURRENCES[recurrence](rows, self._process)
        self._goal = _AIM * target / self._scales
        self._known, self.steps = sizes / self._scales, 0

    @property
    def missing(self) -> float:
        """The largest residual that the recurrence believes to be left, relative to the target."""
        return float((self._known / self._goal.clamp_min(_TINY)).max())

    @property
    def scale(self) -> float:
        """|B + damping|, as far as seen."""
        return self._process.scale * self._products.unit

    def advance(self, limit: int) -> None:
        """Take at most so many more steps; fewer if the target is reached or the space holds nothing better."""
        recurrence, last = self._recurrence, self.steps + limit
        while self.steps < last and bool(((self._known > self._goal) & recurrence.alive).any()):
            self._known = recurrence.advance(*self._process.step())
            self.steps += 1

    def residual(self) -> Tensor | None:
        """What is left of r, columns (n, c), from the products with the vectors that x is made of.

        None if a product with x itself could differ by more than a solve leaves room for. An operator says by
        `exact_products` that each product errs by no more than rounding, about ε |B + damping| |x| and at random, with
        ε at least that of single precision: many models in double precision compute norms and softmax in single.
        """
        rows, process = self._recurrence.residual, self._process
        if rows is None or not getattr(self._products.operator, "exact_products", False):
            return None
        sizes = process.scale * process.row_lengths(self._recurrence.x) + 1
        epsilon = max(self._products.epsilon, torch.finfo(torch.float32).eps)
        sure = self.steps**0.5 * epsilon * sizes <= (1 / _AIM - 1) * self._goal
        if not bool((sure & (process.beta > 0) | (self._goal == 0)).all()):
            return None
        return (rows.double() * self._scales[:, None]).T.to(self._products.dtype)

    def found(self) -> Tensor:
        """x so far, rows (c, n) in float64."""
        return self._recurrence.x.double() * (self._scales / self._products.unit)[:, None]
