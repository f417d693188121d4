"""Which damping follows from a measured spectrum."""

from dataclasses import dataclass

import torch

from curvoscope import checks
from curvoscope.errors import DtypeError, RangeError, ShapeError
from curvoscope.estimate import Estimate, lanczos
from curvoscope.operators import BlockHessian, LinearOperator
from curvoscope.solve.certificate import SURE

_BULK = 0.9  # of the eigenvalues by magnitude: the rest may be outliers
_ABOVE = 0.1  # of its size, by which the damping exceeds a negative eigenvalue
_PRECISE = 1e3  # units of rounding of the largest eigenvalue


@dataclass(frozen=True)
class Damping:
    """A damping, the largest of four numbers, each of which has its own reason.

    Args:
        value: the damping.
        reason: the name of the number that decides.
        numbers: "negative end": 1.1 times the size of the most negative eigenvalue that there may be, so that
            H + damping is positive definite; "bulk edge": 90 % of the eigenvalues are smaller, and to divide by them
            amplifies noise; "precision": 1,000 units of rounding of the largest eigenvalue; "approximation": the
            largest eigenvalue of |H - A| for an approximation A, above which A preconditions H well.
        smallest: the smallest eigenvalue.
        largest: the largest eigenvalue.
        effective_dimension: tr H (H + damping)^-1 at the value, if it is cheap or H is positive semidefinite.

    Example:
        >>> import torch, curvoscope as cv
        >>> X = torch.arange(6.0).double().view(3, 2)
        >>> H = cv.exact.LinearMLP([torch.eye(2).double()]).hessian(X, cv.losses.MSE(X))
        >>> found = cv.analysis.damping(H.outer)
        >>> found.reason, found.numbers["negative end"] < 1e-12
        ('bulk edge', True)
    """

    value: float
    reason: str
    numbers: dict[str, float]
    smallest: Estimate
    largest: Estimate
    effective_dimension: Estimate | None

    def __str__(self) -> str:
        lines = [f"damping {self.value:.3g}, from the {self.reason}"]
        lines += [f"  {name}: {value:.3g}" for name, value in self.numbers.items()]
        ends = (f"{end:.4g}" if end.exact else str(end) for end in (self.smallest, self.largest))
        lines.append("  eigenvalues from {} to {}".format(*ends))
        if self.effective_dimension is not None:
            dimension = self.effective_dimension
            lines.append(f"  effective dimension {f'{dimension:.4g}' if dimension.exact else dimension}")
        return "\n".join(lines)


def damping(
    H: BlockHessian | LinearOperator,
    approximation: LinearOperator | None = None,
    matvecs: int = 256,
    seed: int | None = None,
) -> Damping:
    """The damping that a measured spectrum asks for, and its evidence.

    It answers one question: how much must be added so that (H + damping)^-1 exists, is stable and does not amplify
    directions that the data cannot distinguish from zero? For influence functions of weights trained with a weight
    decay, the damping is that weight decay instead.

    Args:
        H: a Hessian, of which the total counts, or a symmetric operator.
        approximation: what is to precondition H, if anything.
        matvecs: products for the density of the eigenvalues, and for the norm of H - approximation.
        seed: of the probes; by default that of `cv.settings`.

    Returns:
        The damping, its reason and the numbers that were compared.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.ones(4, 3).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, X[:, :2])])
        >>> cv.analysis.damping(H.outer).numbers.keys()
        dict_keys(['negative end', 'bulk edge', 'precision'])
    """
    operator = H.total if isinstance(H, BlockHessian) else H
    for name, given in (("H", operator), ("approximation", operator if approximation is None else approximation)):
        if not isinstance(given, LinearOperator):
            raise DtypeError(
                name, f"expected an operator, such as a Hessian or a block of it, got {type(given).__name__}"
            )
    if not operator.symmetric:
        raise ShapeError("H", "is not symmetric; give a diagonal block or a whole Hessian")
    if matvecs < 8:
        raise RangeError("matvecs", f"got {matvecs}, expected at least 8")
    density = operator.density(matvecs=matvecs, seed=seed)
    smallest, largest = density.smallest, density.largest
    lowest = max(smallest.value - SURE * smallest.stderr, operator.lower_bound())
    numbers = {
        "negative end": (1 + _ABOVE) * max(0.0, -lowest),
        "bulk edge": _bulk_edge(density.nodes.abs().flatten(), density.weights.flatten()),
        "precision": _PRECISE * torch.finfo(operator.dtype).eps * max(abs(smallest), abs(largest)),
    }
    if approximation is not None:
        numbers["approximation"] = abs(lanczos(operator - approximation, 1, "LM", matvecs=matvecs, seed=seed)[0])
    reason = max(numbers, key=numbers.__getitem__)
    value = checks.finite("damping", float(numbers[reason]))
    dimension = None
    if value > 0 and (operator.lower_bound() + value > 0 or operator.eigenbasis is not None):
        dimension = operator.effective_dimension(value)
    return Damping(value, reason, numbers, smallest, largest, dimension)


def _bulk_edge(sizes: torch.Tensor, weights: torch.Tensor) -> float:
    """The magnitude below which 90 % of the eigenvalues lie."""
    order = sizes.argsort()
    share = weights[order].cumsum(0) / weights.sum()
    return float(sizes[order][int((share < _BULK).sum().clamp_max(len(order) - 1))])
