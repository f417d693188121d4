"""Shampoo: the second moments of the gradient's rows and columns."""

from fractions import Fraction

import torch

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.eigenbasis import EigenbasisForm
from curvoscope.approximations.product import KroneckerProduct
from curvoscope.approximations.source import CurvatureSource, source_of
from curvoscope.errors import RangeError

_POWERS = (0.5, 0.25)


def shampoo(H: CurvatureSource, name: str | None = None, power: float = 0.5) -> Approximation:
    """A from L = E[gamma gamma^T] (a, a) and R = E[gamma^T gamma] (p, p) (Gupta et al. 2018, arXiv 1802.09568).

    An update L^-power G R^-power stands for A^-1/2 G. With the power 1/4 of the first paper A = L^1/2 (x) R^1/2; with
    1/2 A = L (x) R / tr L, one step of power iteration towards the nearest product (Morwani et al. 2024,
    arXiv 2406.17748). Assumes that rows and columns of the gradient vary independently.

    Args:
        H: a Hessian, a sweep that keeps the block, or a `GradientSource`.
        name: of the block.
        power: 1/2 or 1/4.

    Returns:
        The approximation; it stores a² + p² floats.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.randn(4, 3).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, X[:, :2])])
        >>> A = cv.approximations.shampoo(H, "weight")
        >>> bool(torch.allclose(A.dense(), H.outer["weight"].dense()))  # a Kronecker product itself
        True
    """
    if power not in _POWERS:
        raise RangeError("power", f"got {power}, expected 1/2 or 1/4")
    source = source_of(H, name)
    left, right = source.moments
    if power == 0.5:
        return KroneckerProduct("shampoo", *source.ordered(left, right / left.trace()), source.product_floats)
    (lefts, first), (rights, second) = (torch.linalg.eigh(side) for side in source.ordered(left, right))
    roots = torch.outer(*(values.clamp_min(0).sqrt() for values in (lefts, rights)))
    return EigenbasisForm(f"shampoo:{Fraction(power)}", first, second, roots, source.product_floats)
