"""The query-key part: Lemma 4.1, equation (22), Remark D.1, its eigenvalues, Lemma D.2."""

import math
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from curvoscope.papers.theorems.attention import (
    AttentionMatrix,
    KeyWeight,
    OutputRows,
    TokenRows,
    ValueWeight,
    attention_matrix,
    key_layout,
    logit_coupling,
    query_layout,
    softmax_jacobian,
    softmax_second_derivative,
    z1,
    z2,
)
from curvoscope.papers.theorems.autodiff import hessian, jacobian
from curvoscope.papers.theorems.calculus import RealMatrix, assemble, identity, kron, rank, vec
from curvoscope.papers.theorems.registry import OWN, PAPER, Fails, relative_error
from curvoscope.papers.theorems.results.instances import (
    AttentionInstance,
    Draw,
    draw_layer,
    rectangular_layers,
    square_layers,
)


class LogitSplit(NamedTuple):
    """H restricted to the query and key weights, split at T: outer + functional."""

    outer: RealMatrix
    functional: RealMatrix


def logit_curvature(X: TokenRows, A: AttentionMatrix, W_V: ValueWeight, Y: OutputRows) -> RealMatrix:
    """Lemma 4.1 as printed: U = Z1ᵀ(I_L ⊗ W_V W_Vᵀ)Z1 + (δᵀ(I_L ⊗ W_Vᵀ) ⊗ I_{d²}) Z2, shape (d², d²)."""
    L, d = X.shape
    Z1, Z2 = z1(X, softmax_jacobian(A)), z2(X, softmax_second_derivative(A))
    delta = vec(A @ X @ W_V - Y)
    return Z1.T @ kron(identity(L), W_V @ W_V.T) @ Z1 + (kron(delta.T @ kron(identity(L), W_V.T), identity(d * d)) @ Z2)


def single_matrix_block(X: TokenRows, W_QK: Float[Tensor, "d d"], W_V: ValueWeight, Y: OutputRows) -> RealMatrix:
    """Lemma 4.1 corrected: H(W_QK, W_QK) = 2/(L e) U for T = X W_QK Xᵀ and the square loss."""
    A = torch.softmax(X @ W_QK @ X.T, dim=-1)
    return 2 / Y.numel() * logit_curvature(X, A, W_V, Y)


def single_matrix_jacobian(X: TokenRows, W_QK: Float[Tensor, "d d"], W_V: ValueWeight) -> RealMatrix:
    """Equation (22): ∂F/∂W_QK = (I_L ⊗ W_Vᵀ Xᵀ)(∂A/∂T)(X ⊗ X)."""
    A = torch.softmax(X @ W_QK @ X.T, dim=-1)
    return kron(identity(len(X)), W_V.T @ X.T) @ softmax_jacobian(A) @ kron(X, X)


def logit_split_as_printed(X: TokenRows, W_Q: KeyWeight, W_K: KeyWeight, W_V: ValueWeight, Y: OutputRows) -> LogitSplit:
    """Remark D.1 as printed: no factor 2/(L e), 𝒱 and the off-diagonal blocks in the order [W_K; W_Q]."""
    U, B = _logit_derivatives(X, W_Q, W_K, W_V, Y)
    return _split(U, B.T, [key_layout(W_Q), query_layout(W_K)], 1.0)


def logit_split(X: TokenRows, W_Q: KeyWeight, W_K: KeyWeight, W_V: ValueWeight, Y: OutputRows) -> LogitSplit:
    """Remark D.1 corrected, order [W_Q; W_K]: 2/(L e) times 𝒱ᵀU𝒱/k and [[0, B], [Bᵀ, 0]] ⊗ I_k / √k."""
    U, B = _logit_derivatives(X, W_Q, W_K, W_V, Y)
    return _split(U, B, [query_layout(W_K), key_layout(W_Q)], 2 / Y.numel())


def paper_rank_bound(d: int, k: int) -> int:
    """Lemma D.2: the T-outer part has rank at most 2 d k − k² if k < d, else d²."""
    return 2 * d * k - k * k if k < d else d * d


def visible_keys_rank_bound(width: int, visible: list[int]) -> int:
    """Σ_i min(width, n_i − 1), n_i the number of keys that query i sees.

    Bounds the rank of the T-outer part and of H(K, K) with width d, and of H(Q, Q) with width k: the rows of a
    covariance over n points span at most n − 1 dimensions.
    """
    return sum(min(width, keys - 1) for keys in visible)


def _logit_derivatives(
    X: TokenRows, W_Q: KeyWeight, W_K: KeyWeight, W_V: ValueWeight, Y: OutputRows
) -> tuple[RealMatrix, RealMatrix]:
    """U and B."""
    A = attention_matrix(X, W_Q, W_K)
    return logit_curvature(X, A, W_V, Y), logit_coupling(A @ X @ W_V - Y, z1(X, softmax_jacobian(A)), W_V)


def _split(U: RealMatrix, B: RealMatrix, layouts: list[RealMatrix], factor: float) -> LogitSplit:
    """`factor` times 𝒱ᵀU𝒱/k and [[0, B], [Bᵀ, 0]] ⊗ I_k / √k, 𝒱 being the two layouts side by side."""
    V, zero = torch.cat(layouts, dim=1), torch.zeros_like(B)
    k = V.shape[1] // (2 * len(B))
    hollow = torch.cat([torch.cat([zero, B], dim=1), torch.cat([B.T, zero], dim=1)])
    return LogitSplit(factor / k * V.T @ U @ V, factor / math.sqrt(k) * kron(hollow, identity(k)))


# ---- checks


@PAPER.corrected("Lemma 4.1", "2/(L d_V) × the printed matrix (E7)")
def single_matrix_hessian(seed: int) -> Iterator[float]:
    """H(W_QK, W_QK) for T = X W_QK Xᵀ."""
    for layer in square_layers(seed) + rectangular_layers(seed):
        W_QK = _single_matrix(layer)
        reference = single_matrix_reference(layer)
        A = torch.softmax(layer.X @ W_QK @ layer.X.T, dim=-1)
        yield relative_error(single_matrix_block(layer.X, W_QK, layer.W_V, layer.Y), reference)
        yield Fails(relative_error(logit_curvature(layer.X, A, layer.W_V, layer.Y), reference))


@PAPER.holds("Equation (22)", "∂F/∂W_QK")
def single_matrix_first_derivative(seed: int) -> Iterator[float]:
    """(I_L ⊗ W_Vᵀ Xᵀ)(∂A/∂T)(X ⊗ X)."""
    yield from (
        relative_error(
            single_matrix_jacobian(layer.X, _single_matrix(layer), layer.W_V),
            jacobian(partial(_single_matrix_output, layer), _single_matrix(layer)),
        )
        for layer in square_layers(seed) + rectangular_layers(seed)
    )


@PAPER.corrected(
    "Remark D.1", "times 2/(L d_V), 𝒱 = [I ⊗ W_K, (W_Q ⊗ I)K], B ⊗ I above and Bᵀ ⊗ I below the diagonal (E9)"
)
def split_at_the_logits(seed: int) -> Iterator[float]:
    """T-outer and T-functional part, each against the Gauss-Newton split at T."""
    for layer in square_layers(seed):
        reference = _reference_split(layer)
        corrected = logit_split(*layer.weights, layer.Y)
        verbatim = logit_split_as_printed(*layer.weights, layer.Y)
        factor = 2 / layer.Y.numel()
        whole = assemble(layer.reference.hessian, ("Q", "K"))
        yield from (relative_error(*parts) for parts in zip(corrected, reference, strict=True))
        yield relative_error(corrected.outer + corrected.functional, whole)
        for form in (verbatim, LogitSplit(factor * verbatim.outer, factor * verbatim.functional)):
            yield Fails(relative_error(form.outer + form.functional, whole), "printed form, even with the factor,")


@OWN.holds("Remark D.1, any value width", "L, d, k, e all different; B = XᵀPX with P = ∂ℓ/∂T")
def split_at_the_logits_rectangular(seed: int) -> Iterator[float]:
    """The corrected split for e ≠ d, and B in its cheap form."""
    for layer in rectangular_layers(seed):
        split = logit_split(*layer.weights, layer.Y)
        yield from (relative_error(*parts) for parts in zip(split, _reference_split(layer), strict=True))
        residual = layer.reference.output - layer.Y
        B = logit_coupling(residual, z1(layer.X, softmax_jacobian(layer.A)), layer.W_V)
        yield relative_error(2 / layer.Y.numel() * B, coupling(layer))


@PAPER.corrected(
    "Appendix D, eigenvalue pairs", "±2/(L d_V √d_K) σ_j(B), multiplicity d_K; “Z_1λ_i” should read ±λ_i (E9)"
)
def eigenvalue_pairs(seed: int) -> Iterator[float]:
    """The T-functional part has the spectrum of [[0, B], [Bᵀ, 0]], d_K times over."""
    for layer in square_layers(seed):
        k = layer.W_Q.shape[1]
        found = torch.linalg.eigvalsh(_reference_split(layer).functional)
        residual = layer.reference.output - layer.Y
        B = logit_coupling(residual, z1(layer.X, softmax_jacobian(layer.A)), layer.W_V)
        values = torch.linalg.svdvals(B) / math.sqrt(k)
        pairs = torch.cat([values, -values]).repeat_interleave(k).sort().values
        yield relative_error(2 / layer.Y.numel() * pairs, found)
        yield Fails(relative_error(pairs, found), "without the factor 2/(L d_V)")


@OWN.holds("Appendix D, norms of the T-functional part", "‖·‖_F² = 2s²k‖B‖_F², ‖·‖₂ = s σ_max(B)")
def functional_norms(seed: int) -> Iterator[float]:
    """What an SVD of the d × d matrix B says about a matrix of size 2dk."""
    for layer in rectangular_layers(seed):
        part, B, k = _reference_split(layer).functional, coupling(layer), layer.W_Q.shape[1]
        frobenius, spectral = part.square().sum(), torch.linalg.matrix_norm(part, ord=2)
        yield relative_error(2 * layer.s**2 * k * B.square().sum(), frobenius)
        yield relative_error(layer.s * torch.linalg.svdvals(B)[0], spectral)


@PAPER.holds("Lemma D.2", "excess of the rank over the bound 2d_K d_V − d_K² or d_V², relative to it")
def outer_rank(seed: int) -> Iterator[float]:
    """The T-outer part has low rank."""
    for L, d, k in ((6, 3, 2), (6, 4, 3), (5, 2, 3)):
        layer = draw_layer(seed, L, d, k, d)
        bound = paper_rank_bound(d, k)
        yield max(rank(_reference_split(layer).outer) - bound, 0) / bound


@PAPER.corrected("Lemma D.2, proof", "rk 𝒱 = d(rk W_Q + rk W_K) − rk W_Q rk W_K (E13)")
def rank_of_layout(seed: int) -> Iterator[float]:
    """The last equality of the proof holds for weights of full rank only; as a bound it always does."""
    for number, (d, k, rank_Q, rank_K) in enumerate(((4, 3, 1, 2), (3, 4, 2, 1), (5, 2, 1, 1))):
        draw = Draw(seed, 42, number)
        W_Q = draw.normal(d, rank_Q) @ draw.normal(rank_Q, k)
        W_K = draw.normal(d, rank_K) @ draw.normal(rank_K, k)
        found = rank(_product_jacobian(W_Q, W_K))
        yield abs(d * (rank_Q + rank_K) - rank_Q * rank_K - found) / found
        yield Fails(abs(paper_rank_bound(d, k) - found) / found, "the last equality, for weights without full rank,")


def coupling(layer: AttentionInstance) -> Tensor:
    """B = XᵀPX."""
    return layer.X.T @ logit_gradient(layer) @ layer.X


def logit_gradient(layer: AttentionInstance) -> Tensor:
    """P = ∂ℓ/∂T: P_ij = A_ij (u_ij − Σ_l A_il u_il), u = G Vᵀ, G = ∂ℓ/∂F."""
    u = layer.reference.loss_gradient @ (layer.X @ layer.W_V).T
    return layer.A * (u - (layer.A * u).sum(dim=1, keepdim=True))


def _reference_split(layer: AttentionInstance) -> LogitSplit:
    """The Gauss-Newton split at T by automatic differentiation, in the order [W_Q; W_K]."""
    reference = layer.logit_reference
    return LogitSplit(assemble(reference.outer, ("Q", "K")), assemble(reference.functional, ("Q", "K")))


def _product_jacobian(W_Q: Tensor, W_K: Tensor) -> Tensor:
    """𝒱, the derivative of W_Q W_Kᵀ in both weights."""
    query, key = jacobian(lambda weight: weight @ W_K.T, W_Q), jacobian(lambda weight: W_Q @ weight.T, W_K)
    return torch.cat([query, key], dim=1)


def _single_matrix(layer: AttentionInstance) -> Tensor:
    return layer.s * layer.W_Q @ layer.W_K.T


def _single_matrix_output(layer: AttentionInstance, W_QK: Tensor) -> Tensor:
    return torch.softmax(layer.X @ W_QK @ layer.X.T, dim=-1) @ layer.X @ layer.W_V


def single_matrix_reference(layer: AttentionInstance) -> Tensor:
    """H(W_QK, W_QK) at W_QK = s W_Q W_Kᵀ by automatic differentiation."""
    return hessian(lambda weight: layer.loss(_single_matrix_output(layer, weight)), _single_matrix(layer))
