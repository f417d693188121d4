"""What an estimator returns: a number or a vector with its standard error, its cost and its method."""

import html
import math
from dataclasses import dataclass, replace

from scipy import special
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError

_SYMMETRIC = 1e-4  # a skewness below this is none


@dataclass(frozen=True)
class Estimate:
    """A number that was estimated: its value, standard error, cost in matrix-vector products, and method.

    The last three fields give `interval` its shape when the sample is small. `degrees` are the degrees of freedom of
    the standard error; `skewness` is that of the distribution of the estimate (quadratic forms of few large eigenvalues
    are as skew as χ²); `power` is 2 for the root of an estimated square, whose interval is the root of the square's.
    """

    value: float
    stderr: float
    matvecs: int
    method: str
    degrees: float = math.inf
    skewness: float = 0.0
    power: float = 1.0

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.stderr:.1g}"

    def __format__(self, spec: str) -> str:
        """The value in the format of a number, so that what prints an exact one prints an estimate too."""
        return format(self.value, spec) if spec else str(self)

    def __rich__(self) -> object:
        from rich.text import Text

        return Text.assemble(str(self), (f" ({self._cost()})", "dim"))

    def _repr_html_(self) -> str:
        return f"<span>{self} <small>({html.escape(self._cost())})</small></span>"

    def _cost(self) -> str:
        return f"{self.method}, {self.matvecs:,} products" if self.matvecs else self.method

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The two ends of the confidence interval.

        The estimate x of μ is taken as μ + σ sqrt(ν/2) (χ²_ν/ν - 1), a law of mean μ, standard deviation σ and skewness
        sqrt(8/ν): normal for ν → ∞, exact for one dominant eigenvalue, where ν is the number of probes. There the
        standard error s is as large as the deviation: s = σ χ²_ν/ν. So μ = x - s sqrt(ν/2) (1 - ν/χ²_ν), a pivot. Both
        ends are widened by the ratio of Student's to normal quantiles, for an s that is itself an estimate.
        """
        if not 0 < level < 1:
            raise RangeError("level", f"got {level}, expected a probability between 0 and 1")
        below, above = _reach(level, self.degrees, abs(self.skewness))
        if self.skewness < 0:
            below, above = above, below
        if self.power == 1 or not self.value:
            return self.value - below * self.stderr, self.value + above * self.stderr
        power, relative = self.power, self.power * self.stderr / self.value  # of the square
        low, high = max(1 - below * relative, 0.0), 1 + above * relative
        return self.value * low ** (1 / power), self.value * high ** (1 / power)

    def root(self) -> "Estimate":
        """The square root, its standard error by the delta method: se(sqrt m) = se(m) / (2 sqrt m)."""
        root = max(self.value, 0.0) ** 0.5
        stderr = self.stderr / (2 * root) if root else self.stderr**0.5
        return Estimate(root, stderr, self.matvecs, self.method, self.degrees, self.skewness, 2 * self.power)

    def checked(self, question: str) -> "Estimate":
        """The estimate itself, once value and error are known to be finite."""
        checks.finite(question, self.value)
        checks.finite(question, self.stderr)
        return self

    def scaled(self, factor: float) -> "Estimate":
        """The estimate of a positive multiple."""
        return replace(self, value=self.value * factor, stderr=self.stderr * factor)


@dataclass(frozen=True, eq=False)
class DiagonalEstimate:
    """The diagonal (n,) of a matrix, with a standard error (n,) for each entry."""

    value: Tensor
    stderr: Tensor
    matvecs: int
    method: str
    degrees: float = math.inf

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The two ends (n,) of the confidence interval of each entry, by Student's distribution."""
        if not 0 < level < 1:
            raise RangeError("level", f"got {level}, expected a probability between 0 and 1")
        reach = student(level, self.degrees) * self.stderr
        return self.value - reach, self.value + reach


def student(level: float, degrees: float) -> float:
    """The two-sided quantile of Student's distribution: that of the normal one for infinite degrees of freedom."""
    tail = (1 + level) / 2
    return float(special.ndtri(tail) if math.isinf(degrees) else special.stdtrit(degrees, tail))


def _reach(level: float, degrees: float, skewness: float) -> tuple[float, float]:
    """How many standard errors the interval reaches below and above, for a distribution skew to the right."""
    normal, widened = student(level, math.inf), student(level, degrees)
    if skewness < _SYMMETRIC:
        return widened, widened
    nu = 8 / skewness**2
    few, many = (2 * float(special.gammaincinv(nu / 2, p)) for p in ((1 - level) / 2, (1 + level) / 2))
    unit = (nu / 2) ** 0.5 * widened / normal
    return unit * (1 - nu / many), unit * (nu / few - 1)
