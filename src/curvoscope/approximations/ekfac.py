"""EKFAC: KFAC's eigenvectors with the right eigenvalues."""

from curvoscope.approximations.eigenbasis import EigenbasisForm
from curvoscope.approximations.factors import total
from curvoscope.approximations.product import eigenvectors
from curvoscope.approximations.source import CurvatureSource, source_of


def ekfac(H: CurvatureSource, name: str | None = None) -> EigenbasisForm:
    """A = the diagonal of H in the eigenbasis of KFAC (George et al. 2018, arXiv 1806.03884).

    With Q_U and Q_V the eigenvectors of KFAC's factors, A = (Q_U (x) Q_V) diag(E[(Q_U^T gamma Q_V)²]) (Q_U (x) Q_V)^T,
    the best approximation in that basis. Assumes that H is diagonal there.

    Args:
        H: a Hessian, a sweep that keeps the block, or a `GradientSource`.
        name: of the block.

    Returns:
        The approximation; it stores a² + p² + a p floats.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2)).double()
        >>> X, Y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, Y)])
        >>> truth = H.outer["0.weight"].dense()
        >>> kfac, ekfac = (make(H, "0.weight").dense() for make in (cv.approximations.kfac, cv.approximations.ekfac))
        >>> bool((ekfac - truth).norm() <= (kfac - truth).norm())
        True
    """
    source = source_of(H, name)
    factors, spans = source.ordered(*source.token_moments[:2]), source.ordered(*source.token_spans)
    left, right = (eigenvectors(*pair)[1] for pair in zip(factors, spans, strict=True))
    turned = (some.gradients() for part in source.compact for some in part.turned(left, right).pieces())
    values = total(gradients.square().sum(0) for gradients in turned) * source.weight
    a, p = source.sides
    return EigenbasisForm("ekfac", left, right, values, source.product_floats + a * p)
