"""Linear attention (Remark 4.1, Table 1), stacks of it, and the linear MLP that the paper compares it with."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from curvoscope.papers.theorems.attention import BlockPairs, KeyWeight, OutputRows, TokenRows, ValueWeight
from curvoscope.papers.theorems.calculus import RealMatrix, commutation, identity, kron, shuffle, vec, with_transposes


def linear_attention(X: TokenRows, W_Q: KeyWeight, W_K: KeyWeight, W_V: ValueWeight) -> OutputRows:
    """F = T X W_V with T = X W_Q W_Kᵀ Xᵀ / √k: attention without the softmax."""
    return X @ W_Q @ W_K.T @ X.T @ X @ W_V / math.sqrt(W_Q.shape[1])


def linear_outer_blocks(X: TokenRows, W_Q: KeyWeight, W_K: KeyWeight, W_V: ValueWeight) -> BlockPairs:
    """Remark 4.1 and its key blocks: H_o for all nine pairs, with Σ = XᵀX/L and 2L²/(e k) in front.

    The paper has e = d and prints (V,V), (Q,Q), (V,Q) and (Q,K).
    """
    (L, d), k, e = X.shape, W_Q.shape[1], W_V.shape[1]
    Sigma, K = X.T @ X / L, commutation(k, d)
    value = Sigma @ W_V @ W_V.T @ Sigma
    mean = Sigma @ W_K @ W_Q.T @ Sigma
    blocks = {
        ("V", "V"): kron(mean @ W_Q @ W_K.T @ Sigma, identity(e)),
        ("Q", "Q"): kron(Sigma, W_K.T @ value @ W_K),
        ("K", "K"): kron(value, W_Q.T @ Sigma @ W_Q),
        ("V", "Q"): kron(mean, W_V.T @ Sigma @ W_K),
        ("Q", "K"): kron(Sigma @ W_Q, W_K.T @ value) @ K,
        ("V", "K"): kron(mean @ W_Q, W_V.T @ Sigma) @ K,
    }
    return with_transposes({pair: 2 * L**2 / (e * k) * block for pair, block in blocks.items()})


def linear_functional_blocks(
    X: TokenRows, W_Q: KeyWeight, W_K: KeyWeight, W_V: ValueWeight, Y: OutputRows
) -> BlockPairs:
    """Remark 4.1 and its key block: H_f for all nine pairs, zero on the diagonal."""
    (L, d), k, e = X.shape, W_Q.shape[1], W_V.shape[1]
    Sigma = X.T @ X / L
    delta = vec(linear_attention(X, W_Q, W_K, W_V) - Y)
    crossed = kron(delta.T, identity(d * e)) @ kron(identity(L), shuffle(e, d))
    coupling = kron(delta.T @ kron(X, W_V.T @ Sigma), identity(d)) @ shuffle(d, d)
    blocks = {
        ("V", "Q"): crossed @ kron(X, Sigma @ W_K),
        ("V", "K"): crossed @ kron(X @ W_Q, Sigma) @ commutation(k, d),
        ("Q", "K"): kron(coupling, identity(k)),
    }
    sizes = {"Q": d * k, "K": d * k, "V": d * e}
    zeros = {(n, n): torch.zeros(size, size, dtype=torch.float64) for n, size in sizes.items()}
    scaled = {pair: 2 / (e * math.sqrt(k)) * block for pair, block in blocks.items()}
    return with_transposes({**zeros, **scaled})


def linear_functional_blocks_of_covariances(
    Sigma: Float[Tensor, "d d"], Omega: Float[Tensor, "d e"], W_Q: KeyWeight, W_K: KeyWeight, W_V: ValueWeight, L: int
) -> BlockPairs:
    """Table 1: H_f off the diagonal, linear in Ω = Xᵀ(F − Y)/L and in Σ = XᵀX/L; X enters in no other way.

    With κ' = 2L/(e √k): H_f(V,Q)[bc, ap] = κ' Ω_ac (ΣW_K)_bp, H_f(Q,K) = κ' (Ω W_Vᵀ Σ) ⊗ I_k and
    H_f(V,K)[bc, ap] = κ' (W_Qᵀ Ω)_pc Σ_ba.
    """
    (d, k), e = W_Q.shape, W_V.shape[1]
    factor = 2 * L / (e * math.sqrt(k))
    return {
        ("V", "Q"): factor * torch.einsum("ac,bp->bcap", Omega, Sigma @ W_K).reshape(d * e, d * k),
        ("V", "K"): factor * torch.einsum("pc,ba->bcap", W_Q.T @ Omega, Sigma).reshape(d * e, d * k),
        ("Q", "K"): factor * kron(Omega @ W_V.T @ Sigma, identity(k)),
    }


def linear_stack(X: TokenRows, layers: Sequence[tuple[Tensor, Tensor, Tensor]], skip: bool) -> TokenRows:
    """D linear attention layers (W_Q, W_K, W_V) one after another, with or without skip connections."""
    for W_Q, W_K, W_V in layers:
        update = linear_attention(X, W_Q, W_K, W_V)
        X = X + update if skip else update
    return X


def mlp_outer_block(weights: Sequence[RealMatrix], inputs: Float[Tensor, "d N"], layer: int) -> RealMatrix:
    """Section 2: H_o(Wⁱ, Wⁱ) = BᵀB ⊗ C Σ Cᵀ as printed, F(x) = W^D … W¹ x, for layer i counted from 0.

    B is the product of the weights above the layer, C of those below, Σ = E[x xᵀ] over the columns of
    `inputs`. This is the block of the loss ½ E‖F(x) − y‖²; the mean square loss has a factor 2/d_out.
    """
    above, below = _product(weights[layer + 1 :], len(weights[layer])), _product(weights[:layer], len(inputs))
    covariance = inputs @ inputs.T / inputs.shape[1]
    return kron(above.T @ above, below @ covariance @ below.T)


def mlp_functional_block(
    weights: Sequence[RealMatrix], Omega: Float[Tensor, "out d"], upper: int, lower: int
) -> RealMatrix:
    """H_f(W^j, W^i)[pq, rs] = (Bᵀ Ω Dᵀ)_ps C_qr for j > i, F = B W^j C W^i D x, Ω = E[∂ℓ/∂F xᵀ]."""
    below = _product(weights[:lower], Omega.shape[1])
    between = _product(weights[lower + 1 : upper], len(weights[lower]))
    above = _product(weights[upper + 1 :], len(weights[upper]))
    block = torch.einsum("ps,qr->pqrs", above.T @ Omega @ below.T, between)
    return block.reshape(weights[upper].numel(), weights[lower].numel())


def _product(weights: Sequence[RealMatrix], width: int) -> RealMatrix:
    """W^b … W^a for the weights a to b; the identity of `width` if there is none."""
    product = identity(width)
    for weight in weights:
        product = weight @ product
    return product
