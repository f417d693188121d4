"""The diagonal, which Adam and RMSprop keep."""

from curvoscope.approximations.eigenbasis import EigenbasisForm
from curvoscope.approximations.factors import total
from curvoscope.approximations.source import CurvatureSource, source_of


def diagonal(H: CurvatureSource, name: str | None = None) -> EigenbasisForm:
    """A = diag(H): every weight on its own, as in Adam (arXiv 1412.6980), whose second moments estimate it.

    Assumes that the gradients of two weights are uncorrelated.

    Args:
        H: a Hessian, a sweep that keeps the block, a `GradientSource`, or any symmetric operator, such as
            `H.total[name]`.
        name: of the block.

    Returns:
        The approximation; it stores a p floats.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.randn(4, 3).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, X[:, :2])])
        >>> A = cv.approximations.diagonal(H, "weight")
        >>> A.floats, bool(torch.allclose(A.dense().diagonal(), H.outer["weight"].dense().diagonal()))
        (6, True)
    """
    source = source_of(H, name, signed=True)
    values = total(weight * gradients.square().sum(0) for weight, gradients in source.signed_gradients())
    return EigenbasisForm("diagonal", None, None, values, values.numel())
