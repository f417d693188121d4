"""Curvature against the size of a model or of its data: measurements of a family, and power laws fitted to them."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from curvoscope import checks
from curvoscope.analysis.power_law import LARGEST_FACTOR, PowerLaw, Prediction, power_law
from curvoscope.blocks import Blocks
from curvoscope.curvature import ModelHessian, hessian
from curvoscope.errors import CurvoscopeError, EmptyError, RangeError
from curvoscope.estimate import Estimate, frobenius_norm, lanczos, trace
from curvoscope.losses.objectives import LossFunction

_TOLERANCE = 1e-6  # of an eigenvalue, relative
_MOST_WEIGHTS = 400  # up to which the condition is computed

ModelAtScale = tuple[nn.Module, LossFunction | None, Iterable[Any]]
Builder = Callable[[Any, int], ModelAtScale]


@dataclass(frozen=True)
class CurvatureSummary:
    """A Hessian H of P weights in five numbers.

    Args:
        largest_eigenvalue: λ_max.
        trace: tr H.
        condition: |H|_2 |H⁺|_2, the largest divided by the smallest |eigenvalue| that is not zero to rounding. It needs
            all eigenvalues, so it is None if P is above 400.
        effective_rank: the stable rank |H|_F²/|H|_2², between 1 and the rank.
        functional_share: |H_f|_F²/(|H_o|_F² + |H_f|_F²), 0 for a pure Gauss-Newton matrix.

    Example:
        >>> import torch, curvoscope as cv
        >>> data = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), torch.ones(2, 1).double())]
        >>> H = cv.hessian(torch.nn.Linear(2, 1, bias=False).double(), torch.nn.MSELoss(), data)  # diag(4, 1)
        >>> found = cv.analysis.summary(H)
        >>> [round(found.value(name), 4) for name in ("largest_eigenvalue", "trace", "condition", "effective_rank")]
        [4.0, 5.0, 4.0, 1.0625]
    """

    largest_eigenvalue: Estimate
    trace: Estimate
    condition: float | None
    effective_rank: Estimate
    functional_share: Estimate

    def value(self, quantity: str) -> float | None:
        """A number by its name, without error bar.

        Args:
            quantity: the name of a field, such as "trace".

        Returns:
            The number; None if it was not computed.
        """
        found: Estimate | float | None = getattr(self, quantity)
        return None if found is None else float(found)


QUANTITIES = tuple(field.name for field in fields(CurvatureSummary))


def summary(H: ModelHessian, matvecs: int = 100, seed: int | None = None) -> CurvatureSummary:
    """The five numbers of a `CurvatureSummary`.

    Args:
        H: from `cv.hessian`.
        matvecs: products for each norm and for the trace; they are exact if H has no more columns.
        seed: for the estimates.

    Returns:
        Largest eigenvalue, trace, condition, effective rank and functional share.

    Example:
        >>> import torch, curvoscope as cv
        >>> data = [(torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), torch.ones(2, 1).double())]
        >>> H = cv.hessian(torch.nn.Linear(2, 1, bias=False).double(), torch.nn.MSELoss(), data)
        >>> found = cv.analysis.summary(H)
        >>> round(float(found.trace), 6), float(found.functional_share)  # a linear model has no functional part
        (5.0, 0.0)
    """
    top, largest = (lanczos(H.total, 1, which, tolerance=_TOLERANCE, seed=seed)[0] for which in ("LA", "LM"))
    norms = [frobenius_norm(part, matvecs=matvecs, seed=seed) for part in (H.total, H.outer, H.functional)]
    rank = effective_rank(norms[0], largest)
    if rank is None:
        raise RangeError("H", "is zero: it has no rank")
    return CurvatureSummary(
        top,
        trace(H.total, matvecs=matvecs, seed=seed),
        condition(H),
        rank,
        _share(norms[1], norms[2]),
    )


def condition(H: ModelHessian) -> float | None:
    """|H|_2 |H⁺|_2 of the total, from all eigenvalues in float64; None for zero, and for more than 400 weights."""
    if H.shape[0] > _MOST_WEIGHTS:
        return None
    dense = H.total.dense().double()
    sizes = torch.linalg.eigvalsh((dense + dense.T) / 2).abs()
    most = float(sizes.max())
    seen = sizes[sizes > len(sizes) * torch.finfo(H.total.dtype).eps * most]
    return most / float(seen.min()) if most else None


def effective_rank(norm: Estimate, largest: Estimate) -> Estimate | None:
    """|H|_F²/λ², λ the eigenvalue of largest magnitude, with the error by the delta method; None for H = 0."""
    if not largest.value or not norm.value:
        return None
    value = (norm.value / largest.value) ** 2
    relative = 2 * math.hypot(norm.stderr / norm.value, largest.stderr / largest.value)
    return Estimate(value, value * relative, norm.matvecs + largest.matvecs, f"{norm.method}, {largest.method}")


def _share(outer: Estimate, functional: Estimate) -> Estimate:
    """f²/(o² + f²) with the error by the delta method."""
    o, f = outer.value, functional.value
    total = o**2 + f**2
    if not total:
        raise RangeError("H", "is zero: it has no parts")
    stderr = 2 * o * f * ((o * functional.stderr) ** 2 + (f * outer.stderr) ** 2) ** 0.5 / total**2
    return Estimate(f**2 / total, stderr, outer.matvecs + functional.matvecs, functional.method)


# ---- a family


@dataclass(frozen=True, eq=False)
class Scaling:
    """Measurements of a family of models, and the power law of each quantity.

    Args:
        measurements: {size: one summary per seed}.
        laws: the power laws by quantity.
        without: the quantities that have no power law, and why.

    Example:
        >>> import torch, curvoscope as cv
        >>> def build(size, seed):  # more rows of the same data: H is the same
        ...     X = torch.eye(2).double().repeat(size, 1)
        ...     return torch.nn.Linear(2, 1, bias=False).double(), torch.nn.MSELoss(), [(X, X[:, :1])]
        >>> study = cv.analysis.scaling(build, sizes=[1, 2, 4])
        >>> study.values("trace"), sorted(study.without)
        ({1: [2.0], 2: [2.0], 4: [2.0]}, ['functional_share'])
    """

    measurements: Mapping[int, tuple[CurvatureSummary, ...]]
    laws: Mapping[str, PowerLaw]
    without: Mapping[str, str]

    def values(self, quantity: str) -> dict[int, list[float]]:
        """The measured values of a quantity.

        Args:
            quantity: the name of a field of `CurvatureSummary`, such as "trace".

        Returns:
            {size: one value per seed}; values that were not computed are left out, and sizes without a value.
        """
        checks.choice("quantity", quantity, QUANTITIES)
        found = {
            size: [value for one in group if (value := one.value(quantity)) is not None]
            for size, group in self.measurements.items()
        }
        return {size: values for size, values in found.items() if values}

    def law(self, quantity: str) -> PowerLaw:
        """The power law fitted to a quantity.

        Args:
            quantity: the name of a field of `CurvatureSummary`, such as "trace".

        Returns:
            The power law; raises `RangeError`, with the reason, if the quantity has none.
        """
        checks.choice("quantity", quantity, QUANTITIES)
        if quantity in self.without:
            raise RangeError("quantity", f"{quantity} has no power law: {self.without[quantity]}")
        return self.laws[quantity]


def scaling(
    build: Builder,
    sizes: Iterable[int],
    seeds: Iterable[int] = (0,),
    *,
    matvecs: int = 100,
    blocks: Callable[[nn.Module], Blocks] | None = None,
    level: float = 0.95,
) -> Scaling:
    """Measure a family of models, or one model on more and more data, and fit power laws.

    Args:
        build: build(size, seed) -> (model, loss_fn, batches). The model is measured as it is, trained or not.
        sizes: at least three; `build` decides what a size means.
        seeds: for the replicas at each size.
        matvecs: products for each norm and each trace.
        blocks: blocks(model), a choice of the model's blocks; None: all of them.
        level: of the intervals.

    Returns:
        The measurements and their power laws.

    Example:
        >>> import torch, curvoscope as cv
        >>> def build(size, seed):
        ...     data = [(torch.eye(size).double(), torch.ones(size, 1).double())]
        ...     return torch.nn.Linear(size, 1, bias=False).double(), torch.nn.MSELoss(), data
        >>> study = cv.analysis.scaling(build, sizes=[1, 2, 4])  # H is 2/size of the identity
        >>> round(study.law("largest_eigenvalue").exponent, 6)
        -1.0
    """
    wanted, replicas = sorted(set(sizes)), list(seeds)
    if len(wanted) < 3:
        raise EmptyError("sizes", f"got {wanted}; a power law needs at least 3 sizes")
    if wanted[0] < 1:
        raise RangeError("sizes", f"got {wanted[0]}, expected positive sizes")
    if not replicas:
        raise EmptyError("seeds", "there are none; give at least one")
    found: dict[int, tuple[CurvatureSummary, ...]] = {}
    for size in wanted:
        group = []
        for seed in replicas:
            model, loss_fn, batches = build(size, seed)
            chosen = None if blocks is None else blocks(model)
            group.append(summary(hessian(model, loss_fn, batches, chosen, method="autodiff"), matvecs, seed))
        found[size] = tuple(group)
    laws: dict[str, PowerLaw] = {}
    without: dict[str, str] = {}
    study = Scaling(found, laws, without)
    for quantity in QUANTITIES:
        try:
            laws[quantity] = power_law(study.values(quantity), level=level)
        except CurvoscopeError as error:
            without[quantity] = str(error)
    return study


def required_data(
    measured: PowerLaw | Mapping[int, Any] | Mapping[float, Any], target: float, most: float = LARGEST_FACTOR
) -> Prediction:
    """The size at which a power law reaches `target`.

    A law in the number of samples needs measurements on more and more data.

    Args:
        measured: the law, or {size: values}.
        target: the value to reach.
        most: how many times beyond the measured sizes is allowed; further out is a `RangeError`.

    Returns:
        The size with its interval, and whether it is extrapolated.

    Example:
        >>> import curvoscope as cv
        >>> found = cv.analysis.required_data({100: [8.0], 200: [4.0], 400: [2.0]}, target=1.0)
        >>> round(found.value, 3), found.extrapolated, round(found.factor, 3)
        (800.0, True, 2.0)
    """
    law = measured if isinstance(measured, PowerLaw) else power_law(measured)
    return law.required(target, most)
