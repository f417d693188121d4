"""How small |λ + damping| can be over the eigenvalues λ of an operator: what turns a residual into an error bound."""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope.errors import SingularError
from curvoscope.estimate.krylov import lanczos
from curvoscope.estimate.products import Matrix
from curvoscope.estimate.result import Estimate
from curvoscope.solve.eigenbasis import Eigenbasis

SURE = 10.0  # error bars of an end of a spectrum that hold it with a probability of 99.99 %
_LEAST = 64  # products
_ROUNDING = 16  # units of rounding


@dataclass(frozen=True)
class Margin:
    """A lower bound on the smallest |λ + damping|, 0 if none is known; where it comes from, and its products."""

    value: float
    source: str
    matvecs: int = 0


def margin_from_eigenvalues(basis: Eigenbasis, damping: float, epsilon: float) -> Margin:
    """The margin of known eigenvalues; `SingularError` with the direction if it is 0 to rounding."""
    values = basis.all_values()
    rounding = _ROUNDING * epsilon * float(values.abs().max())
    smallest = float((values + damping).abs().min())
    if smallest <= rounding:
        value, direction = basis.direction(-damping)
        raise SingularError("damping", _singular(value, damping, abs(value + damping), rounding, direction), direction)
    return Margin(smallest - rounding, "eigenvalues")


def _singular(value: float, damping: float, length: float, rounding: float, direction: Tensor) -> str:
    place = int(direction.abs().argmax())
    entry = f"its largest entry is {float(direction[place]):.2g} at {place}, all are in error.direction"
    found = f"|(B + damping) d| = {length:.1g} for a unit direction d ({entry})"
    cancelled = f"other than {damping:.3g}, which cancels the eigenvalue {value:.3g}"
    cure = cancelled if value < -rounding else f"above {max(damping, rounding):.1g}"
    return f"the matrix is singular to rounding: {found}; give a damping {cure}"


def check_null_direction(direction: Tensor, product: Tensor, damping: float, norm: float) -> None:
    """Raise `SingularError` if (B + damping) maps a unit direction to nearly 0: MINRES leaves no other residual."""
    length = float(product.double().norm())
    epsilon = torch.finfo(product.dtype).eps
    if length <= epsilon**0.5 * norm:
        value = float(direction.double() @ product.double()) - damping
        message = _singular(value, damping, length, _ROUNDING * epsilon * norm, direction)
        raise SingularError("damping", message, direction)


def margin_from_products(operator: Matrix, damping: float, matvecs: int, seed: int | None = None) -> Margin:
    """The margin of an operator known by its products.

    A lower bound on its spectrum that the operator knows is enough if damping lifts it above 0. Otherwise a Lanczos run
    bounds the smallest eigenvalue with its error bar; and if that is negative for certain, a second run bounds the
    smallest eigenvalue of (B + damping)². Either holds with a probability of 99.99 %, or no bound is given.

    Args:
        operator: symmetric.
        damping: the shift.
        matvecs: products for each run, at least 64; 0: no run.
        seed: of the runs; by default that of `cv.settings`.
    """
    floor = getattr(operator, "lower_bound", lambda: -float("inf"))()
    if floor + damping > 0:
        return Margin(floor + damping, "lower bound")
    budget = min(operator.shape[0], max(_LEAST, matvecs))
    if not matvecs or budget < 2:
        return Margin(0.0, "none")
    smallest: Estimate = lanczos(operator, 1, "SA", matvecs=budget, seed=seed)[0]
    used = smallest.matvecs
    low = smallest.value - SURE * smallest.stderr
    if low + damping > 0:
        return Margin(low + damping, "lanczos", used)
    if smallest.value + damping >= 0:  # it may be definite, but this is not known
        return Margin(0.0, "none", used)
    square: Estimate = lanczos(_Square(operator, damping), 1, "SA", matvecs=budget, seed=seed)[0]
    used += 2 * square.matvecs
    low = square.value - SURE * square.stderr
    return Margin(low**0.5, "lanczos", used) if low > 0 else Margin(0.0, "none", used)


class _Square:
    """(B + damping)²."""

    symmetric = True

    def __init__(self, operator: Matrix, damping: float) -> None:
        self._operator, self._damping = operator, damping
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device
        if hasattr(operator, "spaces"):
            self.spaces = operator.spaces

    def __matmul__(self, other: Tensor) -> Tensor:
        once = self._operator @ other + self._damping * other
        return self._operator @ once + self._damping * once
