"""The query-key part of the Hessian: one matrix in place of two (Lemma 4.1) and the split at T (Remark D.1)."""

import math
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
from curvoscope.papers.theorems.calculus import RealMatrix, identity, kron, vec


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
