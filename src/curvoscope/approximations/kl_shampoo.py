"""KL-Shampoo: the Kronecker product nearest in the Kullback-Leibler divergence."""

import torch
from torch import Tensor

from curvoscope.approximations.kronecker import Rearranged
from curvoscope.approximations.product import KroneckerProduct
from curvoscope.approximations.source import Curvature, source_of
from curvoscope.errors import RangeError
from curvoscope.operators.base import LinearOperator

_STEPS = 200
_CONVERGED = {torch.float64: 1e-13, torch.float32: 1e-2}  # relative change of a factor at which steps end


def kl_shampoo(H: Curvature, name: str | None = None, damping: float = 1e-3) -> KroneckerProduct:
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
    if not damping > 0:
        raise RangeError("damping", f"got {damping}, expected a positive number: most blocks are singular")
    source = source_of(H, name)
    a, p = source.shape
    outward: LinearOperator = Rearranged(source)
    trace = source.weight * float(sum(gradients.square().sum() for gradients in source.gradients()))
    kappa, limit = damping * trace / (a * p), _CONVERGED.get(source.like.dtype, 1e-2)
    eye = torch.eye(p, dtype=source.like.dtype, device=source.like.device)
    right = eye
    for _ in range(_STEPS):
        left = _step(outward, right, kappa, p)
        left = left * (a / left.trace())  # a product has no scale of its own on either side
        found = _step(outward.T, left, kappa, a)
        change, right = float((found - right).norm() / found.norm()), found
        if change <= limit:
            break
    return KroneckerProduct("kl_shampoo", left, right)


def _step(rearranged: LinearOperator, other: Tensor, kappa: float, size: int) -> Tensor:
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(other))
    found = rearranged._matmat(inverse.reshape(-1, 1)).view(rearranged.row_shape)
    found = (found + found.mT) / 2
    found.diagonal().add_(kappa * inverse.trace())
    return found / size
