"""How many samples are enough: until adding some moves the loss, here or around here, less than a tolerance."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from curvoscope.analysis.convergence import displacements
from curvoscope.analysis.samples import Samples, sample_losses
from curvoscope.analysis.surface import Surface
from curvoscope.blocks import Blocks
from curvoscope.errors import RangeError
from curvoscope.losses.objectives import LossFunction

_AT_ONCE = 50  # bootstrap samples


@dataclass(frozen=True)
class DataSufficiency:
    """k*(ε), with the ends of its interval: from k* samples on, b more change the mean loss by less than ε (root mean
    square), sqrt(V b/(k(k+b))) ≤ ε; for k ≫ b this is k* = sqrt(V b)/ε. V is the variance of the losses of samples.

    `settled` is the stronger question: from so many samples on L_k is within ε of its limit, sqrt(V/k) ≤ ε.
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
        """Whether the samples at hand are as many as the upper end of the interval of k*."""
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
    seed: int = 0,
    device: torch.device | str | None = None,
) -> DataSufficiency:
    """How many samples until the landscape moves less than `tolerance`.

    Args:
        model, loss_fn, batches, blocks, device: as in `hessian`; a sample is a row of a batch.
        tolerance: ε, in units of the loss.
        batch: b, the samples that are added at a time.
        distance: τ: the loss is looked at w + τξ, ξ ~ N(0, I), over `draws` pairs ±ξ. 0: at the weights.
        level: of the interval, from `resamples` bootstrap samples of the samples.
        seed: of ξ and of the bootstrap.
    """
    if not 0 < tolerance < math.inf:
        raise RangeError("tolerance", f"got {tolerance}, expected a positive change of the loss")
    if not 0 <= distance < math.inf:
        raise RangeError("distance", f"got {distance}, expected 0 or more")
    if not 0 < level < 1:
        raise RangeError("level", f"got {level}, expected a probability between 0 and 1")
    for name, value, least in (("batch", batch, 1), ("draws", draws, 1), ("resamples", resamples, 100)):
        if value < least:
            raise RangeError(name, f"got {value}, expected at least {least}")
    surface = Surface(model, loss_fn, batches, blocks, device)
    generator = torch.Generator().manual_seed(seed)
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
    """Quantiles of the variance over samples drawn again with replacement, the same ones at all displacements."""
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
