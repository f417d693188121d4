"""Are the weights stationary? The norm of the gradient against the number of samples, and a test of its limit."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from scipy import special
from torch import Tensor, nn

from curvoscope.analysis.surface import Surface
from curvoscope.autodiff.batches import Batch
from curvoscope.blocks import Blocks
from curvoscope.errors import EmptyError
from curvoscope.losses.objectives import LossFunction

LEVEL = 0.05
"""The chance to call stationary weights moving."""
_GROUPS = 32  # fewer than twice as many where they do not divide the batches: their gradients are kept
_ORDERS = 32


@dataclass(frozen=True, eq=False)
class GradientPlateau:
    """|∇L_k| at fixed weights, `norms` (n,) for k = `counts` (n,) samples, against `law` (n,):

        E|∇L_k|² = |ḡ|² + tr Σ (1/k - 1/N)

    with ḡ the gradient over all N samples and Σ the covariance of the samples' gradients: the norm falls to a plateau
    |ḡ|, not to zero, unless the weights are stationary. `squared_norm` is the unbiased estimate |ḡ|² - tr Σ/N of the
    squared gradient over all data that there could be, below zero where the weights were fitted to these samples.

    Dempster's test decides: for stationary weights N|ḡ|²/tr Σ is about F(ν, ν(m - 1)), ν = (tr Σ)²/tr Σ²; `p_value` is
    the chance of a ratio as large. Not rejected means that the gradient does not stand out of its noise on these data.
    """

    counts: Tensor
    norms: Tensor
    law: Tensor
    full_norm: float
    noise_norm: float  # sqrt(tr Σ/N): what |ḡ| would be for stationary weights
    squared_norm: float
    trace: float  # tr Σ
    degrees: float  # ν
    p_value: float

    @property
    def is_stationary(self) -> bool:
        """Whether the gradient is no larger than its noise explains, at the level of 5 %."""
        return self.p_value >= LEVEL


def gradient_plateau(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    *,
    blocks: Blocks | None = None,
    device: torch.device | str | None = None,
) -> GradientPlateau:
    """The gradient's norm as samples are added at the weights that the model has, and whether they are stationary."""
    return plateau_of(Surface(model, loss_fn, batches, blocks, device))


def plateau_of(surface: Surface) -> GradientPlateau:
    """The same for a surface: samples in about 32 groups, whose mean gradients are kept in float64."""
    return plateau_from(*_groups(surface))


def plateau_from(gradients: Tensor, terms: Tensor, samples: int) -> GradientPlateau:
    """The same from the mean gradients (m, P) of m groups of samples with their terms (m,)."""
    count = len(gradients)
    if count < 3:
        raise EmptyError("batches", f"{count} samples; the test of the gradient needs at least 3")
    shares = terms / terms.mean()
    full = shares @ gradients / count
    deviations = shares[:, None] * (gradients - full)
    gram = deviations @ deviations.T
    trace = float(gram.trace()) / (count - 1)
    squared = float(full @ full)
    degrees = _degrees(trace, float(gram.square().sum()) / (count - 1) ** 2, count)
    ratio = count * squared / trace if trace else float("inf") if squared else 0.0
    p_value = float(special.fdtrc(degrees, degrees * (count - 1), ratio))
    size = samples / count
    steps = torch.arange(1, count + 1)
    norms = torch.stack([_norms(gradients, shares, seed) for seed in range(_ORDERS)]).square().mean(0).sqrt()
    law = (squared + trace * (1 / steps.double() - 1 / count)).sqrt()
    return GradientPlateau(
        (steps * size).round().long(),
        norms,
        law,
        squared**0.5,
        (trace / count) ** 0.5,
        squared - trace / count,
        trace * size,
        degrees,
        p_value,
    )


def _degrees(trace: float, square: float, count: int) -> float:
    """ν = (tr Σ)²/tr Σ² from tr S and tr S² of m groups, both squares without their bias; 1 for rank one."""
    if not trace:
        return 1.0
    factor = (count - 1) ** 2 / ((count - 2) * (count + 1))
    unbiased = factor * (square - trace**2 / (count - 1))
    if unbiased <= 0:  # more directions than groups can tell
        return float(count - 1)
    return max(1.0, (trace**2 - 2 * unbiased / (count - 1)) / unbiased)


def _norms(gradients: Tensor, shares: Tensor, seed: int) -> Tensor:
    """|∇L_k| along one random order of the groups, (m,)."""
    order = torch.randperm(len(gradients), generator=torch.Generator().manual_seed(seed))
    sums = (shares[order, None] * gradients[order]).cumsum(0)
    return (sums / shares[order].cumsum(0)[:, None]).norm(dim=1)


def _groups(surface: Surface) -> tuple[Tensor, Tensor, int]:
    """Mean gradients (m, P) of groups of consecutive samples, their terms (m,), and the number of samples."""
    rows, objective = 0, surface.objective_of_rows()

    def count(weight: float, batch: Batch) -> None:
        nonlocal rows
        rows += batch.rows

    surface.engine.walk(count)
    size = -(-rows // _GROUPS)
    gradients: list[Tensor] = []
    terms: list[float] = []
    room = 0  # rows that the last group may still take

    def add(weight: float, batch: Batch) -> None:
        nonlocal room, rows
        for part in batch.split(size):
            with torch.no_grad():
                outputs = surface.engine.snapshot(surface.engine.snapshot.weights, part)
            number = float(objective.terms(outputs, part.targets))
            if not number:
                rows -= part.rows
                continue
            if room < part.rows:
                gradients.append(torch.zeros_like(surface.weights))
                terms.append(0.0)
                room = size
            gradients[-1].add_(surface.batch_gradient(part), alpha=number)
            terms[-1] += number
            room -= part.rows

    surface.engine.walk(add)
    found = torch.tensor(terms, dtype=torch.float64, device=surface.engine.device)
    return torch.stack(gradients) / found[:, None], found, rows
