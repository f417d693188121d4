"""How many samples are enough: adding more changes the loss, at the weights or nearby, by less than a tolerance."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from curvoscope import checks
from curvoscope.analysis.convergence import displacements
from curvoscope.analysis.samples import Samples, sample_losses
from curvoscope.analysis.surface import Surface
from curvoscope.blocks import Blocks
from curvoscope.errors import RangeError
from curvoscope.losses.objectives import LossFunction
from curvoscope.settings import chosen_seed

_AT_ONCE = 50  # bootstrap samples


@dataclass(frozen=True)
class DataSufficiency:
    """k*(ε), the number of samples from which on b more change the mean loss by less than ε (root mean square).

    The condition is sqrt(V b/(k(k+b))) ≤ ε, V the variance of the samples' losses; for k ≫ b, k* = sqrt(V b)/ε.

    Args:
        tolerance: ε.
        batch: b.
        distance: τ.
        variance, variance_interval: V and its interval.
        samples, interval: k* and its interval.
        settled, settled_interval: the answer to the stronger question: from so many samples on, L_k is within ε of its
            limit, sqrt(V/k) ≤ ε.
        available: the number of samples at hand.
        level: the level of the intervals.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> data = [(torch.tensor([[0.0], [0.0]]), torch.tensor([[0.0], [2.0]]))]
        >>> found = cv.analysis.data_sufficiency(model, torch.nn.MSELoss(), data, tolerance=0.5)
        >>> found.variance, found.samples, found.settled, found.is_enough  # losses 0 and 4
        (8.0, 6, 32, False)
    """

    tolerance: float
    batch: int
    distance: float
    variance: float
    variance_interval: tuple[float, float]
    samples: int
    interval: tuple[int, int]
    settled: int
    settled_interval: tuple[int, int]
    available: int
    level: float

    @property
    def is_enough(self) -> bool:
        """Whether there are at least as many samples as the upper end of the interval of k*."""
        return self.available >= self.interval[1]


def data_sufficiency(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    tolerance: float,
    batch: int = 1,
    distance: float = 0.0,
    *,
    draws: int = 4,
    level: float = 0.95,
    resamples: int = 1000,
    blocks: Blocks | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
) -> DataSufficiency:
    """The number of samples after which the loss moves by less than `tolerance`.

    Args:
        model, loss_fn, batches, blocks, device: as in `hessian`; a sample is a row of a batch.
        tolerance: ε, in units of the loss.
        batch: b, the samples added at a time.
        distance: τ: the loss is taken at w + τξ, ξ ~ N(0, I). 0: at the weights.
        draws: pairs ±ξ if the distance is above 0.
        level: of the interval.
        resamples: bootstrap samples for the interval.
        seed: for ξ and the bootstrap.

    Returns:
        k* with its interval, and whether the samples at hand are enough.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> data = [(torch.randn(40, 2), torch.randn(40, 1))]
        >>> found = cv.analysis.data_sufficiency(torch.nn.Linear(2, 1), torch.nn.MSELoss(), data, tolerance=10.0)
        >>> found.is_enough, found.available
        (True, 40)
    """
    checks.positive("a positive change of the loss", tolerance=tolerance)
    if not 0 <= distance < math.inf:
        raise RangeError("distance", f"got {distance}, expected 0 or more")
    checks.probability("level", level)
    checks.at_least(1, batch=batch, draws=draws)
    checks.at_least(100, resamples=resamples)
    surface = Surface(model, loss_fn, batches, blocks, device)
    generator = torch.Generator().manual_seed(chosen_seed(seed))
    found = sample_losses(surface, displacements(surface, distance, draws, generator), "distance")
    variance = float(found.variances.mean())
    low, high = _interval(found, level, resamples, generator)
    ends = [_count(v, batch, tolerance) for v in (variance, low, high)]
    settled = [max(1, math.ceil(v / tolerance**2)) for v in (variance, low, high)]
    return DataSufficiency(
        tolerance,
        batch,
        distance,
        variance,
        (low, high),
        ends[0],
        (ends[1], ends[2]),
        settled[0],
        (settled[1], settled[2]),
        found.losses.shape[1],
        level,
    )


def _count(variance: float, batch: int, tolerance: float) -> int:
    """The smallest k ≥ 1 with V b/(k(k+b)) ≤ ε²."""
    wanted = variance * batch / tolerance**2
    return max(1, math.ceil((math.sqrt(batch**2 + 4 * wanted) - batch) / 2))


def _interval(found: Samples, level: float, resamples: int, generator: torch.Generator) -> tuple[float, float]:
    """Quantiles of the variance over samples redrawn with replacement, the same ones at all displacements."""
    count = found.losses.shape[1]
    values = []
    for done in range(0, resamples, _AT_ONCE):
        chosen = torch.randint(0, count, (min(_AT_ONCE, resamples - done), count), generator=generator)
        losses, terms = found.losses[:, chosen], found.terms[chosen]  # (D, R, N), (R, N)
        means = (losses * terms).sum(-1) / terms.sum(-1)
        deviations = terms / terms.mean(-1, keepdim=True) * (losses - means[..., None])
        values.append(deviations.square().sum(-1).mean(0) / (count - 1))
    tail = (1 - level) / 2
    ends = torch.quantile(torch.cat(values), torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return float(ends[0]), float(ends[1])
