"""`source_of`: the gradients of a block, from a Hessian, a sweep or a closed form."""

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.approximations.factors import GradientFactors
from curvoscope.approximations.gradients import GivesGradients, GradientSource
from curvoscope.errors import DtypeError, EmptyError, ModelError, ShapeError
from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import BlockHessian, BlockMatrix
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.operators.terms import Single, Term

CurvatureSource = GivesGradients | BlockHessian | BlockMatrix | LinearOperator | GradientSource

_NEGATIVE = 1e-10  # relative to the largest eigenvalue: a smaller one is rounding


def source_of(curvature: CurvatureSource, name: str | None = None, signed: bool = False) -> GradientSource:
    """The gradients gamma of a block with sum gamma gamma^T = H, its outer part.

    From a model (`cv.hessian`) they belong to the layer's own inputs and outputs, exactly, by one backward pass for
    each direction of the loss Hessian. From a sweep they are its samples, if it keeps them; the inputs of a micro-batch
    then count by its share of the loss, so that KFAC of sequences of unequal lengths counts long ones more than the
    exact one does. A closed form sum_t l_t l_t^T (x) C_t has its own tokens: l_t is x_t for the query weight, but the
    attention mean m_t for the value weight, so that approximations that read inputs (KFAC, EKFAC, TKFAC, input) differ
    from those of the model. The key weight has no such form, and no approximations that read inputs.

    Args:
        curvature: a `ModelHessian`, a `Sweep` with `keep=`, a `BlockHessian`, a `BlockMatrix`, an operator, or the
            source itself.
        name: of the block; None if there is one alone.
        signed: whether a matrix with negative eigenvalues, such as `H.total[name]`, is taken: it has gradients whose
            squares are subtracted. Only `diagonal`, `neurons` and `kronecker` have a meaning for it.

    Returns:
        The source, from which every approximation of the block can be computed.

    Example:
        >>> import torch, curvoscope as cv
        >>> model, X = torch.nn.Linear(3, 2).double(), torch.ones(4, 3).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, X[:, :2])])
        >>> source = cv.approximations.source_of(H, "weight")
        >>> bool(torch.allclose(source.dense(), H.outer["weight"].dense()))
        True
    """
    if isinstance(curvature, GradientSource):
        if curvature.negative and not signed:
            raise _indefinite(curvature.name)
        return curvature
    if isinstance(curvature, GivesGradients):
        return curvature.gradient_source(_named(name))
    if isinstance(curvature, BlockHessian):
        curvature = curvature.outer
    if isinstance(curvature, BlockMatrix):
        name = _named(name)
        curvature = curvature[name]
    if not isinstance(curvature, LinearOperator):
        raise DtypeError("H", f"got {type(curvature).__name__}, expected a Hessian, a sweep or an operator")
    if not curvature.symmetric:
        raise ShapeError("H", f"an operator {curvature.shape} that is not symmetric; give a diagonal block")
    return _of_operator(curvature, name or "H", signed)


def _named(name: str | None) -> str:
    if name is None:
        raise EmptyError("name", "give the name of a block")
    if not isinstance(name, str):
        raise DtypeError("name", f"got {type(name).__name__}, expected the name of a block")
    return name


def _of_operator(operator: LinearOperator, name: str, signed: bool) -> GradientSource:
    """From the terms of a Kronecker sum, if they are positive semidefinite and stand on the rows; else from entries."""
    known = getattr(operator, "resolved", operator)
    terms = known.terms if isinstance(known, KroneckerSum) else ()
    try:
        parts = [_of_term(term, name) for term in terms]
    except ModelError:
        if not signed:
            raise
        parts = []
    if parts and all(part is not None for part in parts):
        return GradientSource(name, tuple(part for part in parts if part is not None), exact=True)
    dense = operator.dense()[None]
    if not signed:
        return GradientSource(name, (_formed(_root(dense, name), operator),), exact=True)
    values, vectors = torch.linalg.eigh((dense + dense.mT) / 2)
    roots = (vectors * sign.clamp_min(0).sqrt()[:, None, :] for sign in (values, -values))
    positive, negative = (_formed(root, operator) for root in roots)
    return GradientSource(name, (positive,), exact=True, negative=() if _are_rounding(values) else (negative,))


def _formed(root: Tensor, operator: LinearOperator) -> GradientFactors:
    """The columns of a root (1, n, n) as gradients."""
    return GradientFactors(None, root.mT.unflatten(2, operator.row_shape))


def _of_term(term: Term | Single, name: str) -> GradientFactors | None:
    """One group per token: x = l_t, and delta the columns of a root of C_t."""
    if not term.symmetric or term.axes != (0, 0):
        return None
    if isinstance(term, Single):
        inputs, cores = _root(term.outer[None], name)[0].mT, term.core[None]
        roots = _root(cores, name).expand(len(inputs), -1, -1)
    else:
        checks.fits(
            2 * term.tokens * term.core.size * term.left.element_size(),
            None,
            f"the cores of {term.tokens} tokens",
            "use fewer tokens, or a sweep of the model",
        )
        inputs, roots = term.left, _root(term.core.dense(0, term.tokens), name)
    return GradientFactors(inputs[:, None], roots.mT[:, :, None])


def _root(matrices: Tensor, name: str) -> Tensor:
    """R with R R^T = M, for positive semidefinite matrices (t, p, p)."""
    values, vectors = torch.linalg.eigh((matrices + matrices.mT) / 2)
    if not _are_rounding(values):
        raise _indefinite(name)
    return vectors * values.clamp_min(0).sqrt()[:, None, :]


def _are_rounding(values: Tensor) -> bool:
    """Whether all negative numbers among the eigenvalues (t, p) are rounding."""
    limit = max(_NEGATIVE, values.shape[-1] * torch.finfo(values.dtype).eps)
    return float(values.min()) >= -limit * float(values.abs().max())


def _indefinite(name: str) -> ModelError:
    return ModelError(
        "part",
        f"{name!r} is not positive semidefinite; give H.outer, or take diagonal, neurons or kronecker, which any "
        "symmetric matrix has",
    )
