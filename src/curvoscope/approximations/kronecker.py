"""The nearest sum of k Kronecker products, by Van Loan's rearrangement."""

import math
from functools import cached_property
from itertools import cycle
from numbers import Integral

import numpy as np
import scipy
import torch
from torch import Tensor

from curvoscope.approximations.base import Approximation
from curvoscope.approximations.factors import total
from curvoscope.approximations.gradients import GradientSource
from curvoscope.approximations.product import KroneckerProduct
from curvoscope.approximations.source import CurvatureSource, source_of
from curvoscope.approximations.steps import remaining
from curvoscope.errors import NonFiniteError, RangeError
from curvoscope.magnitudes import ScaledNumber, norm, power_of_two, root
from curvoscope.operators.base import LinearOperator

_DENSE = 2**22  # entries of the rearranged matrix up to which its singular vectors are found from them
_TOLERANCE = {torch.float64: 0.0}  # of singular vectors, relative; 0 is machine precision; 1e-2 in single precision
_BASIS = {torch.float64: 20}  # vectors of a Krylov space, at least: more for more digits; 5 in single precision
_GAIN = 3e-3  # of the singular value, still to come when power iteration ends
_RESIDUAL = 1e3  # units of rounding at which a solve ends
_ITERATIONS = 50  # of a solve, at most, for each row: without rounding one would be enough


def kronecker(H: CurvatureSource, name: str | None = None, rank: int = 1) -> Approximation:
    """The nearest A = sum_k U_k (x) V_k of `rank` terms in the Frobenius norm (Van Loan and Pitsianis 1993).

    Rearranged, a Kronecker product is a matrix of rank one: with R[(i, k), (j, l)] = H[(i, j), (k, l)], the best A is
    the truncated singular value decomposition of R. R is never formed for a large block: R vec(Y) = sum gamma Y
    gamma^T, a sum over tokens, and Lanczos finds the singular vectors. Assumes nothing; full rank is exact.

    Args:
        H: a Hessian, a sweep that keeps the block, a `GradientSource`, or any symmetric operator, such as
            `H.total[name]`.
        name: of the block.
        rank: k, at most the smaller of a² and p².

    Returns:
        The approximation; it stores k (a² + p²) floats. Of two terms or more, or for an H
        that has negative eigenvalues, it may have such, too.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), torch.nn.Linear(2, 2)).double()
        >>> X, Y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
        >>> H = cv.hessian(model, torch.nn.MSELoss(), [(X, Y)])
        >>> found = [cv.approximations.kronecker(H, "0.weight", rank=k) for k in (1, 2, 4)]
        >>> errors = [(A - H.outer["0.weight"]).dense().norm() for A in found]
        >>> bool(errors[0] > errors[1] > errors[2]), bool(errors[2] < 1e-12)
        (True, True)
    """
    source = source_of(H, name, signed=True)
    a, p = source.shape
    most = min(source.sides) ** 2
    if not isinstance(rank, Integral) or rank not in range(1, most + 1):
        raise RangeError("rank", f"got {rank}, expected 1 to {most}, the smaller of a² and p² of {source.name!r}")
    floats = rank * source.product_floats
    if (a * p) ** 2 <= _DENSE:
        left, right = _dense_terms(source, rank)
    elif rank == 1 and source.like.dtype != torch.float64 and not source.negative:
        return KroneckerProduct("kronecker:1", *source.ordered(*_nearest_product(source)), floats)
    else:
        left, right = _lanczos_terms(source, rank)
    if rank == 1 and not source.negative:  # both factors of the best product are semidefinite, with one sign
        return _product("kronecker:1", left[0], right[0], floats)
    return KroneckerTerms(f"kronecker:{rank}", left, right, floats)


def _product(name: str, left: Tensor, right: Tensor, floats: int | None = None) -> KroneckerProduct:
    """left (x) right, both with a positive trace and symmetric to the bit."""
    sign = torch.where(left.trace() < 0, -0.5, 0.5)
    return KroneckerProduct(name, sign * (left + left.mT), sign * (right + right.mT), floats)


def _nearest_product(source: GradientSource) -> tuple[Tensor, Tensor]:
    """The leading singular pair in single precision, by power iteration from the identity, as far as it matters.

    R takes positive semidefinite matrices to such, so its leading pair is one of them, and the identity is never
    orthogonal to it. The length of the image of a unit matrix grows to the singular value with every half of a step,
    by R^T or by R, and is second order in the error of the pair.
    """
    unit, value, before = source.moments[0] / norm(source.moments[0]), 0.0, math.inf
    for inwards in cycle((True, False)):
        image = source.inward(unit) if inwards else source.outward(unit)
        found = norm(image)
        if not remaining(found - value, before) > _GAIN * found:
            break
        before = found - value if value else math.inf
        unit, value = image / found, found
    return (unit, image) if inwards else (image, unit)


def _dense_terms(source: GradientSource, rank: int) -> tuple[Tensor, Tensor]:
    (a, p), like = source.shape, source.dense()
    rearranged = like.view(a, p, a, p).transpose(1, 2).reshape(a * a, p * p)
    left, values, right = torch.linalg.svd(rearranged, full_matrices=False)
    lefts = (left[:, :rank] * values[:rank]).mT.unflatten(1, (a, a))
    return lefts, right[:rank].unflatten(1, (p, p))


def _lanczos_terms(source: GradientSource, rank: int) -> tuple[Tensor, Tensor]:
    """The leading singular vectors on the smaller side, and R times them on the other."""
    whole = Rearranged(source)
    narrow = whole if whole.shape[1] <= whole.shape[0] else whole.T
    near = _all_vectors(narrow) if rank == narrow.shape[1] else _leading_vectors(narrow, rank)
    far = narrow._matmat(near)
    found = far.mT.unflatten(1, narrow.row_shape), near.mT.unflatten(1, narrow.column_shape)
    return found if narrow is whole else (found[1], found[0])


def _all_vectors(narrow: LinearOperator) -> Tensor:
    """All right singular vectors, which Lanczos does not give."""
    formed = narrow._matmat(torch.eye(narrow.shape[1], dtype=narrow.dtype, device=narrow.device))
    return torch.linalg.svd(formed, full_matrices=False).Vh.mT


def _leading_vectors(narrow: LinearOperator, rank: int) -> Tensor:
    """Some right singular vectors, from the largest singular value on."""
    side, size = narrow.column_shape[0], narrow.shape[1]
    unit = power_of_two(narrow._matmat(torch.eye(side, dtype=narrow.dtype, device=narrow.device).view(-1, 1)))
    forward, backward = narrow.to_scipy(), narrow.T.to_scipy()

    def squared(vector: np.ndarray) -> np.ndarray:
        found: np.ndarray = backward.matvec(forward.matvec(vector) / unit) / unit
        return found

    gram = scipy.sparse.linalg.LinearOperator((size, size), matvec=squared, dtype=forward.dtype)
    start = np.eye(side).ravel() + np.random.default_rng(0).standard_normal(size) / side
    tolerance, basis = _TOLERANCE.get(narrow.dtype, 1e-2), _BASIS.get(narrow.dtype, 5)
    values, vectors = scipy.sparse.linalg.eigsh(
        gram, rank, v0=start.astype(forward.dtype), tol=tolerance, ncv=min(size, max(basis, 2 * rank + 1))
    )
    order = np.argsort(-values)
    return torch.as_tensor(np.ascontiguousarray(vectors[:, order]), dtype=narrow.dtype, device=narrow.device)


class Rearranged(LinearOperator):
    """R (a², p²) of a block: R vec(Y) = w sum gamma Y gamma^T, and R^T vec(Z) = w sum gamma^T Z gamma."""

    def __init__(self, source: GradientSource, transposed: bool = False) -> None:
        sides = [(side, side) for side in source.shape]
        rows, columns = reversed(sides) if transposed else sides
        super().__init__(rows, columns, source.like)
        self._source, self._is_transposed = source, transposed

    def _transposed(self) -> LinearOperator:
        return Rearranged(self._source, not self._is_transposed)

    def _matmat(self, columns: Tensor) -> Tensor:
        matrices, source = columns.mT.unflatten(1, self.column_shape), self._source
        inward = self._is_transposed != source.flipped
        weighted = [(source.weight, part) for part in source.compact] + [(-1.0, part) for part in source.negative]
        found = [
            total(weight * (part.inward(matrix) if inward else part.outward(matrix)) for weight, part in weighted)
            for matrix in matrices
        ]
        return torch.stack(found).flatten(1).mT


class KroneckerTerms(Approximation):
    """A = sum_k U_k (x) V_k, with U (k, a, a) and V (k, p, p)."""

    def __init__(self, name: str, left: Tensor, right: Tensor, floats: int) -> None:
        super().__init__(name, (left.shape[1], right.shape[1]), left, floats)
        self.left, self.right = left, right

    def _matmat(self, columns: Tensor) -> Tensor:
        matrices = columns.mT.unflatten(1, self.row_shape)
        pairs = zip(self.left, self.right, strict=True)
        return total(u @ matrices @ v.mT for u, v in pairs).flatten(1).mT

    def _trace(self) -> float:
        return float(sum(u.trace() * v.trace() for u, v in zip(self.left, self.right, strict=True)))

    def _diagonal(self) -> Tensor:
        first, second = (side.diagonal(dim1=1, dim2=2) for side in (self.left, self.right))
        return (first.mT @ second).flatten()

    def _norm(self) -> float:
        units = [power_of_two(side) for side in (self.left, self.right)]
        flat = [(side / unit).flatten(1) for side, unit in zip((self.left, self.right), units, strict=True)]
        first, second = (side @ side.mT for side in flat)
        square: ScaledNumber = float((first * second).sum()), 0
        return root(square) * units[0] * units[1]

    @cached_property
    def _extremes(self) -> tuple[float, float]:
        return float(self._eigenvalues(1, "SA")[0]), float(self._eigenvalues(1, "LA")[0])

    def _ends(self) -> tuple[float, float]:
        return self._extremes

    @cached_property
    def _first(self) -> KroneckerProduct:
        """The first term, whose eigenvectors are kept."""
        return _product(self.name, self.left[0], self.right[0])

    def _solve(self, columns: Tensor, damping: float) -> Tensor:
        """Conjugate gradients, with the first term as a preconditioner."""
        first = self._first
        x, residual = torch.zeros_like(columns), columns.clone()
        direction = near = first._solve(residual, damping)
        length = (residual * near).sum(0)
        limit = _RESIDUAL * torch.finfo(self.dtype).eps * columns.norm(dim=0)
        for _ in range(_ITERATIONS * self.shape[0]):
            if bool((residual.norm(dim=0) <= limit).all()):
                return x
            product = self._matmat(direction) + damping * direction
            step = length / (direction * product).sum(0).clamp_min(torch.finfo(self.dtype).tiny)
            x, residual = x + step * direction, residual - step * product
            near = first._solve(residual, damping)
            before, length = length, (residual * near).sum(0)
            direction = near + length / before.clamp_min(torch.finfo(self.dtype).tiny) * direction
        raise NonFiniteError(
            "solution", f"conjugate gradients did not converge at damping {damping:g}; give a larger one"
        )
