"""Power laws fitted to measurements at several sizes: exponents with bootstrap intervals, and their limits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from curvoscope import checks
from curvoscope.errors import EmptyError, NonFiniteError, RangeError
from curvoscope.settings import chosen_seed

LARGEST_FACTOR = 10.0
"""How far beyond the measured sizes a law is followed unless more is allowed."""
_LEAST_SIZES = 3
_LEAST_LOG = -700.0  # of numbers that floats have all digits of


@dataclass(frozen=True)
class Prediction:
    """A number predicted by a power law, with its interval.

    Args:
        value: the number.
        low, high: the ends of its interval.
        extrapolated: whether it lies beyond the measured sizes.
        factor: 1 within the measured sizes, otherwise the ratio to the nearest one.

    Example:
        >>> import curvoscope as cv
        >>> law = cv.analysis.power_law({1: [2.0], 10: [20.0], 100: [200.0]})
        >>> found = law(400)
        >>> round(found.value, 6), found.extrapolated, found.factor
        (800.0, True, 4.0)
    """

    value: float
    low: float
    high: float
    extrapolated: bool
    factor: float


@dataclass(frozen=True, eq=False)
class PowerLaw:
    """value = a size^exponent, the least-squares line through the mean logarithms at each size.

    Call it with a size to get the value there. The bootstrap redraws the data within each size if every size has
    several values, otherwise the residuals.

    Args:
        prefactor: a.
        exponent: the exponent.
        interval: of the exponent, at the given level.
        level: the level of all intervals.
        sizes: the measured sizes, ascending.
        values: the measured values at each size.
        misfit: the p-value of the F-test that the means at the sizes lie on a line, if there are several values per
            size. A small one says that there is no power law; then the interval does not say how wrong the line is.
        resampled: lines (log a, exponent) through redrawn data, (R, 2).

    Example:
        >>> import curvoscope as cv
        >>> law = cv.analysis.power_law({1: [2.0, 2.1], 10: [20.0, 21.0], 100: [200.0, 210.0]})
        >>> round(law.exponent, 6), law.interval[0] < 1 < law.interval[1], round(law(50).value, 2)
        (1.0, True, 102.47)
    """

    prefactor: float
    exponent: float
    interval: tuple[float, float]
    level: float
    sizes: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    misfit: float | None
    resampled: np.ndarray

    def __call__(self, size: float, most: float = LARGEST_FACTOR) -> Prediction:
        """The value at a size.

        Args:
            size: where to read the law.
            most: how many times beyond the measured sizes is allowed; further out is a `RangeError`.

        Returns:
            The value with its interval.
        """
        checks.positive(size=size)
        factor = self._factor(size)
        self._check("size", size, factor, most)
        drawn = self.resampled[:, 0] + self.resampled[:, 1] * math.log(size)
        logs = (math.log(self.prefactor) + self.exponent * math.log(size), *_ends(drawn, self.level))
        if max(map(abs, logs)) >= -_LEAST_LOG:
            raise RangeError("size", f"got {size:g}, where the law leaves the range of floating point")
        value, low, high = map(math.exp, logs)
        return Prediction(value, low, high, factor > 1, factor)

    def required(self, target: float, most: float = LARGEST_FACTOR) -> Prediction:
        """The size at which the law reaches `target`.

        An end of the interval may lie further out than `most`: it is what the law says there.

        Args:
            target: the value to reach.
            most: how many times beyond the measured sizes is allowed. Further out, or if the exponent may be zero, is a
                `RangeError`: allow more, or measure more.

        Returns:
            The size with its interval.
        """
        checks.positive(target=target)
        low, high = self.interval
        if low <= 0 <= high:
            raise RangeError(
                "target",
                f"the exponent is {self.exponent:.3g} ({low:.3g} to {high:.3g}): no trend to follow to {target:g}",
            )
        size = math.exp((math.log(target) - math.log(self.prefactor)) / self.exponent)
        factor = self._factor(size)
        self._check("target", size, factor, most)
        kept = self.resampled[np.sign(self.resampled[:, 1]) == np.sign(self.exponent)]
        with np.errstate(over="ignore"):
            drawn = np.exp((math.log(target) - kept[:, 0]) / kept[:, 1])
        ends = _ends(drawn, self.level)
        return Prediction(size, *ends, factor > 1, factor)

    def _factor(self, size: float) -> float:
        return max(1.0, min(self.sizes) / size, size / max(self.sizes))

    def _check(self, argument: str, size: float, factor: float, most: float) -> None:
        if not most >= 1:
            raise RangeError("most", f"got {most}, expected at least 1")
        if factor > most:
            raise RangeError(
                argument,
                f"leads to size {size:.3g}, {factor:.3g} times beyond the measured {min(self.sizes):g} to "
                f"{max(self.sizes):g}; the law is not known there. Measure sizes closer to it, or pass "
                f"most={factor:.3g}",
            )


def power_law(
    measurements: Mapping[int, Sequence[float]] | Mapping[float, Sequence[float]],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int | None = None,
) -> PowerLaw:
    """Fit a power law to {size: values}: at least three sizes, positive values.

    Args:
        measurements: the values of several seeds at each size; one is enough.
        level: of the intervals.
        resamples: bootstrap samples.
        seed: for the bootstrap.

    Returns:
        The law, which can be called with a size.

    Example:
        >>> import curvoscope as cv
        >>> law = cv.analysis.power_law({1: [3.0], 2: [6.0], 4: [12.0]})
        >>> round(law.prefactor, 6), round(law.exponent, 6)
        (3.0, 1.0)
    """
    checks.probability("level", level)
    checks.at_least(100, resamples=resamples)
    sizes, values = _checked(measurements)
    x, logs = np.log(sizes), [np.log(group) for group in values]
    y = np.array([group.mean() for group in logs])
    line = _line(x, y)
    rng = np.random.default_rng(chosen_seed(seed))
    fewest = min(len(group) for group in logs)
    if fewest > 1:
        # means of n values drawn again vary by (n - 1)/n too little
        moves = [
            (rng.choice(group, (resamples, len(group))) - group.mean()).mean(1)
            * math.sqrt(len(group) / (len(group) - 1))
            for group in logs
        ]
        again = y + np.stack(moves, 1)
    else:
        fitted = line[0] + line[1] * x
        residuals = (y - fitted) * math.sqrt(len(x) / (len(x) - 2))
        again = fitted + rng.choice(residuals - residuals.mean(), (resamples, len(x)))
    resampled = np.array([_line(x, row) for row in again])
    if not _LEAST_LOG < line[0] < -_LEAST_LOG:
        raise RangeError(
            "measurements", f"at size 1 the law is exp({line[0]:.3g}), beyond floating point; give sizes nearer 1"
        )
    return PowerLaw(
        math.exp(line[0]),
        line[1],
        _ends(resampled[:, 1], level),
        level,
        tuple(sizes),
        tuple(tuple(group) for group in values),
        _misfit(x, logs),
        resampled,
    )


def _checked(
    measurements: Mapping[int, Sequence[float]] | Mapping[float, Sequence[float]],
) -> tuple[list[float], list[list[float]]]:
    """Sizes in ascending order and their values, all positive and finite."""
    pairs = sorted((float(size), [float(value) for value in group]) for size, group in measurements.items())
    if len(pairs) < _LEAST_SIZES:
        raise EmptyError("measurements", f"{len(pairs)} sizes; a power law with an interval needs {_LEAST_SIZES}")
    for size, group in pairs:
        if not group:
            raise EmptyError("measurements", f"size {size:g} has no values")
        if not all(map(math.isfinite, [size, *group])):
            raise NonFiniteError("measurements", f"size {size:g} has values that are NaN or infinite")
        if size <= 0 or min(group) <= 0:
            raise RangeError("measurements", f"size {size:g} has the value {min(group):g}: a power law is positive")
    return [size for size, _ in pairs], [group for _, group in pairs]


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Intercept and slope of the least-squares line."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    return float(y.mean() - slope * x.mean()), slope


def _ends(values: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _misfit(x: np.ndarray, logs: list[np.ndarray]) -> float | None:
    """The p-value of the F-test for lack of fit; None unless some size has several values.

    Its line is the least-squares one through all values, so that sizes with more of them count more.
    """
    counts = np.array([len(group) for group in logs])
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in logs)
    degrees = int(counts.sum() - len(x))
    if degrees < 1 or not within:
        return None
    means = np.array([group.mean() for group in logs])
    slope, intercept = np.polyfit(x, means, 1, w=np.sqrt(counts))
    between = float((counts * (means - intercept - slope * x) ** 2).sum())
    return float(scipy.special.fdtrc(len(x) - 2, degrees, between / (len(x) - 2) / (within / degrees)))
