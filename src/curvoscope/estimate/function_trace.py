"""Traces of functions of an operator, with a bracket for what the quadrature itself may get wrong."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from curvoscope.errors import RangeError
from curvoscope.estimate.products import MOST, Matrix, Probes, Products
from curvoscope.estimate.quadrature import (
    DEFAULT_STEPS,
    DENSITY_MATVECS,
    LEAST_PROBES,
    MOST_EXACT,
    GaussRule,
    all_eigenvalues,
    gauss_rules,
    quadrature_budget,
)
from curvoscope.estimate.result import Estimate

SpectralFunction = Callable[[Tensor], Tensor]  # of eigenvalues, entry by entry

_ROUNDING = 16  # units of rounding of the largest eigenvalue, below which another one is 0
_SURE = 10.0  # error bars of an end of a spectrum that hold it with a probability of 99.99 %


def function_trace(
    operator: Matrix,
    function: SpectralFunction,
    pole: float,
    floor: float = -math.inf,
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    steps: int | None = None,
) -> Estimate:
    """tr f(B) for a symmetric operator and f whose derivatives alternate in sign above its pole, as log and -1/x do.

    For a probe z, m steps of Lanczos give the Gauss quadrature of z^T f(B) z, which is not below it, and with a node
    at a ≤ λ_min that of Gauss and Radau, which is not above it (Golub and Meurant). The value is the mean of both over
    the probes; the standard error joins their spread and half of the bracket.

    Args:
        operator: (n, n), symmetric.
        function: f, entry by entry.
        pole: f is defined above it, and all eigenvalues must be.
        floor: a number not above all eigenvalues, if one is known; otherwise the error bar of the smallest node tells.
        matvecs: the budget of products, probes times steps; 512 when neither this nor a tolerance is given.
        tolerance: the standard error of (1/n) tr f(B) at which to stop.
        seed: of the probes; by default that of `cv.settings`.
        steps: of Lanczos per probe; 64, or a quarter of a smaller budget.

    Returns:
        An `Estimate`; exact if the budget reaches n.

    Example:
        >>> import torch
        >>> from curvoscope.estimate.function_trace import function_trace
        >>> found = function_trace(torch.diag(torch.arange(1.0, 801.0)).double(), torch.log, 0.0, 1.0, matvecs=400)
        >>> abs(found - torch.arange(1.0, 801.0).log().sum()) < 4 * found.stderr
        tensor(True)
    """
    budget, size = quadrature_budget(operator, "a trace of a function", matvecs, tolerance, steps), operator.shape[0]
    with Products(operator, "trace of a function", budget) as products:
        if steps is None and size <= min(MOST_EXACT, budget or LEAST_PROBES * DEFAULT_STEPS):
            values = all_eigenvalues(products)
            least, rounding = float(values.min()), _ROUNDING * products.epsilon * float(values.abs().max())
            if least - pole <= rounding:
                zero = ", 0 to rounding" if abs(least) <= rounding else ""
                told = f"got {-pole:.3g}, but the smallest eigenvalue is {least:.3g}{zero}"
                raise RangeError("damping", f"{told}; give more than {max(0.0, -least) + rounding:.3g}")
            return Estimate(float(function(values.clamp_min(floor)).sum()))
        steps = steps or min(size, DEFAULT_STEPS, max(1, (budget or DENSITY_MATVECS) // LEAST_PROBES))
        most = max(2, (budget or MOST) // steps)
        for rule in gauss_rules(products, Probes(products, seed), steps, most):
            found = _bracketed(rule, products, function, pole, floor)
            if tolerance is not None and len(rule.nodes) >= LEAST_PROBES and found.stderr <= tolerance * size:
                break
        return found


def _bracketed(rule: GaussRule, products: Products, function: SpectralFunction, pole: float, floor: float) -> Estimate:
    """The mean of the two quadratures."""
    size, unit = products.size, products.unit
    if math.isinf(floor):
        held = rule.nodes[rule.first != 0]
        floor = (float(held.min()) - _SURE * rule.missed(-1, size, products.epsilon)) * unit
    _above_pole(floor, pole)
    ends = []
    for nodes, first in ((rule.nodes, rule.first), rule.radau(floor / unit)):
        values = function(nodes.clamp_min(floor / unit) * unit)
        ends.append((torch.where(first == 0, 0.0, values) * first.square()).sum(1))
    middle, half = (ends[0] + ends[1]) / 2, float((ends[0] - ends[1]).mean().abs()) / 2
    count = len(middle)
    spread = float(middle.std()) / count**0.5 if count > 1 else math.inf
    error = max(math.hypot(spread, half), products.epsilon * float(middle.abs().mean()))
    return Estimate(size * float(middle.mean()), size * error, products.matvecs, "slq", max(1.0, count - 1.0))


def _above_pole(smallest: float, pole: float) -> None:
    if smallest <= pole:
        raise RangeError(
            "damping",
            f"got {-pole:.3g}, but eigenvalues may be as low as {smallest:.3g}; give more than {-smallest:.3g}, or more"
            " products, which narrow the bound",
        )
