"""The block paper's LayerNorm: Theorems 2 and 3, its lemma on norms, and Lemma 1 on ReLU."""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor
from torch.func import jacfwd, jacrev

from curvoscope.papers.theorems import layer_norm as formulas
from curvoscope.papers.theorems.autodiff import jacobian
from curvoscope.papers.theorems.calculus import RealMatrix, commutation, identity, kron
from curvoscope.papers.theorems.norm_bounds import norm
from curvoscope.papers.theorems.post_norm_block import relu_jacobian, row_jacobian, row_second_derivative
from curvoscope.papers.theorems.registry import BLOCK_PAPER, OWN, Fails, excess, relative_error, relative_size
from curvoscope.papers.theorems.results.instances import Draw

SIZES = ((3, 5), (4, 3))
"""(L, d), different, so that a transposed commutation matrix shows."""


@BLOCK_PAPER.holds("Block paper, Theorem 2", "∂LN/∂X = (P ⊗ I) G + (I ⊗ Mᵀ) ∂P/∂X")
def layer_norm_jacobian(seed: int) -> Iterator[float]:
    """The Jacobian, and ∂P/∂X in detail."""
    for X in _inputs(seed):
        reference = jacobian(formulas.normalised, X)
        yield relative_error(formulas.jacobian(X), reference)
        yield relative_error(formulas.inverse_derivative(X), jacobian(formulas.inverse_deviations, X))
        yield Fails(relative_error(formulas.scaling_term(X), reference), "without the term of the variance")


@BLOCK_PAPER.holds("Block paper, Theorem 3, four terms", "the formula, its pieces by autodiff")
def layer_norm_hessian_structure(seed: int) -> Iterator[float]:
    """(I ⊗ Gᵀ) ∂(P ⊗ I) + ((I ⊗ Mᵀ) ⊗ I) ∂²P + (I ⊗ ∂Pᵀ) ∂(I ⊗ Mᵀ)."""
    yield from (
        relative_error(
            formulas.second_derivative(X, _scaling(X), _second(formulas.inverse_deviations, X), _mean(X)),
            _second(formulas.normalised, X),
        )
        for X in _inputs(seed)
    )


@BLOCK_PAPER.corrected("Block paper, Theorem 3", "with the pieces below corrected; printed ∂²P/∂X² put in its place")
def layer_norm_hessian(seed: int) -> Iterator[float]:
    """The formula put together from closed forms only."""
    for X in _inputs(seed):
        reference, (L, d) = _second(formulas.normalised, X), X.shape
        pieces = (formulas.scaling_derivative(X), formulas.mean_derivative(X, commutation(d, L)))
        for error, both, factor in ((float, True, 1 / math.sqrt(d)), (Fails, False, 1.0)):
            d2P = formulas.inverse_second_derivative(X, both, factor)
            yield error(relative_error(formulas.second_derivative(X, pieces[0], d2P, pieces[1]), reference))


@BLOCK_PAPER.corrected(
    "Block paper, Theorem 3, ∂(P ⊗ I)/∂X", "(I_L ⊗ K_{d,L} ⊗ I_d)(I_L² ⊗ vec I_d) ∂P; printed with I_L and K_{L,L}"
)
def scaling_piece(seed: int) -> Iterator[float]:
    """Printed, it has the wrong shape."""
    yield from (relative_error(formulas.scaling_derivative(X), _scaling(X)) for X in _inputs(seed))
    yield from (Fails(relative_error(formulas.scaling_derivative_as_printed(X), _scaling(X))) for X in _inputs(seed))


@BLOCK_PAPER.holds("Block paper, Theorem 3, ∂(I ⊗ Mᵀ)/∂X", "(I ⊗ K_{d,L} ⊗ I)(vec I ⊗ I) K_{d,L} G")
def mean_piece(seed: int) -> Iterator[float]:
    """The lemma on norms leaves out a permutation, which is harmless there."""
    for X in _inputs(seed):
        L, d = X.shape
        yield relative_error(formulas.mean_derivative(X, commutation(d, L)), _mean(X))
        without = relative_error(formulas.mean_derivative(X, identity(L * d)), _mean(X))
        yield Fails(without, "without the last K, as in the lemma on norms,")


@BLOCK_PAPER.corrected("Block paper, Theorem 3, ∂D/∂X", "times 1/√d")
def deviation_piece(seed: int) -> Iterator[float]:
    """The derivative of diag(σ)."""
    for X in _inputs(seed):
        reference = jacobian(lambda values: torch.diag(formulas.deviations(values)), X)
        for error, factor in ((float, 1 / math.sqrt(X.shape[1])), (Fails, 1.0)):
            yield error(relative_error(formulas.deviation_derivative(X, factor), reference))


@BLOCK_PAPER.corrected(
    "Block paper, Theorem 3, ∂²P/∂X²", "1/√d at both summands, ∂D corrected, and ∂A2 = ∂P/√d, which is never written"
)
def inverse_piece(seed: int) -> Iterator[float]:
    """The second derivative of diag(1/σ)."""
    for X in _inputs(seed):
        reference, root = _second(formulas.inverse_deviations, X), 1 / math.sqrt(X.shape[1])
        yield relative_error(formulas.inverse_second_derivative(X, True, root), reference)
        yield Fails(relative_error(formulas.inverse_second_derivative(X, False, root), reference))
        yield Fails(relative_error(formulas.inverse_second_derivative(X, False, 1.0), reference))


@BLOCK_PAPER.holds("Block paper, Theorem 3, symmetry", "in all three indices: a row of LN is d ∇σ")
def layer_norm_symmetry(seed: int) -> Iterator[float]:
    """∂²LN_a/∂x_b∂x_c does not change when a, b and c are permuted."""
    for X in _inputs(seed):
        entries = _second(formulas.normalised, X).reshape(X.numel(), X.numel(), X.numel())
        yield from (relative_error(entries.permute(order), entries) for order in ((0, 2, 1), (1, 0, 2), (2, 1, 0)))


@OWN.holds("Block paper, Theorems 2 and 3, row by row", "(C − z zᵀ/d)/σ, and C_ab z_c + … − 3 z_a z_b z_c/d")
def row_forms(seed: int) -> Iterator[float]:
    """The compact forms that the other block results are checked with."""
    yield from (
        error
        for X in _inputs(seed)
        for error in (
            relative_error(row_jacobian(X), jacobian(formulas.normalised, X)),
            relative_error(row_second_derivative(X), _second(formulas.normalised, X)),
        )
    )


@BLOCK_PAPER.corrected(
    "Block paper, norms of LayerNorm", "with σ_min the smallest standard deviation; printed: the smallest ‖M_i‖"
)
def layer_norm_norm_lemma(seed: int) -> Iterator[float]:
    """Both bounds hold with the right σ_min; with the printed one both fail on orthonormal rows."""
    for X in _spread_inputs(seed):
        true = (norm(row_jacobian(X)), norm(row_second_derivative(X)))
        std = float(formulas.deviations(X).min())
        yield from (excess(*pair) for pair in zip(true, formulas.norm_lemma(X, std), strict=True))
    for X in _centred_inputs(seed):
        true = (norm(row_jacobian(X)), norm(row_second_derivative(X)))
        row = float(formulas.centred(X).norm(dim=1).min())
        yield from (
            Fails(excess(*pair), "printed bound") for pair in zip(true, formulas.norm_lemma(X, row), strict=True)
        )


@OWN.holds("Block paper, exact norms of LayerNorm", "1/σ_min and √(max(d − 2, 2)/d)/σ_min²")
def layer_norm_exact_norms(seed: int) -> Iterator[float]:
    """What replaces the lemma."""
    for X in _spread_inputs(seed):
        yield abs(norm(row_jacobian(X)) / formulas.exact_jacobian_norm(X) - 1)
        yield abs(norm(row_second_derivative(X)) / formulas.exact_second_derivative_norm(X) - 1)


@BLOCK_PAPER.holds("Block paper, Lemma 1", "∂ReLU = diag(vec 1{X > 0}), ∂²ReLU = 0, almost everywhere")
def relu(seed: int) -> Iterator[float]:
    """Exact at every point without zero entries."""
    X = Draw(seed, 21, 3).normal(4, 3)
    yield relative_error(relu_jacobian(X), jacobian(torch.relu, X))
    yield relative_size(_second(torch.relu, X), relu_jacobian(X))


@lru_cache(maxsize=8)
def _inputs(seed: int) -> list[Tensor]:
    return [Draw(seed, 21, 1, *sizes).normal(*sizes) for sizes in SIZES]


def _spread_inputs(seed: int) -> list[Tensor]:
    """Rows of many sizes, some far from zero mean."""
    draw, found = Draw(seed, 21, 2), []
    for trial in range(12):
        L, d, scale = draw.integer(1, 4), draw.integer(3, 7), 10 ** float(draw.normal(1))
        found.append(scale * (draw.normal(L, d) + (2 * draw.normal(L, 1) if trial % 2 else 0)))
    return found


def _centred_inputs(seed: int) -> list[Tensor]:
    """Orthonormal rows with mean zero: ‖X‖ is as small as ‖M_i‖ allows, and 1/σ = √d as large."""
    draw = Draw(seed, 21, 4)
    bases = [torch.linalg.qr(formulas.centred(draw.normal(2, d)).T).Q.T for d in (12, 16)]
    return [basis.contiguous() for basis in bases]


def _second(function: Callable[[Tensor], Tensor], X: Tensor) -> RealMatrix:
    """∂²/∂X² in the layout of the paper."""
    return jacfwd(jacrev(function))(X).reshape(-1, X.numel())


def _scaling(X: Tensor) -> RealMatrix:
    return jacobian(lambda values: torch.kron(formulas.inverse_deviations(values), identity(X.shape[1])), X)


def _mean(X: Tensor) -> RealMatrix:
    return jacobian(lambda values: kron(identity(len(X)), formulas.centred(values).T), X)
