"""The second-order prediction of the loss along a line, and the learning rate at which gradient descent diverges."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.analysis.fitting import Slope, log_slope
from curvoscope.analysis.surface import Direction, Surface, finite, positions
from curvoscope.blocks import Blocks
from curvoscope.errors import NonFiniteError, RangeError
from curvoscope.estimate import Estimate
from curvoscope.losses.objectives import LossFunction

_SPAN = (-4.0, -0.5)  # default radii: these powers of ten, times the norm of the weights
_RADII = 15
_REFINEMENTS = 12  # bisections of the radius, in the logarithm
_UNITS = 16  # units of rounding that a loss may be off by
_CLEAR = 30  # times the rounding: an error of this size is one of the expansion
_FIT = 10.0**1.5  # the fit covers this factor of radii above the first clear error: the cubic term rules there
_ORDER = 2.7  # a fitted order above this is the third, or a higher one if third derivatives vanish
_KNOWN = 0.5  # the widest interval of an order that says which one it is
_KICK = 1e-3  # of the norm of the weights: the start of a descent beside them
_FACTORS = (0.5, 0.7, 0.9, 0.95, 1.05, 1.1, 1.3, 1.5)


@dataclass(frozen=True, eq=False)
class Taylor:
    """L(w + ε v) compared with L + ε g·v + ε²/2 v·Hv at the radii ε (n,), for a unit vector v.

    Args:
        direction: v, with the length that it had.
        loss: L(w).
        slope: g·v.
        curvature: v·Hv.
        radii: ε, (n,).
        actual: L(w + ε v), (n,).
        rounding: the error that rounding may cause in the losses, (n,).
        tolerance: the share of the actual change that the prediction may be off by within `radius`.
        radius: the distance up to which the prediction holds; None if it fails at the smallest one.
        reaches_further: whether the prediction holds at the largest radius, too.
        order: the exponent of the error in ε: 3, or more if third derivatives vanish; None if the error is all
            rounding, as for a quadratic loss.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> data = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), torch.ones(2, 1).double())]
        >>> found = cv.analysis.taylor(model, torch.nn.MSELoss(), data, "top")
        >>> round(found.curvature, 6), found.reaches_further, found.order  # the loss is quadratic
        (4.0, True, None)
    """

    direction: Direction
    loss: float
    slope: float
    curvature: float
    radii: Tensor
    actual: Tensor
    rounding: Tensor
    tolerance: float
    radius: float | None
    reaches_further: bool  # the prediction holds at the largest radius too
    order: Slope | None

    @property
    def predicted(self) -> Tensor:
        """The second-order loss, (n,)."""
        return self.loss + self.predicted_change

    @property
    def predicted_change(self) -> Tensor:
        """ε g·v + ε²/2 v·Hv, (n,)."""
        return _second_order(self.radii, self.slope, self.curvature)

    @property
    def actual_change(self) -> Tensor:
        """L(w + ε v) - L(w), (n,)."""
        return self.actual - self.loss

    @property
    def error(self) -> Tensor:
        """|actual - predicted|, (n,)."""
        return (self.actual_change - self.predicted_change).abs()

    @property
    def steps(self) -> Tensor:
        """The radii in units of the direction's own length, (n,): learning rates if it is the gradient."""
        return self.radii / self.direction.length

    @property
    def is_third_order(self) -> bool | None:
        """Whether the error has the order that it must have; None if that is unknown: all rounding, or no power law."""
        if self.order is None or self.order.high - self.order.low > _KNOWN:
            return None
        return self.order.value > _ORDER


def taylor(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    direction: str | Tensor = "gradient",
    radii: Iterable[float] | Tensor | None = None,
    *,
    tolerance: float = 0.01,
    blocks: Blocks | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> Taylor:
    """The actual loss along a line, compared with its second-order prediction.

    Args:
        model, loss_fn, batches, blocks, device: as in `hessian`. For small radii use a model in float64.
        direction: "gradient" (downhill), "top", "top2", ..., "bottom", ... (eigenvectors), "random", or a vector (P,)
            over the blocks in their order, for example an optimizer's step.
        radii: distances from the weights, ascending; None: 15 of them, from 1e-4 to 0.3 of the norm of the weights.
        tolerance: the share of the actual change that the prediction may be off by within `radius`.
        seed: for the random direction and Lanczos.

    Returns:
        Both losses at the radii, the distance up to which they agree, and the order of the error.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
        >>> data = [(torch.randn(5, 2).double(), torch.ones(5, 1).double())]
        >>> found = cv.analysis.taylor(model, torch.nn.MSELoss(), data)
        >>> found.slope < 0, found.is_third_order
        (True, True)
    """
    if not 0 < tolerance < 1:
        raise RangeError("tolerance", f"got {tolerance}, expected a share between 0 and 1")
    surface = Surface(model, loss_fn, batches, blocks, device)
    if radii is None:
        radii = torch.logspace(*_SPAN, _RADII, dtype=torch.float64) * _scale(surface)
    places = positions("radii", radii)
    line = surface.direction(direction, seed)
    gradient, v = surface.gradient(), line.vector
    slope = float(gradient @ v)
    curvature = float(v @ (surface.hessian.total @ v.to(surface.engine.dtype)).double())
    losses = surface.losses(torch.cat([torch.zeros(1, dtype=torch.float64), places])[:, None] * v.cpu())
    finite(losses, "radii", torch.cat([torch.zeros(1), places]))
    # what a rounded loss is off by, and what rounded weights change it by
    moved = float((gradient * surface.weights).norm()) * surface.epsilon
    rounding = _UNITS * surface.epsilon * losses.abs()[1:].clamp_min(float(losses[0].abs())) + moved
    found = _Line(surface, v.cpu(), float(losses[0]), slope, curvature, tolerance)
    error = (losses[1:] - losses[0] - _second_order(places, slope, curvature)).abs()
    radius, further = found.radius(places, losses[1:], rounding)
    order = _order(places, error, rounding)
    return Taylor(
        line, float(losses[0]), slope, curvature, places, losses[1:], rounding, tolerance, radius, further, order
    )


@dataclass(frozen=True, eq=False)
class _Line:
    """One line, on which the radius of the prediction is sought."""

    surface: Surface
    vector: Tensor
    loss: float
    slope: float
    curvature: float
    tolerance: float

    def holds(self, places: Tensor, losses: Tensor, rounding: Tensor) -> Tensor:
        """Whether the prediction is within the tolerance of the actual change, or within rounding of it."""
        change = losses - self.loss
        error = (change - _second_order(places, self.slope, self.curvature)).abs()
        return error <= (self.tolerance * change.abs()).maximum(rounding)

    def radius(self, places: Tensor, losses: Tensor, rounding: Tensor) -> tuple[float | None, bool]:
        """The distance up to which it holds, refined between two radii; and whether it holds at all of them."""
        good = self.holds(places, losses, rounding)
        if bool(good.all()):
            return float(places[-1]), True
        first = int((~good).to(torch.int).argmax())
        if first == 0:
            return None, False
        low, high = float(places[first - 1]), float(places[first])
        for _ in range(_REFINEMENTS):
            middle = (low * high) ** 0.5
            place = torch.tensor([middle], dtype=torch.float64)
            loss = self.surface.losses(place[:, None] * self.vector)
            low, high = (middle, high) if bool(self.holds(place, loss, rounding[:1])) else (low, middle)
        return low, False


def _second_order(places: Tensor, slope: float, curvature: float) -> Tensor:
    return places * slope + places.square() * (curvature / 2)


def _order(places: Tensor, error: Tensor, rounding: Tensor) -> Slope | None:
    """The exponent of the error where it is clear of rounding, over the smallest such radii."""
    clear = error > _CLEAR * rounding
    for first in range(len(places)):  # from there on all are clear, up to the end of the fit
        chosen = (places >= places[first]) & (places <= _FIT * places[first])
        if int(chosen.sum()) >= 3 and bool(clear[chosen].all()):
            return log_slope(places[chosen], error[chosen])
    return None


def _scale(surface: Surface) -> float:
    return float(surface.weights.norm()) or 1.0


# ---- the critical learning rate


@dataclass(frozen=True, eq=False)
class Divergence:
    """Gradient descent from w + κ v, v the eigenvector of λ_max, at several learning rates.

    In the quadratic region around a stationary w, each step multiplies the loss above L(w) by (1 - η λ_max)²: it rises
    for η > 2/λ_max and falls below.

    Args:
        largest_eigenvalue: λ_max.
        learning_rates: η, (n,).
        losses: of all runs, (n, steps + 1); infinity if a run left the range of floating point.
        loss: L(w).
        kick: κ.
        gradient_norm: |g| at w, zero if the weights are stationary.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> _ = torch.nn.init.zeros_(model.weight)  # stationary for targets of zero
        >>> data = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), torch.zeros(2, 1).double())]
        >>> found = cv.analysis.divergence(model, torch.nn.MSELoss(), data, [0.25, 0.375, 0.75], kick=1.0)
        >>> [round(growth, 6) for growth in found.growth.tolist()], found.rises.tolist()  # λ_max is 4
        ([0.0, 0.25, 4.0], [False, False, True])
    """

    largest_eigenvalue: Estimate
    learning_rates: Tensor
    losses: Tensor
    loss: float  # L(w)
    kick: float
    gradient_norm: float  # at w: zero if the weights are stationary

    @property
    def critical_learning_rate(self) -> float:
        """2/λ_max."""
        return 2 / self.largest_eigenvalue.value

    @property
    def rises(self) -> Tensor:
        """Whether the loss exceeds its start value in any step, (n,): beyond the quadratic region it may fall again."""
        return self.losses.max(1).values > self.losses[:, 0]

    @property
    def growth(self) -> Tensor:
        """The loss above L(w) after one step, divided by that at the start, (n,); predicted: (1 - η λ_max)²."""
        above = self.losses[:, :2] - self.loss
        return above[:, 1] / above[:, 0]

    @property
    def predicted(self) -> Tensor:
        """Whether η > 2/λ_max, (n,)."""
        return self.learning_rates > self.critical_learning_rate

    @property
    def agrees(self) -> bool:
        """Whether the loss rises exactly at the learning rates for which this is predicted."""
        return bool((self.rises == self.predicted).all())


def divergence(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    learning_rates: Iterable[float] | Tensor | None = None,
    *,
    steps: int = 5,
    kick: float | None = None,
    blocks: Blocks | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> Divergence:
    """Full-batch gradient descent on both sides of the critical learning rate, on copies of the weights.

    Args:
        model, loss_fn, batches, blocks, device: as in `hessian`; all batches make one step.
        learning_rates: ascending; None: from 0.5 to 1.5 times 2/λ_max.
        steps: of each run.
        kick: κ, the distance of the start from the weights along the eigenvector of λ_max; None: 1e-3 of their norm.
            The loss must be quadratic up to there, see `Taylor.radius`, and the change of the loss clear of rounding.
        seed: for Lanczos.

    Returns:
        The losses of all runs, and whether they rise as predicted.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> data = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), torch.ones(2, 1).double())]
        >>> found = cv.analysis.divergence(model, torch.nn.MSELoss(), data, kick=1.0)
        >>> round(found.critical_learning_rate, 6), tuple(found.losses.shape)  # 2/λ_max
        (0.5, (8, 6))
    """
    checks.at_least(1, steps=steps)
    surface = Surface(model, loss_fn, batches, blocks, device)
    if kick is None:
        kick = _KICK * _scale(surface)
    checks.positive("a positive distance", kick=kick)
    top = surface.direction("top", seed)
    assert top.eigenvalue is not None
    if top.eigenvalue.value <= 0:
        raise RangeError("model", f"the largest eigenvalue is {top.eigenvalue.value:.3g}: no learning rate is critical")
    critical = 2 / top.eigenvalue.value
    rates = positions("learning_rates", [f * critical for f in _FACTORS] if learning_rates is None else learning_rates)
    losses = torch.full((len(rates), steps + 1), torch.inf, dtype=torch.float64)
    for row, rate in zip(losses, rates.tolist(), strict=True):
        _descend(surface, kick * top.vector, rate, row)
    norm = float(surface.gradient().norm())
    here = float(surface.losses(torch.zeros(1, surface.size, dtype=torch.float64))[0])
    return Divergence(top.eigenvalue, rates, losses, here, kick, norm)


def _descend(surface: Surface, displacement: Tensor, rate: float, losses: Tensor) -> None:
    """Write the losses of a run into (steps + 1,); if it leaves the range of floats, infinity stays."""
    for i in range(len(losses)):
        loss = float(surface.losses(displacement[None])[0])
        if not math.isfinite(loss):
            if i == 0:
                raise NonFiniteError("kick", f"the loss is {loss} where the runs start; give a smaller kick")
            return
        losses[i] = loss
        if i + 1 < len(losses):
            displacement = displacement - rate * surface.gradient(displacement)
            if not bool(torch.isfinite(displacement).all()):
                return
