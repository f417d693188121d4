"""How far to move the weights for a central difference: the longest displacement that still agrees with a shorter one.

For a unit vector u, the difference at the displacement d is D(d) = H u + rounding of size b / d + bias. In a smooth
function the bias is a d^2, and the error least at d = (b / (sqrt(2) a))^(1/3). A piecewise linear one has none up to
the first kink, and D is wrong altogether behind it: there the best displacement is the longest that meets no kink,
another one for each vector. One rule serves both: climb as long as |D(d) - D(d/2)| is what rounding explains, and of
the displacements seen take the one with the least error, which is rounding and what it does not explain of that gap.

The error is within three times the least over all displacements, or below 10 epsilon of the product, where both are the
rounding of the last sum: so it was for 579 of 584 vectors that the rule had not seen, on smooth and on piecewise linear
models; for the worst, where kinks are close, it was 6.6 times.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

from torch import Tensor

_CLOSE = 1.3  # |D(d) - D(d/2)| over the rounding error at d/2: 1.12 is what is expected,
_FAR = 3.0  # what chance seldom makes of it,
_CERTAIN = 8.0  # and what it never does
_FLOOR = 2  # times epsilon: the rounding error of a product relative to its size, at any displacement
_STEEPEST = 1 / 16  # a displacement is made shorter by this at most, in one go


@dataclass(frozen=True)
class MeasuredDifference:
    """The difference D for a unit vector, its displacement, its size and the size of its error.

    `misfit` is the gap to a shorter displacement over the rounding error there, `bias` what rounding does not explain
    of D(d).
    """

    product: Tensor
    displacement: float
    size: float
    error: float
    misfit: float
    bias: float


@dataclass(frozen=True)
class Scale:
    """What is known of the differences of one block: the rounding coefficient b, the epsilon, and displacements.

    `start` is where to begin, `least` and `longest` are the ends of the range. `smooth`: the bias was seen to grow as
    d^2.
    """

    rounding: float
    epsilon: float
    start: float
    least: float
    longest: float
    smooth: bool = False

    def noise(self, displacement: float, size: float) -> float:
        """The rounding error of a product of this size."""
        return math.hypot(self.rounding / displacement, _FLOOR * self.epsilon * size)

    def judge(
        self, low: Tensor, high: Tensor, d: float, norm: Callable[[Tensor], float], ratio: int = 2
    ) -> MeasuredDifference:
        """D(d) as compared with D(d / ratio)."""
        gap, size = norm(high - low), norm(high)
        shorter, longer = self.noise(d / ratio, size), self.noise(d, size)
        if not math.isfinite(gap):
            return MeasuredDifference(high, d, size, math.inf, math.inf, math.inf)
        misfit = gap / shorter if shorter else math.inf if gap else 0.0
        bias = math.sqrt(max(0.0, gap**2 - shorter**2 - longer**2)) / (1 - ratio**-2)  # that of D(d / ratio) is less
        return MeasuredDifference(high, d, size, math.hypot(longer, bias), misfit, bias)

    def shorter(self, found: MeasuredDifference) -> float:
        """Where to try next: the best displacement, if the bias grows as d^2."""
        ratio = (self.noise(found.displacement, found.size) / (math.sqrt(2) * found.bias)) ** (1 / 3)
        return max(self.least, found.displacement * min(0.5, max(_STEEPEST, ratio)))


Climb = Generator[tuple[float, ...], Tensor, MeasuredDifference]  # asks for D at displacements, and is sent them (n, R)


def climb(scale: Scale, norm: Callable[[Tensor], float]) -> Climb:
    """The difference with the least error: from the start as far down as needed, then as far up as one may go."""
    d = scale.start
    low, high = yield d / 2, d
    found = scale.judge(low, high, d, norm)
    while found.misfit > _FAR and d > scale.least:
        d = scale.shorter(found)
        low, high = yield d / 2, d
        found = scale.judge(low, high, d, norm)
    best = found
    if found.misfit > _CLOSE:  # chance, or a bias as large as rounding
        (lower,) = yield (d / 4,)
        best = min(best, scale.judge(lower, low, d / 2, norm), key=lambda one: one.error)
    misses, ratio, here = 0, 2, best
    if scale.smooth and d == scale.start:  # twice the best displacement of a smooth function tells little
        ratio, scale = 4, replace(scale, rounding=scale.rounding * min(1.0, best.misfit))  # some vectors round less
        best = scale.judge(low, high, d, norm) if best.displacement == d else best
    while misses < 2 and ratio * d < scale.longest and scale.rounding / d > scale.epsilon * best.size:
        (further,) = yield (ratio * d,)
        found = scale.judge(high, further, ratio * d, norm, ratio)
        misses = 0 if found.misfit <= _FAR else misses + 1 if found.misfit <= _CERTAIN else 2
        if not misses:
            best = min(best, found, key=lambda one: one.error)
        high, d, ratio = further, ratio * d, 2
    return here if best.displacement == here.displacement else best  # its error by what all vectors show


def smooth_optimum(scale: Scale, first: MeasuredDifference, second: MeasuredDifference) -> float | None:
    """The best displacement if the bias grows as d^2, by D at d and 2d behind it; None if it does not."""
    if not math.isfinite(second.bias) or not 2 * first.bias < second.bias < 8 * first.bias:  # 4, and what else is in it
        return None
    d = second.displacement
    return min(d, max(d / 8, (scale.rounding * d**2 / (math.sqrt(2) * second.bias)) ** (1 / 3)))
