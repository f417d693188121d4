"""The Hessian of one self-attention layer as the paper prints it: Theorems 3.1 and 3.2 and what they are made of.

F = A X W_V, A = softmax(T) by rows, T = X W_Q W_Kᵀ Xᵀ / √k, and the square loss ‖F − Y‖² / (L e). Shapes:
X (L, d), W_Q and W_K (d, k), W_V (d, e), Y (L, e). The paper has e = d. Blocks are in row-major order of the
weights. Z2 has L d⁵ entries: for small sizes only.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from curvoscope.papers.theorems.calculus import (
    RealMatrix,
    commutation,
    identity,
    khatri_rao,
    kron,
    shuffle,
    unit,
    vec,
    with_transposes,
)

BlockPairs = dict[tuple[str, str], Tensor]
TokenRows = Float[Tensor, "L d"]
OutputRows = Float[Tensor, "L e"]
AttentionMatrix = Float[Tensor, "L L"]
KeyWeight = Float[Tensor, "d k"]
ValueWeight = Float[Tensor, "d e"]
"""Shapes of X, of F and Y, of A, of W_Q and W_K, of W_V."""


def attention_matrix(X: TokenRows, W_Q: KeyWeight, W_K: KeyWeight) -> AttentionMatrix:
    """A = softmax(X W_Q W_Kᵀ Xᵀ / √k), row by row."""
    return torch.softmax(X @ W_Q @ W_K.T @ X.T / math.sqrt(W_Q.shape[1]), dim=-1)


def attention_output(X: TokenRows, W_Q: KeyWeight, W_K: KeyWeight, W_V: ValueWeight) -> OutputRows:
    """F = A X W_V."""
    return attention_matrix(X, W_Q, W_K) @ X @ W_V


# ---- derivatives of the row-wise softmax


def softmax_jacobian(A: AttentionMatrix) -> RealMatrix:
    """Equation (19): ∂A/∂T = blockdiag_i (diag(a_i) − a_i a_iᵀ), shape (L², L²)."""
    return torch.block_diag(*[torch.diag(row) - torch.outer(row, row) for row in A])


def softmax_entry_hessian(row: Float[Tensor, "L"], j: int) -> AttentionMatrix:
    """Lemma C.1: ∂²A_ij/∂T_i∂T_i = A_ij (2 a aᵀ + E_jj − diag(a) − e_j aᵀ − a e_jᵀ) for row a of A."""
    a, e_j = row[:, None], unit(j, len(row))
    return row[j] * (2 * a @ a.T + e_j @ e_j.T - torch.diag(row) - e_j @ a.T - a @ e_j.T)


def softmax_row_second_derivative(row: Float[Tensor, "L"], i: int) -> RealMatrix:
    """Lemma C.1: D_i = stack_j (e_i ⊗ ∂²A_ij/∂T_i∂T_i), shape (L³, L)."""
    L = len(row)
    return torch.cat([kron(unit(i, L), softmax_entry_hessian(row, j)) for j in range(L)])


def softmax_second_derivative(A: AttentionMatrix) -> RealMatrix:
    """Lemma C.1: ∂²A/∂T∂T = blockdiag_i D_i, shape (L⁴, L²)."""
    return torch.block_diag(*[softmax_row_second_derivative(row, i) for i, row in enumerate(A)])


# ---- moments of the attention rows


def first_moment(A: AttentionMatrix, X: TokenRows) -> TokenRows:
    """Definition 3.1: M1 = A X."""
    return A @ X


def second_moments(A: AttentionMatrix, X: TokenRows) -> list[RealMatrix]:
    """Definition 3.1: M2_i = Σ_j A_ij x̃_j x̃_jᵀ with x̃_j = x_j − M1_i, L blocks of shape (d, d)."""
    return [(X - mean).T @ torch.diag(row) @ (X - mean) for row, mean in zip(A, A @ X, strict=True)]


def third_moments(A: AttentionMatrix, X: TokenRows) -> list[RealMatrix]:
    """Definition 3.1: M3_i = Σ_j A_ij x̃_j ⊗ x̃_j x̃_jᵀ, L blocks of shape (d², d)."""
    moments = []
    for row, mean in zip(A, A @ X, strict=True):
        deviations = (X - mean)[:, :, None]
        terms = [weight * kron(x, x @ x.T) for weight, x in zip(row, deviations, strict=True)]
        moments.append(torch.stack(terms).sum(0))
    return moments


def z1(X: TokenRows, dA: RealMatrix) -> RealMatrix:
    """Theorem 3.1: Z1 = (I_L ⊗ Xᵀ)(∂A/∂T)(X ⊗ X), shape (L d, d²)."""
    return kron(identity(len(X)), X.T) @ dA @ kron(X, X)


def z2(X: TokenRows, d2A: RealMatrix) -> RealMatrix:
    """Theorem 3.2: Z2 = (I_L ⊗ Xᵀ ⊗ Xᵀ ⊗ Xᵀ)(∂²A/∂T²)(X ⊗ X), shape (L d³, d²)."""
    return kron(identity(len(X)), X.T, X.T, X.T) @ d2A @ kron(X, X)


def z1_of_moments(X: TokenRows, M2: list[RealMatrix]) -> RealMatrix:
    """Remark 3.1: Z1 = X * M2, block row i is x_iᵀ ⊗ M2_i."""
    return khatri_rao([x[None, :] for x in X], M2)


def z2_of_moments(X: TokenRows, M3: list[RealMatrix]) -> RealMatrix:
    """Remark 3.1 corrected: Z2 = stack_i (K_{d,d} ⊗ I_d)(x_i x_iᵀ ⊗ M3_i)."""
    L, d = X.shape
    return kron(identity(L), commutation(d, d), identity(d)) @ khatri_rao([torch.outer(x, x) for x in X], M3)


# ---- layout matrices


def query_layout(W_K: KeyWeight) -> RealMatrix:
    """I_d ⊗ W_K, shape (d², d k): how a query weight moves W_Q W_Kᵀ."""
    return kron(identity(W_K.shape[0]), W_K)


def key_layout(W_Q: KeyWeight) -> RealMatrix:
    """(W_Q ⊗ I_d) K_{k,d}, shape (d², d k): how a key weight moves W_Q W_Kᵀ."""
    d, k = W_Q.shape
    return kron(W_Q, identity(d)) @ commutation(k, d)


def duplicated_residual(residual: OutputRows, m: int) -> RealMatrix:
    """Theorem 3.2: R_m = vec(F − Y)ᵀ ⊗ I_m, shape (m, m L e)."""
    return kron(vec(residual).T, identity(m))


# ---- the results


def jacobians(X: TokenRows, W_Q: KeyWeight, W_K: KeyWeight, W_V: ValueWeight) -> dict[str, Tensor]:
    """Lemma B.1: ∂F/∂W_V and ∂F/∂W_Q as printed, and ∂F/∂W_K, which the paper leaves to the reader."""
    A, root = attention_matrix(X, W_Q, W_K), math.sqrt(W_Q.shape[1])
    before = kron(identity(len(X)), W_V.T @ X.T) @ softmax_jacobian(A)
    return {
        "V": kron(A @ X, identity(W_V.shape[1])),
        "Q": before @ kron(X, X @ W_K) / root,
        "K": before @ kron(X @ W_Q, X) @ commutation(*reversed(W_Q.shape)) / root,
    }


def outer_blocks(X: TokenRows, W_Q: KeyWeight, W_K: KeyWeight, W_V: ValueWeight) -> BlockPairs:
    """Theorem 3.1 and its key blocks: H_o of the square loss for all nine pairs of "Q", "K" and "V"."""
    L, k, e = len(X), W_Q.shape[1], W_V.shape[1]
    A = attention_matrix(X, W_Q, W_K)
    M1, Z1 = first_moment(A, X), z1(X, softmax_jacobian(A))
    query, key = query_layout(W_K), key_layout(W_Q)
    middle = Z1.T @ kron(identity(L), W_V @ W_V.T) @ Z1
    factor = 2 / (L * e)
    return with_transposes(
        {
            ("V", "V"): factor * kron(M1.T @ M1, identity(e)),
            ("Q", "Q"): factor / k * query.T @ middle @ query,
            ("K", "K"): factor / k * key.T @ middle @ key,
            ("Q", "K"): factor / k * query.T @ middle @ key,
            ("V", "Q"): factor / math.sqrt(k) * kron(M1.T, W_V.T) @ Z1 @ query,
            ("V", "K"): factor / math.sqrt(k) * kron(M1.T, W_V.T) @ Z1 @ key,
        }
    )


def functional_blocks(X: TokenRows, W_Q: KeyWeight, W_K: KeyWeight, W_V: ValueWeight, Y: OutputRows) -> BlockPairs:
    """Theorem 3.2 and its key blocks: H_f of the square loss for all nine pairs of "Q", "K" and "V"."""
    (L, d), k, e = X.shape, W_Q.shape[1], W_V.shape[1]
    A = attention_matrix(X, W_Q, W_K)
    Z1, Z2 = z1(X, softmax_jacobian(A)), z2(X, softmax_second_derivative(A))
    residual = A @ X @ W_V - Y
    query, key = query_layout(W_K), key_layout(W_Q)
    third = duplicated_residual(residual, d * k) @ kron(identity(L), W_V.T, query.T) @ Z2
    third_key = duplicated_residual(residual, d * k) @ kron(identity(L), W_V.T, key.T) @ Z2
    crossed = duplicated_residual(residual, d * e) @ kron(identity(L), shuffle(e, d)) @ Z1
    factor = 2 / (L * e)
    return with_transposes(
        {
            ("V", "V"): torch.zeros(d * e, d * e, dtype=torch.float64),
            ("Q", "Q"): factor / k * third @ query,
            ("K", "K"): factor / k * third_key @ key,
            ("Q", "K"): factor / k * third @ key
            + factor / math.sqrt(k) * kron(logit_coupling(residual, Z1, W_V), identity(k)),
            ("V", "Q"): factor / math.sqrt(k) * crossed @ query,
            ("V", "K"): factor / math.sqrt(k) * crossed @ key,
        }
    )


def logit_coupling(residual: OutputRows, Z1: RealMatrix, W_V: ValueWeight) -> Float[Tensor, "d d"]:
    """Remark D.1: B = R_d (I_L ⊗ W_Vᵀ ⊗ I_d)(Z1 ⊗ I_d) S; times 2/(L e) it is Xᵀ P X with P = ∂ℓ/∂T."""
    L, d = len(residual), W_V.shape[0]
    return (
        duplicated_residual(residual, d) @ kron(identity(L), W_V.T, identity(d)) @ kron(Z1, identity(d)) @ shuffle(d, d)
    )
