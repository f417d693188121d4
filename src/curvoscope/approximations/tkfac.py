"""TKFAC: a Kronecker product with the right trace."""

from torch import Tensor

from curvoscope.approximations.factors import GradientFactors, moment, total
from curvoscope.approximations.product import KroneckerProduct
from curvoscope.approximations.source import CurvatureSource, source_of


def tkfac(H: CurvatureSource, name: str | None = None) -> KroneckerProduct:
    """A = sum |delta|² x x^T (x) sum |x|² delta delta^T / sum |x|² |delta|² over tokens.

    Trace-restricted KFAC (Gao et al. 2020, arXiv 2011.10741): each factor is weighted by the size of the other, so
    that A has the trace of H if tokens are uncorrelated. Assumes that directions, not sizes, of inputs and gradients
    are uncorrelated.

    Args:
        H: a Hessian, a sweep that keeps the block, or a `GradientSource`.
        name: of the block.

    Returns:
        The approximation; it stores a² + p² floats.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2)).double()
        >>> X, Y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, Y)])  # one token per row: tokens are uncorrelated
        >>> A = cv.approximations.tkfac(H, "0.weight")
        >>> bool(torch.isclose(A.dense().trace(), H.outer["0.weight"].dense().trace()))
        True
    """
    source = source_of(H, name)
    weighted = [_weighted(part, X) for part, (_, X) in zip(source.parts, source.inputs, strict=True)]
    left, right = (total(pair[side] for pair in weighted) * source.weight for side in range(2))
    return KroneckerProduct("tkfac", *source.ordered(left, right / left.trace()), source.product_floats)


def _weighted(part: GradientFactors, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """sum |delta|² x x^T (a, a) and sum |x|² delta delta^T (p, p)."""
    lengths = inputs.norm(dim=-1)
    sizes = part.cotangents.square().sum((1, 3)).sqrt()  # over directions: (g, T)
    return moment(inputs * sizes[..., None]), moment(part.cotangents * lengths[:, None, :, None])
