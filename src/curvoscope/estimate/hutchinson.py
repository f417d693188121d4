"""Hutchinson's estimators: E[z^T B z] = tr B and E|B z|^2 = |B|_F^2 for random signs z."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from curvoscope.errors import RangeError

_DEFAULT_MATVECS = 64
_MOST_MATVECS = 100_000
_COLUMNS = 8  # vectors a product


@dataclass(frozen=True)
class Estimate:
    """A number that was estimated: its value, standard error, cost in matrix-vector products, and method."""

    value: float
    stderr: float
    matvecs: int
    method: str

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.stderr:.1g}"


@runtime_checkable
class Matrix(Protocol):
    """All that an estimator knows of an operator."""

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def __matmul__(self, other: Tensor) -> Tensor: ...


def trace(operator: Matrix, *, matvecs: int | None = None, tolerance: float | None = None, seed: int = 0) -> Estimate:
    """Hutchinson's estimate of the trace; the standard error is that of the mean over probes."""
    mean, stderr, used = _mean_over_probes(operator, lambda z, product: (z * product).sum(0), matvecs, tolerance, seed)
    return Estimate(mean, stderr, used, "hutchinson")


def frobenius_norm(
    operator: Matrix, *, matvecs: int | None = None, tolerance: float | None = None, seed: int = 0
) -> Estimate:
    """The root of the mean of |B z|^2; the standard error by the delta method, |B|_F = sqrt(m): se(m) / (2 sqrt(m))."""
    relative = None if tolerance is None else 2 * tolerance  # of the square, for `tolerance` of its root
    mean, stderr, used = _mean_over_probes(
        operator, lambda _, product: product.square().sum(0), matvecs, relative, seed
    )
    root = max(mean, 0.0) ** 0.5
    return Estimate(root, stderr / (2 * root) if root else 0.0, used, "hutchinson")


def _mean_over_probes(
    operator: Matrix,
    sample: Callable[[Tensor, Tensor], Tensor],
    matvecs: int | None,
    tolerance: float | None,
    seed: int,
) -> tuple[float, float, int]:
    """Mean, its standard error and the matvecs used, until the budget is spent or the relative error is met."""
    if matvecs is not None and matvecs < 2:
        raise RangeError("matvecs", f"got {matvecs}, expected at least 2 for a standard error")
    if tolerance is not None and not 0 < tolerance < 1:
        raise RangeError("tolerance", f"got {tolerance}, expected a relative error between 0 and 1")
    budget = matvecs or (_DEFAULT_MATVECS if tolerance is None else _MOST_MATVECS)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    samples: list[float] = []
    while len(samples) < budget:
        n = min(_COLUMNS, budget - len(samples))
        signs = torch.randint(0, 2, (operator.shape[1], n), generator=generator).mul_(2).sub_(1)
        z = signs.to(operator.dtype).to(operator.device)
        samples += sample(z, operator @ z).double().tolist()
        if tolerance is not None and len(samples) >= 2 * _COLUMNS:
            values = torch.tensor(samples, dtype=torch.float64)
            if _stderr(values) <= tolerance * abs(float(values.mean())):
                break
    values = torch.tensor(samples, dtype=torch.float64)
    return float(values.mean()), _stderr(values), len(samples)


def _stderr(values: Tensor) -> float:
    return float(values.std() / len(values) ** 0.5)
