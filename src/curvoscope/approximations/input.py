"""The inputs of a layer alone, as GPTQ and SparseGPT see its curvature."""

import torch

from curvoscope.approximations.eigenbasis import EigenbasisForm
from curvoscope.approximations.source import CurvatureSource, source_of


def input(H: CurvatureSource, name: str | None = None) -> EigenbasisForm:
    """A = c sum x x^T (x) I: all outputs alike, as in GPTQ (arXiv 2210.17323) and SparseGPT (arXiv 2301.00774).

    They minimise the squared change of the layer's output, and never see the loss. The scale c, which does not matter
    to them, is the mean eigenvalue of KFAC's other factor. Assumes that the loss has the same curvature in all outputs
    of the layer.

    Args:
        H: a Hessian, a sweep that keeps the block, or a `GradientSource`.
        name: of the block.

    Returns:
        The approximation; it stores a² floats.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.randn(4, 3).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, X[:, :2])])
        >>> A = cv.approximations.input(H, "weight")  # exact for the squared error of the layer's own output
        >>> bool(torch.allclose(A.dense(), H.outer["weight"].dense())), A.floats
        (True, 9)
    """
    source = source_of(H, name)
    left, right, tokens = source.token_moments
    values, vectors = torch.linalg.eigh(left)
    scaled = values.clamp_min(0) * (right.trace() / (tokens * len(right)))
    repeated, floats = scaled[:, None].expand(-1, len(right)), source.sides[0] ** 2
    if source.flipped:
        return EigenbasisForm("input", None, vectors, repeated.mT, floats)
    return EigenbasisForm("input", vectors, None, repeated, floats)
