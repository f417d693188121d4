"""Spectral densities as sums of point masses, one sum for each probe."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError
from curvoscope.estimate.result import Estimate, student
from curvoscope.magnitudes import unit

_WIDTH = 0.01  # of a kernel, relative to the spread
_ZERO = 10  # times sqrt(n) units of rounding: eigenvalues that small are zero


@dataclass(frozen=True, eq=False)
class Band:
    """A function of x with a pointwise confidence band, all of the shape of x, in float64.

    Args:
        x: where.
        value: of the function.
        low: the lower end of the band.
        high: the upper end.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> band = estimate.Density.exact(torch.arange(4.0)).cdf(torch.tensor([1.5]))
        >>> band.low.tolist(), band.value.tolist(), band.high.tolist()
        ([0.5], [0.5], [0.5])
    """

    x: Tensor
    value: Tensor
    low: Tensor
    high: Tensor


@dataclass(frozen=True, eq=False)
class Density:
    """The density of eigenvalues of an n x n matrix: for each probe p, masses w_pj at the nodes θ_pj.

    The mean over the probes estimates (1/n) sum_i δ(λ - λ_i). As long as nothing is smoothed, it is a measure: it has a
    cumulative function, moments and Wasserstein distances, and no kernel width to choose.

    Args:
        nodes: θ (probes, m) in float64, ascending in each row.
        weights: w (probes, m) in float64.
        residuals: (probes, m) in float64: within so much of a node there is an eigenvalue.
        size: n.
        matvecs: matrix-vector products that the density took.
        method: "slq", or "exact".
        quadrature: whether the masses are Gauss weights, which bound the cumulative function of their probe.
        missed: error bars for eigenvalues below all nodes, and above all.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> found = estimate.Density.exact(torch.tensor([0.0, 1.0, 1.0, 4.0]))
        >>> found, found.moment(1).value
        (Density(4 eigenvalues, support 0 to 4, exact), 1.5)
    """

    nodes: Tensor
    weights: Tensor
    residuals: Tensor
    size: int
    matvecs: int
    method: str
    quadrature: bool = False
    missed: tuple[float, float] = (0.0, 0.0)

    def __repr__(self) -> str:
        low, high = self.support
        taken = "exact" if self.method == "exact" else f"{self.probes} probes, {self.matvecs} products"
        return f"Density({self.size} eigenvalues, support {low:.4g} to {high:.4g}, {taken})"

    @classmethod
    def exact(cls, eigenvalues: Tensor, matvecs: int = 0) -> "Density":
        """The density of known eigenvalues.

        Args:
            eigenvalues: (n,), in any order.
            matvecs: the number of matrix-vector products that they took.

        Returns:
            A density with one mass of 1/n per eigenvalue. Those that are zero to rounding are set to zero.
        """
        values = checks.floating("eigenvalues", eigenvalues).double().reshape(1, -1).sort().values
        size = values.shape[1]
        rounding = torch.finfo(eigenvalues.dtype).eps
        return gauss(values, torch.full_like(values, 1 / size), torch.zeros_like(values), size, matvecs, rounding)

    @property
    def probes(self) -> int:
        """How many independent measures there are."""
        return self.nodes.shape[0]

    @property
    def support(self) -> tuple[float, float]:
        """The smallest and the largest node that has a mass."""
        held = self.nodes[self.weights > 0]
        return (float(held.min()), float(held.max())) if held.numel() else (0.0, 0.0)

    @property
    def smallest(self) -> Estimate:
        """The smallest node of all probes as an estimate of the smallest eigenvalue.

        The error bar is the residual, or what the probes may have missed if it is more (`missed`).
        """
        return self._end(-1)

    @property
    def largest(self) -> Estimate:
        """The largest node, and its error bar as that of the smallest."""
        return self._end(1)

    def _end(self, sign: int) -> Estimate:
        """The largest (1) or the smallest (-1) node that has a mass: zeros without one fill the rows of probes whose
        Krylov space ended early."""
        index = int(torch.where(self.weights > 0, sign * self.nodes, -math.inf).argmax())
        value, residual = (float(table.flatten()[index]) for table in (self.nodes, self.residuals))
        return Estimate(value, max(residual, self.missed[sign > 0]), self.matvecs, self.method)

    @property
    def spread(self) -> float:
        """The length of the support."""
        low, high = self.support
        return high - low

    def cdf(self, x: Tensor, level: float = 0.95) -> Band:
        """The share of eigenvalues ≤ x, without a kernel, and a band that holds the true one pointwise.

        The band joins two errors. Between probes: Student's interval of their mean. Within a probe, by the inequality
        of Chebyshev, Markov and Stieltjes: the mass of the node before x may lie after x, and that of the next before.

        Args:
            x: points, of any shape.
            level: the confidence of Student's interval, between 0 and 1.

        Returns:
            A `Band` of the shape of x, with values between 0 and the total mass.
        """
        points = _points(x)
        total, index = self._cumulative(points)
        value = total.gather(1, index)
        low = high = value
        if self.quadrature:
            before, after = (index - 1).clamp_min(0), (index + 1).clamp_max(self.nodes.shape[1])
            low, high = total.gather(1, before), total.gather(1, after)
        most = float(self.weights.sum(1).mean())
        lower = (low.mean(0) - self._reach(low, level)).clamp(0, most)
        upper = (high.mean(0) + self._reach(high, level)).clamp(0, most)
        return _band(x, points, value.mean(0).clamp(0, most), lower, upper)

    def smooth(self, x: Tensor, width: float | None = None, level: float = 0.95) -> Band:
        """The density at x, smoothed with a Gaussian kernel, and Student's band.

        Args:
            x: points, of any shape.
            width: the standard deviation of the kernel; None: 1 % of the spread of the eigenvalues.
            level: the confidence of the band at each point, between 0 and 1.

        Returns:
            A `Band` of the shape of x. It covers the error between the probes, not the bias of the kernel.
        """
        points = _points(x)
        width = width if width is not None else (_WIDTH * self.spread or 1.0)
        checks.positive(width=width)
        kernel = torch.exp(-((points[:, None, None] - self.nodes) / width).square() / 2) / (width * math.tau**0.5)
        values = (kernel * self.weights).sum(-1).T
        reach = self._reach(values, level)
        mean = values.mean(0)
        return _band(x, points, mean, (mean - reach).clamp_min(0), mean + reach)

    def moment(self, order: int) -> Estimate:
        """(1/n) tr B^order, exact for each probe below twice its number of steps.

        Args:
            order: the power of B, below twice the number of steps unless the quadrature found all eigenvalues that its
                probes meet.

        Returns:
            The mean over the probes, with its standard error: 0 for a single probe.
        """
        steps = self.nodes.shape[1]
        if self.quadrature and order >= 2 * steps and bool((self.residuals * self.weights).any()):
            raise RangeError(
                "order", f"got {order}, but {steps} Lanczos steps give moments below {2 * steps}; use more steps"
            )
        return self._mean((self.weights * self.nodes**order).sum(1))

    def moments(self, count: int) -> list[Estimate]:
        """The moments of order 1 to `count`.

        Args:
            count: the highest order, at least 1.

        Returns:
            One Estimate per order, as from `moment`.
        """
        checks.at_least(1, count=count)
        return [self.moment(order) for order in range(1, count + 1)]

    def error(self) -> float:
        """The standard error of the cumulative function, averaged over the spread."""
        if self.probes == 1 or not self.spread:
            return 0.0
        x = torch.linspace(*self.support, 257, dtype=torch.float64, device=self.nodes.device)
        total, index = self._cumulative(x)
        return float(total.gather(1, index).std(0).mean() / self.probes**0.5)

    def wasserstein(self, eigenvalues: Tensor) -> float:
        """The distance ∫ |F - G| dx to the density of known eigenvalues, with F and G the cumulative functions.

        Args:
            eigenvalues: (m,), in any order.

        Returns:
            The distance, in the units of the eigenvalues; both densities are normalised to mass one.
        """
        known = checks.floating("eigenvalues", eigenvalues).double().flatten().to(self.nodes.device)
        points = torch.cat([self.nodes.flatten(), known])
        masses = torch.cat([self.weights.flatten() / self.weights.sum(), torch.full_like(known, -1 / len(known))])
        order = points.argsort()
        difference = masses[order].cumsum(0)[:-1].abs()
        return float((difference * points[order].diff()).sum())

    def log_spectrum(self) -> "LogSpectrum":
        """The density of log10 |λ|, of positive and of negative eigenvalues.

        The mass of a Gauss node may belong to any eigenvalue between its two neighbours. So its sign and its decade are
        known only if the neighbour on the side of zero has its sign, or if the node itself is an eigenvalue, to a
        tenth. What is left is the part of the spectrum below the resolution of the quadrature: more steps resolve more.
        """
        nodes, size = self.nodes, self.nodes.abs()
        inf = torch.full_like(nodes[:, :1], math.inf)
        before, after = torch.cat([-inf, nodes[:, :-1]], 1), torch.cat([nodes[:, 1:], inf], 1)
        known = (self.residuals <= 0.1 * size) | (before * nodes.sign() > 0) & (after * nodes.sign() > 0)
        zero, held = (nodes == 0) & (self.residuals == 0), self.weights > 0
        positive, negative = known & (nodes > 0) & held, known & (nodes < 0) & held
        left = held & ~(zero | positive | negative)
        around = torch.stack([before, nodes, after]).abs()
        return LogSpectrum(
            self._side(positive),
            self._side(negative),
            self._share(zero),
            self._share(left),
            float(around[around.isfinite() & left].max()) if bool(left.any()) else 0.0,
        )

    def _side(self, chosen: Tensor) -> "Density":
        least = self.nodes[chosen].abs().min() if bool(chosen.any()) else self.nodes.new_ones(())
        nodes, order = torch.where(chosen, self.nodes.abs(), least).log10().sort(1)
        weights = (self.weights * chosen).gather(1, order)
        return Density(nodes, weights, torch.zeros_like(nodes), self.size, self.matvecs, self.method)

    def _share(self, chosen: Tensor) -> Estimate:
        return self._mean((self.weights * chosen).sum(1))

    def _mean(self, values: Tensor) -> Estimate:
        """The mean of (probes,)."""
        near, exponent = unit(values)
        stderr = float(near.std() / self.probes**0.5) if self.probes > 1 else 0.0
        found = Estimate(float(near.mean()), stderr, self.matvecs, self.method, self._degrees)
        return found.scaled(2.0**exponent).checked("moment")

    def _cumulative(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of masses (probes, m + 1), and which of them each point has below it (probes, points)."""
        total = torch.cat([self.weights.new_zeros(self.probes, 1), self.weights.cumsum(1)], 1)
        points = points.to(self.nodes.device).expand(self.probes, -1).contiguous()
        return total, torch.searchsorted(self.nodes.contiguous(), points, right=True)

    @property
    def _degrees(self) -> float:
        return self.probes - 1.0 if self.probes > 1 else math.inf

    def _reach(self, values: Tensor, level: float) -> Tensor:
        """Half the length of Student's interval for the mean of (probes, points) over the probes."""
        checks.probability("level", level)
        if self.probes == 1:
            return torch.zeros_like(values[0])
        return student(level, self.probes - 1.0) * values.std(0) / self.probes**0.5


@dataclass(frozen=True, eq=False)
class LogSpectrum:
    """Densities in log10 |λ|. Their masses, `zero` and `unresolved` add to one.

    Args:
        positive: the density of the positive eigenvalues.
        negative: that of the negative ones.
        zero: the share of eigenvalues that are zero to rounding.
        unresolved: the share too near zero for their sign and decade to be known.
        reach: what is unresolved lies between -reach and reach.

    Example:
        >>> import torch
        >>> from curvoscope import estimate
        >>> found = estimate.Density.exact(torch.tensor([-1.0, 0.0, 10.0, 100.0])).log_spectrum()
        >>> found.zero.value, found.positive.support
        (0.25, (1.0, 2.0))
    """

    positive: Density
    negative: Density
    zero: Estimate
    unresolved: Estimate
    reach: float


def gauss(nodes: Tensor, weights: Tensor, residuals: Tensor, size: int, matvecs: int, epsilon: float) -> Density:
    """A Density of Gauss nodes (probes, m), those that are zero to rounding set to zero; exact if they are all n."""
    rounding = _ZERO * size**0.5 * epsilon * float(nodes.abs().max())
    nodes = torch.where(nodes.abs() <= rounding, 0.0, nodes)
    residuals = torch.where(residuals <= rounding, 0.0, residuals)
    complete = nodes.shape == (1, size)
    return Density(nodes, weights, residuals, size, matvecs, "exact" if complete else "slq", quadrature=not complete)


def _points(x: Tensor) -> Tensor:
    return checks.floating("x", x).double().flatten()


def _band(x: Tensor, points: Tensor, value: Tensor, low: Tensor, high: Tensor) -> Band:
    return Band(*(part.reshape(x.shape) for part in (points, value, low, high)))
