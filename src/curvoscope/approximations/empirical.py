"""The empirical Fisher matrix: gradients of the labels that the data has."""

from dataclasses import replace

from curvoscope.approximations.roots import RootForm
from curvoscope.approximations.source import CurvatureSource, source_of
from curvoscope.errors import ModelError


def empirical(H: CurvatureSource, name: str | None = None) -> RootForm:
    """A = sum_n g_n g_n^T / M, with g_n the gradient of sequence n, summed over its terms, and M the number of terms.

    The Gauss-Newton part has the same form with labels that the model draws, so A is right if the model has learned the
    distribution of the labels, and wrong otherwise (Kunstner et al. 2019, arXiv 1905.12558).

    Args:
        H: the Hessian of a model's cross-entropy, or a `GradientSource` of it.
        name: of the block.

    Returns:
        The approximation; it stores (a p)² floats.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.randn(4, 3).double()
        >>> H = cv.hessian(model, torch.nn.CrossEntropyLoss(), [(X, torch.tensor([0, 1, 1, 0]))])
        >>> A = cv.approximations.empirical(H, "weight")
        >>> A.floats, bool(A.eigenvalues().min() > -1e-12)
        (36, True)
    """
    source = source_of(H, name)
    if not source.labelled:
        raise ModelError(
            "approximation",
            "the empirical Fisher needs the gradients at the labels; pass cv.hessian of a cross-entropy",
        )
    return RootForm.of("empirical", replace(source, parts=source.labelled, exact=True))
