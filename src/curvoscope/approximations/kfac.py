"""KFAC: the covariance of a layer's inputs times that of the gradients at its output."""

from curvoscope import checks
from curvoscope.approximations.factors import moment, total
from curvoscope.approximations.gradients import GradientSource
from curvoscope.approximations.product import KroneckerProduct
from curvoscope.approximations.source import CurvatureSource, source_of
from curvoscope.errors import ModelError


def kfac(H: CurvatureSource, name: str | None = None, sharing: str = "expand") -> KroneckerProduct:
    """A = (1 / n) sum x x^T (x) sum delta delta^T over n tokens (Martens and Grosse 2015, arXiv 1503.05671).

    A weight that is shared by the tokens of a sequence has two forms (Eschenhagen et al. 2023, arXiv 2311.00636). With
    "expand" each token counts as a data point. With "reduce" each sequence does, with the mean of its x and the sum of
    its delta. Both assume that inputs and gradients are uncorrelated; expand also that tokens are.

    Args:
        H: a Hessian, a sweep that keeps the block, or a `GradientSource`.
        name: of the block.
        sharing: "expand" or "reduce".

    Returns:
        The approximation; it stores a² + p² floats.

    Example:
        >>> import torch, curvoscope as cv
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)).double()
        >>> X, Y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, Y)])
        >>> A = cv.approximations.kfac(H, "0.weight")  # exact for a deep linear network with squared error
        >>> bool(torch.allclose(A.dense(), H.outer["0.weight"].dense()))
        True
    """
    checks.choice("sharing", sharing, ("expand", "reduce"))
    source = source_of(H, name)
    if sharing == "expand":
        left, right, tokens = source.token_moments
        spans = source.ordered(*source.token_spans)
        factors = source.ordered(left, right / tokens)
        return KroneckerProduct("kfac", *factors, source.product_floats, spans=spans)
    return _reduced(source)


def _reduced(source: GradientSource) -> KroneckerProduct:
    if not source.sequences:
        raise ModelError(
            "sharing",
            f"got 'reduce', but the tokens of {source.name!r} are not known by sequence; give the sweep micro_batch=1",
        )
    left = total(share * moment(X.mean(1)) for share, X in source.inputs)
    right = total(moment(part.cotangents.sum(2)) for part in source.parts) * source.weight
    count = sum(share * len(X) for share, X in source.inputs)
    return KroneckerProduct("kfac:reduce", *source.ordered(left, right / count), source.product_floats)
