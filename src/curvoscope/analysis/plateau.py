"""The norm of the gradient against the number of samples, and a test of whether the weights are stationary."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import scipy
import torch
from torch import Tensor, nn

from curvoscope.analysis.surface import Surface
from curvoscope.autodiff.batches import Batch
from curvoscope.blocks import Blocks
from curvoscope.errors import EmptyError
from curvoscope.losses.objectives import LossFunction

LEVEL = 0.05
"""The chance to call stationary weights moving."""
_GROUPS = 32  # fewer than twice as many if they do not divide the batches: their gradients are kept
_ORDERS = 32


@dataclass(frozen=True, eq=False)
class GradientPlateau:
    """|∇L_k| at fixed weights for growing numbers k of samples, and a test of whether the gradient is zero.

        E|∇L_k|² = |ḡ|² + tr Σ (1/k - 1/N)

    with ḡ the gradient over all N samples and Σ the covariance of the samples' gradients: the norm falls to a plateau
    |ḡ|, not to zero, unless the weights are stationary. Dempster's test decides: for stationary weights N|ḡ|²/tr Σ is
    about F(ν, ν(m - 1)), ν = (tr Σ)²/tr Σ². Not rejected means that noise explains the gradient on these data.

    Args:
        counts: the numbers of samples k, (n,).
        norms: |∇L_k|, (n,).
        law: the square root of the formula above, (n,).
        full_norm: |ḡ|.
        noise_norm: sqrt(tr Σ/N), the expected |ḡ| of stationary weights.
        squared_norm: |ḡ|² - tr Σ/N, the unbiased estimate of the squared gradient over all data that there could be;
            below zero if the weights were fitted to these samples.
        trace: tr Σ.
        degrees: ν.
        p_value: the chance of a ratio N|ḡ|²/tr Σ as large, for stationary weights.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> X = torch.randn(60, 2)
        >>> found = cv.analysis.gradient_plateau(model, torch.nn.MSELoss(), [(X, X.sum(1, keepdim=True) * 9)])
        >>> found.is_stationary, found.full_norm > found.noise_norm
        (False, True)
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
        """Whether noise explains the gradient, at the level of 5 %."""
        return self.p_value >= LEVEL


def gradient_plateau(
    model: nn.Module,
    loss_fn: LossFunction | None,
    batches: Iterable[Any],
    *,
    blocks: Blocks | None = None,
    device: torch.device | str | None = None,
) -> GradientPlateau:
    """The gradient's norm as samples are added at the model's weights, and whether these are stationary.

    Args:
        model, loss_fn, batches, blocks, device: as in `hessian`; a sample is a row of a batch.

    Returns:
        The curve with its law, and the result of the test.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> X, noise = torch.randn(60, 2), torch.randn(60, 1)
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)  # the best weights for targets that are noise
        >>> cv.analysis.gradient_plateau(model, torch.nn.MSELoss(), [(X, noise)]).is_stationary
        True
    """
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
    p_value = float(scipy.special.fdtrc(degrees, degrees * (count - 1), ratio))
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
