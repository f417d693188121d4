"""How much the mean loss moves when samples are added: L_{k+b} - L_k as the data grows, and what explains it.

For any losses, at any weights, L_{k+b} - L_k = b/(k+b) (mean of the b new losses - L_k). The rate 1/k is this
arithmetic and nothing else: numbers drawn at random show it too, and stand beside every curve. What a model adds is the
constant, the spread of the losses of its samples, and how it grows with the distance from the weights.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.analysis.fitting import Slope, log_slope
from curvoscope.analysis.plateau import GradientPlateau, plateau_of
from curvoscope.analysis.samples import Samples, VarianceLaw, sample_losses, variance_law
from curvoscope.analysis.surface import Surface
from curvoscope.blocks import Blocks
from curvoscope.errors import EmptyError, RangeError
from curvoscope.losses.objectives import LossFunction

_POINTS = 24  # numbers of samples k on a curve
_DRAWS = 4  # antithetic pairs of displacements


@dataclass(frozen=True, eq=False)
class ConvergenceCurve:
    """|L_{k+b} - L_k| against k at the weights (`distance` 0) or at w + τξ, ξ ~ N(0, I), for `distance` τ.

    All tensors are (n,): means over random orders of the samples, and over displacements. `law` is the expected size
    without free constant, E|L_{k+b} - L_k| = sqrt(2/π) s sqrt(b/(k(k+b))), s² the variance of the losses measured there
    (for b = 1 their mean absolute deviation in place of sqrt(2/π) s; for b < 50 the normal law is rough). Its square,
    E(L_{k+b} - L_k)² = s² b/(k(k+b)), is exact over random orders: `law_rms`. `second_order_rms` has the V(τ) of
    `VarianceLaw` for s², from derivatives at the weights alone. `null` is `mean` for normal random numbers of the same
    mean and deviation. `bound` is what every order obeys, None where its hypotheses are not known to hold.
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
        """The mean over k of the measured change over the law: 1 where the law holds."""
        return float((self.mean / self.law).mean())

    @property
    def second_order_ratio(self) -> float:
        """The measured s² over V(τ): far from 1, the losses are no longer quadratic at this distance."""
        return float((self.law_rms / self.second_order_rms).square().mean())


@dataclass(frozen=True, eq=False)
class Convergence:
    """Curves at several distances, the second-order law behind them, and whether the weights are stationary."""

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
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Convergence:
    """The convergence study: changes of the mean loss with the number of samples, beside their laws and a null line.

    Args:
        model, loss_fn, batches, blocks, device: as in `hessian`; a sample is a row of a batch.
        batch: b, the samples added at a time.
        distances: τ of displacements τξ, ξ ~ N(0, I): of length τ sqrt(P). 0 is the weights themselves.
        orders: random orders of the samples over which changes are averaged.
        draws: pairs ±ξ for each distance above 0.
        probes: products with each sample's Hessian for the second-order law.
        smoothness: M, if every sample's loss is known to be M-smooth in the weights everywhere (largest eigenvalue of
            its Hessian at *any* weights, not at these): then the bound (2B + M|δ|²) b/(k+b) is given at a distance.
        seed: of orders, displacements, probes and random numbers.
    """
    taus = sorted({float(tau) for tau in distances})
    if not taus or taus[0] < 0 or not math.isfinite(taus[-1]):
        raise RangeError("distances", f"got {taus}, expected distances of 0 or more")
    for name, value in (("batch", batch), ("orders", orders), ("draws", draws)):
        if value < 1:
            raise RangeError(name, f"got {value}, expected at least 1")
    if smoothness is not None and not 0 < smoothness < math.inf:
        raise RangeError("smoothness", f"got {smoothness}, expected a positive number")
    surface = Surface(model, loss_fn, batches, blocks, device)
    generator = torch.Generator().manual_seed(seed)
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
    """±τξ, (2 draws, P); the point itself, (1, P), for τ = 0."""
    if tau == 0:
        return torch.zeros(1, surface.size, dtype=torch.float64)
    xi = tau * torch.randn(draws, surface.size, generator=generator, dtype=torch.float64)
    return torch.cat([xi, -xi])


def _counts(total: int, batch: int) -> Tensor:
    """Numbers of samples k, multiples of b, evenly spread in the logarithm, so that k + b ≤ N."""
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

    Needs losses that are not negative, and M-smooth everywhere if away: ℓ_i(w + δ) ≤ 2 ℓ_i(w) + M|δ|², so that both
    numbers of the difference lie between 0 and that. Neither stationarity nor a Hessian at the weights comes in.
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
