"""KL-Shampoo: the Kronecker product nearest in the Kullback-Leibler divergence."""

import math

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.approximations.product import KroneckerProduct
from curvoscope.approximations.source import CurvatureSource, source_of
from curvoscope.approximations.steps import remaining
from curvoscope.errors import RangeError
from curvoscope.magnitudes import norm

_STEPS = 200
_CONVERGED = {torch.float64: 1e-13, torch.float32: 2e-2}  # relative error of a factor at which steps end


def kl_shampoo(H: CurvatureSource, name: str | None = None, damping: float = 1e-3) -> KroneckerProduct:
    """A = U (x) V that minimises KL(N(0, H + kappa I) || N(0, A)) (Lin et al. 2025, arXiv 2509.03378).

    The factors fulfil U = (E[gamma V^-1 gamma^T] + kappa tr(V^-1) I) / p and V = (E[gamma^T U^-1 gamma] +
    kappa tr(U^-1) I) / a, and are found by taking these steps in turn. Assumes Gaussian gradients whose rows and
    columns vary independently. Most blocks are singular, so kappa must be positive.

    Args:
        H: a Hessian, a sweep that keeps the block, or a `GradientSource`.
        name: of the block.
        damping: kappa as a multiple of the mean eigenvalue of H.

    Returns:
        The approximation; it stores a² + p² floats.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.randn(8, 3).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, X[:, :2])])
        >>> A = cv.approximations.kl_shampoo(H, "weight", damping=1e-9)
        >>> bool(torch.allclose(A.dense(), H.outer["weight"].dense(), rtol=1e-6))  # a Kronecker product itself
        True
    """
    checks.positive("a positive number: most blocks are singular", damping=damping)
    source = source_of(H, name)
    a, p = source.sides
    kappa, limit = damping * float(source.moments[0].trace()) / (a * p), _CONVERGED.get(source.like.dtype, 2e-2)
    right, left, rest = source.moments[1], source.moments[0].clone(), kappa * p  # a step from V = I
    before = math.inf
    for step in range(_STEPS):
        left.diagonal().add_(rest)
        scale = a / (float(left.trace()) + source.silent * rest)  # a product has no scale of its own on either side
        left, rest = left * scale, rest * scale
        factor = _factor(left, damping)
        inverse = torch.cholesky_inverse(factor)
        added = kappa * (float(inverse.trace()) + source.silent / rest)
        found = source.inward_inverse(factor)
        found.diagonal().add_(added)
        found /= a
        change, right = float((found - right).norm() / found.norm()), found
        if remaining(change, before) <= limit or step == _STEPS - 1:
            break
        before = change if step else math.inf  # the first is not a change by a step
        left = source.outward_inverse(_factor(right, damping))
        inside = float((inverse.double() * left.double()).sum())
        # U in the directions that no gradient has: kappa tr V^-1, as tr V^-1 V = p; at least p² / tr V
        rest = kappa * max((a * p - inside) / added, p * p / float(right.trace()))
    outside = source.silent * rest**2 * norm(right) ** 2, source.silent * rest * float(right.trace())
    return KroneckerProduct("kl_shampoo", *source.ordered(left, right), source.product_floats, outside)


def _factor(matrix: Tensor, damping: float) -> Tensor:
    """The lower Cholesky factor."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        raise RangeError("damping", f"got {damping:g}, with which a factor is singular to rounding; give a larger one")
    return factor
