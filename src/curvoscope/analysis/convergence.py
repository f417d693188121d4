"""Changes of the mean loss when samples are added: L_{k+b} - L_k as the data grows, and what explains it.

For any losses, at any weights, L_{k+b} - L_k = b/(k+b) (mean of the b new losses - L_k). The rate 1/k follows from this
arithmetic alone: random numbers show it too, and every curve is compared with them. The model adds only the constant,
the spread of its samples' losses, and how this spread grows with the distance from the weights.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope import checks
from curvoscope.analysis.fitting import Slope, log_slope
from curvoscope.analysis.plateau import GradientPlateau, plateau_of
from curvoscope.analysis.samples import Samples, VarianceLaw, sample_losses, variance_law
from curvoscope.analysis.surface import Surface
from curvoscope.blocks import Blocks
from curvoscope.errors import EmptyError, RangeError
from curvoscope.losses.objectives import LossFunction
from curvoscope.settings import chosen_seed

_POINTS = 24  # numbers of samples k on a curve
_DRAWS = 4  # antithetic pairs of displacements


@dataclass(frozen=True, eq=False)
class ConvergenceCurve:
    """|L_{k+b} - L_k| against k at the weights (`distance` 0) or at w + τξ, ξ ~ N(0, I), for `distance` τ.

    All tensors are (n,): means over random orders of the samples, and over displacements. `law` is the expected size
    without free constant, E|L_{k+b} - L_k| = sqrt(2/π) s sqrt(b/(k(k+b))), with s² the variance of the losses measured
    there (for b = 1, their mean absolute deviation replaces sqrt(2/π) s; for b < 50 the normal law is rough). Its
    square, E(L_{k+b} - L_k)² = s² b/(k(k+b)), is exact over random orders.

    Args:
        distance: τ.
        counts: the numbers of samples k.
        mean, rms: mean and root mean square of the measured changes.
        law, law_rms: the law for the mean, and the exact one for the root mean square.
        second_order_rms: `law_rms` with the V(τ) of `VarianceLaw` for s², from derivatives at the weights alone.
        null: `mean` for normal random numbers of the same mean and deviation.
        bound: what every order obeys; None if its hypotheses are not known to hold.
        variance: s², the mean over displacements.
        slope, null_slope: the exponents of `mean` and `null` in k, with their intervals.
        identity_error: the error of the averaging identity, relative to the largest loss.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> data = [(torch.randn(40, 2), torch.randn(40, 1))]
        >>> curve = cv.analysis.convergence(torch.nn.Linear(2, 1), torch.nn.MSELoss(), data).curves[0]
        >>> curve.distance, tuple(curve.mean.shape) == tuple(curve.counts.shape), bool(0.8 < curve.ratio < 1.2)
        (0.0, True, True)
    """

    distance: float
    counts: Tensor
    mean: Tensor
    rms: Tensor
    law: Tensor
    law_rms: Tensor
    second_order_rms: Tensor
    null: Tensor
    bound: Tensor | None
    variance: float  # s², the mean over displacements
    slope: Slope
    null_slope: Slope
    identity_error: float  # the averaging identity, relative to the largest loss

    @property
    def ratio(self) -> float:
        """The mean over k of the measured change divided by the law: 1 if the law holds."""
        return float((self.mean / self.law).mean())

    @property
    def second_order_ratio(self) -> float:
        """The measured s² divided by V(τ): far from 1, the losses are no longer quadratic at this distance."""
        return float((self.law_rms / self.second_order_rms).square().mean())


@dataclass(frozen=True, eq=False)
class Convergence:
    """The result of `convergence`: curves, the second-order law behind them, and whether the weights are stationary.

    Args:
        batch: b, the samples added at a time.
        samples: N, the number of samples.
        curves: one per distance, in ascending order.
        variance: the variance of the losses as a function of the distance, to second order.
        plateau: the norm of the gradient against the number of samples.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> data = [(torch.randn(40, 2), torch.randn(40, 1))]
        >>> found = cv.analysis.convergence(torch.nn.Linear(2, 1), torch.nn.MSELoss(), data, distances=(0, 0.1))
        >>> found.samples, [curve.distance for curve in found.curves]
        (40, [0.0, 0.1])
    """

    batch: int
    samples: int
    curves: tuple[ConvergenceCurve, ...]
    variance: VarianceLaw
    plateau: GradientPlateau


def convergence(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    batch: int = 1,
    distances: Iterable[float] = (0.0,),
    *,
    orders: int = 64,
    draws: int = _DRAWS,
    probes: int = 16,
    smoothness: float | None = None,
    blocks: Blocks | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> Convergence:
    """Measure how the mean loss changes with the number of samples, and compare with its laws and with random numbers.

    Args:
        model, loss_fn, batches, blocks, device: as in `hessian`; a sample is a row of a batch.
        batch: b, the samples added at a time.
        distances: τ of displacements τξ, ξ ~ N(0, I), of length τ sqrt(P). 0 stands for the weights themselves.
        orders: random orders of the samples over which changes are averaged.
        draws: pairs ±ξ for each distance above 0.
        probes: products with each sample's Hessian for the second-order law.
        smoothness: M, if every sample's loss is known to be M-smooth in the weights everywhere (largest eigenvalue of
            its Hessian at *any* weights, not at these): then the bound (2B + M|δ|²) b/(k+b) is given at a distance.
        seed: for orders, displacements, probes and random numbers.

    Returns:
        One curve per distance, the variance law and the test of the gradient.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> data = [(torch.randn(40, 2), torch.randn(40, 1))]
        >>> found = cv.analysis.convergence(torch.nn.Linear(2, 1), torch.nn.MSELoss(), data, batch=1)
        >>> -1.2 < found.curves[0].slope.value < -0.7, found.curves[0].identity_error < 1e-12
        (True, True)
    """
    taus = sorted({float(tau) for tau in distances})
    if not taus or taus[0] < 0 or not math.isfinite(taus[-1]):
        raise RangeError("distances", f"got {taus}, expected distances of 0 or more")
    checks.at_least(1, batch=batch, orders=orders, draws=draws)
    checks.positive(smoothness=smoothness)
    surface = Surface(model, loss_fn, batches, blocks, device)
    generator = torch.Generator().manual_seed(chosen_seed(seed))
    here = sample_losses(surface, torch.zeros(1, surface.size, dtype=torch.float64))
    total = here.losses.shape[1]
    counts = _counts(total, batch)
    law = variance_law(surface, probes, seed)
    curves = []
    for tau in taus:
        moves = displacements(surface, tau, draws, generator)
        there = here if tau == 0 else sample_losses(surface, moves)
        bound = _bound(here, moves, counts, batch, smoothness)
        curves.append(_curve(there, tau, counts, batch, orders, law(tau), bound, generator))
    return Convergence(batch, total, tuple(curves), law, plateau_of(surface))


def displacements(surface: Surface, tau: float, draws: int, generator: torch.Generator) -> Tensor:
    """±τξ, (2 draws, P); for τ = 0 the weights themselves, (1, P)."""
    if tau == 0:
        return torch.zeros(1, surface.size, dtype=torch.float64)
    xi = tau * torch.randn(draws, surface.size, generator=generator, dtype=torch.float64)
    return torch.cat([xi, -xi])


def _counts(total: int, batch: int) -> Tensor:
    """Numbers of samples k, multiples of b with k + b ≤ N, evenly spread in the logarithm."""
    most = total // batch - 1
    if most < 3:
        raise EmptyError("batches", f"{total} samples; batches of {batch} need at least {4 * batch} for a curve")
    return batch * torch.logspace(0, math.log10(most), _POINTS, dtype=torch.float64).round().long().unique()


def _curve(
    there: Samples,
    tau: float,
    counts: Tensor,
    batch: int,
    orders: int,
    second_order: float,
    bound: Tensor | None,
    generator: torch.Generator,
) -> ConvergenceCurve:
    variance = float(there.variances.mean())
    if variance <= 0:
        raise RangeError("batches", "all samples have the same loss: the mean loss never changes")
    changes, error = _changes(there, counts, batch, orders, generator)
    noise = torch.randn(there.losses.shape, generator=generator, dtype=torch.float64)
    null = Samples(there.means[:, None] + there.variances.sqrt()[:, None] * noise, there.terms)
    nulls, _ = _changes(null, counts, batch, orders, generator)
    size = (batch / (counts * (counts + batch)).double()).sqrt()
    absolute = math.sqrt(2 / math.pi) * float(there.variances.sqrt().mean())
    if batch == 1:
        absolute = float(there.deviations.abs().mean())
    mean, null_mean = changes.abs().mean(0), nulls.abs().mean(0)
    return ConvergenceCurve(
        tau,
        counts,
        mean,
        changes.square().mean(0).sqrt(),
        absolute * size,
        math.sqrt(variance) * size,
        math.sqrt(max(second_order, 0.0)) * size,
        null_mean,
        bound,
        variance,
        log_slope(counts.double(), mean),
        log_slope(counts.double(), null_mean),
        error,
    )


def _changes(
    samples: Samples, counts: Tensor, batch: int, orders: int, generator: torch.Generator
) -> tuple[Tensor, float]:
    """L_{k+b} - L_k for all points and orders, (D orders, n), and the largest error of the averaging identity."""
    found, worst = [], 0.0
    before, after = counts - 1, counts + batch - 1
    for losses in samples.losses:
        order = torch.rand(orders, len(losses), generator=generator, dtype=torch.float64).argsort(1)
        terms = samples.terms[order].cumsum(1)
        sums = (samples.terms * losses)[order].cumsum(1)
        mean = sums[:, before] / terms[:, before]
        change = sums[:, after] / terms[:, after] - mean
        added = terms[:, after] - terms[:, before]
        identity = added / terms[:, after] * ((sums[:, after] - sums[:, before]) / added - mean)
        worst = max(worst, float((change - identity).abs().max() / losses.abs().max()))
        found.append(change)
    return torch.cat(found), worst


def _bound(here: Samples, moves: Tensor, counts: Tensor, batch: int, smoothness: float | None) -> Tensor | None:
    """b/(k+b) B at the weights, b/(k+b) (2B + M|δ|²) away from them, the mean over displacements.

    Needs losses that are not negative and, away from the weights, M-smooth everywhere: ℓ_i(w + δ) ≤ 2 ℓ_i(w) + M|δ|²,
    so that both numbers of the difference lie between 0 and that. Uses neither stationarity nor a Hessian.
    """
    if float(here.losses.min()) < 0:
        return None
    most = float(here.losses.max())
    distance = float(moves.square().sum(1).mean())
    if distance and smoothness is None:
        return None
    reach = most if not distance else 2 * most + (smoothness or 0.0) * distance
    least, largest = float(here.terms.min()), float(here.terms.max())
    # the share of b samples among k + b by terms, at most
    share = batch * largest / (batch * largest + counts.double() * least)
    return share * reach
