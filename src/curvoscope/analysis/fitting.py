"""Straight lines through logarithms: the exponent of a power law, with its interval and the fitted range."""

import math
from dataclasses import dataclass

from torch import Tensor

from curvoscope.errors import EmptyError, RangeError, ShapeError
from curvoscope.estimate.result import student


@dataclass(frozen=True)
class Slope:
    """d log y / d log x by least squares over `points` points with `start` ≤ x ≤ `stop`; (low, high) is its 95 %
    interval by Student's distribution, as wide as the line misses the points."""

    value: float
    low: float
    high: float
    start: float
    stop: float
    points: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def log_slope(x: Tensor, y: Tensor) -> Slope:
    """The slope of log y over log x, both (n,) and positive, n ≥ 3."""
    if x.shape != y.shape or x.ndim != 1:
        raise ShapeError("y", f"got {tuple(y.shape)} for x {tuple(x.shape)}; expected one value for each x")
    if len(x) < 3:
        raise EmptyError("x", f"{len(x)} points; a slope with an interval needs 3")
    for name, values in (("x", x), ("y", y)):
        if not bool((values > 0).all()):
            raise RangeError(name, "has values that are not positive: they have no logarithm")
    return Slope(*line(x.double().log(), y.double().log()), float(x.min()), float(x.max()), len(x))


def line(u: Tensor, v: Tensor) -> tuple[float, float, float]:
    """The least-squares slope of v over u, both (n,), and the ends of its 95 % interval: infinite for two points."""
    centred = u - u.mean()
    spread, degrees = float(centred @ centred), len(u) - 2
    if not spread:
        raise RangeError("x", "all points are at the same place: a slope needs two places")
    slope = float(centred @ v) / spread
    if degrees < 1:
        return slope, -math.inf, math.inf
    residual = v - v.mean() - slope * centred
    reach = student(0.95, float(degrees)) * (float(residual @ residual) / degrees / spread) ** 0.5
    return slope, slope - reach, slope + reach
