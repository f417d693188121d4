"""Log-determinants and effective dimensions: traces of functions of a damped operator."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import RangeError
from curvoscope.estimate.function_trace import function_trace
from curvoscope.estimate.products import Matrix, check_symmetric
from curvoscope.estimate.result import Estimate
from curvoscope.solve.certificate import margin_from_eigenvalues


def logdet(
    operator: Matrix,
    damping: float = 1e-3,
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    steps: int | None = None,
) -> Estimate:
    """log det(B + damping) = sum_i log(λ_i + damping), for B + damping positive definite.

    Exact if an eigendecomposition is cheap (small operators, Kronecker products, few tokens) and neither `matvecs` nor
    `tolerance` is given; otherwise by stochastic Lanczos quadrature. Its error bar joins the spread over the probes and
    the bracket of Gauss and Gauss-Radau quadrature, which holds the value of every probe.

    Args:
        operator: B (n, n), symmetric.
        damping: a number ≥ 0.
        matvecs: the budget of products, probes times steps; 512 when neither this nor a tolerance is given.
        tolerance: the standard error, relative to n, at which to stop.
        seed: of the probes; by default that of `cv.settings`.
        steps: of Lanczos per probe; 64, or a quarter of a smaller budget.

    Returns:
        An `Estimate`.

    Example:
        >>> import torch, curvoscope as cv
        >>> from curvoscope.solve import logdet
        >>> print(logdet(torch.diag(torch.arange(100.0)).double(), 1.0))  # log(100!)
        363.739...
    """
    return _trace(operator, checks.damping(damping), torch.log, "logdet", matvecs, tolerance, seed, steps)


def effective_dimension(
    operator: Matrix,
    damping: float = 1e-3,
    *,
    matvecs: int | None = None,
    tolerance: float | None = None,
    seed: int | None = None,
    steps: int | None = None,
) -> Estimate:
    """tr B (B + damping)^-1 = sum_i λ_i / (λ_i + damping): how many directions the damping leaves.

    If all eigenvalues are known, B may be indefinite.

    Args:
        operator: B (n, n), symmetric.
        damping, matvecs, tolerance, seed, steps: as for `logdet`.

    Returns:
        An `Estimate`.

    Example:
        >>> import torch, curvoscope as cv
        >>> from curvoscope.solve import effective_dimension
        >>> print(effective_dimension(torch.diag(torch.tensor([0.0, 1.0, 9.0])).double(), 1.0))
        1.4
    """
    damping = checks.damping(damping)
    return _trace(operator, damping, lambda t: 1 - damping / t, "effective_dimension", matvecs, tolerance, seed, steps)


def _trace(
    operator: Matrix,
    damping: float,
    function: Callable[[Tensor], Tensor],
    question: str,
    matvecs: int | None,
    tolerance: float | None,
    seed: int | None,
    steps: int | None,
) -> Estimate:
    """tr f(B + damping), for functions that are monotone on positive operators."""
    check_symmetric(operator, question)
    floor = getattr(operator, "lower_bound", lambda: -math.inf)()
    basis = getattr(operator, "eigenbasis", None) if matvecs is tolerance is steps is None else None
    if basis is None:
        return function_trace(
            operator,
            lambda values: function(values + damping),
            -damping,
            floor,
            matvecs=matvecs,
            tolerance=tolerance,
            seed=seed,
            steps=steps,
        ).checked(question)
    basis = basis.at_least(floor)
    margin_from_eigenvalues(basis, damping, torch.finfo(operator.dtype).eps)
    values = basis.all_values() + damping
    if question == "logdet" and float(values.min()) < 0:
        raise indefinite(float(values.min()) - damping, damping)
    return Estimate(float(function(values).sum())).checked(question)


def indefinite(smallest: float, damping: float) -> RangeError:
    """What to say of a damping that leaves a negative eigenvalue."""
    return RangeError(
        "damping", f"got {damping:.3g}, but the smallest eigenvalue is {smallest:.3g}; give more than {-smallest:.3g}"
    )
