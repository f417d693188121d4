"""The post-norm block of the block paper and its derivatives as printed: Theorems 4 and 5.

Y = LN(X + F), S = ReLU(Y W_1) W_2 + Y, Z = LN(S), F = softmax(X W_Q W_Kᵀ Xᵀ/√k) X W_V, LN without γ, β and ε. Shapes:
X, Y, S, Z (L, d); W_1 (d, f); W_2 (f, d); W_Q, W_K (d, k); W_V (d, d). D(N; W) = ∂vec N/∂vec W; the second derivative
D²(N; W_i, W_j) = ∂vec D(N; W_i)/∂vec W_j has n_i rows for every entry of N.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from curvoscope.papers.theorems.attention import (
    BlockPairs,
    attention_matrix,
    jacobians,
    key_layout,
    query_layout,
    softmax_jacobian,
    softmax_second_derivative,
    z1,
    z2,
)
from curvoscope.papers.theorems.calculus import RealMatrix, commutation, identity, kron, shuffle, vec
from curvoscope.papers.theorems.layer_norm import centred, deviations, normalised

NAMES = ("1", "2", "Q", "K", "V")
ATTENTION = ("Q", "K", "V")
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class PostNormBlock:
    """The block at one input; `target` is that of the square loss ‖Z − target‖²/(L d)."""

    X: Tensor
    weights: Weights
    target: Tensor

    def attention_of(self, weights: Weights) -> Tensor:
        """F."""
        A = attention_matrix(self.X, weights["Q"], weights["K"])
        return A @ self.X @ weights["V"]

    def middle_of(self, weights: Weights) -> Tensor:
        """Y."""
        return normalised(self.X + self.attention_of(weights))

    def sum_of(self, weights: Weights) -> Tensor:
        """S."""
        Y = self.middle_of(weights)
        return torch.relu(Y @ weights["1"]) @ weights["2"] + Y

    def output_of(self, weights: Weights) -> Tensor:
        """Z."""
        return normalised(self.sum_of(weights))

    @property
    def sizes(self) -> dict[str, int]:
        """n_i, the number of entries of each weight."""
        return {name: self.weights[name].numel() for name in NAMES}

    @cached_property
    def Y(self) -> Tensor:
        """The output of the first norm."""
        return self.middle_of(self.weights)

    @cached_property
    def S(self) -> Tensor:
        """The input of the second norm."""
        return self.sum_of(self.weights)

    @cached_property
    def hidden(self) -> Tensor:
        """ReLU(Y W_1)."""
        return torch.relu(self.Y @ self.weights["1"])

    @cached_property
    def mask(self) -> RealMatrix:
        """diag(vec 1{Y W_1 > 0}), the derivative of Lemma 1."""
        return relu_jacobian(self.Y @ self.weights["1"])

    @cached_property
    def J_Z(self) -> RealMatrix:
        """∂Z/∂S."""
        return row_jacobian(self.S)

    @cached_property
    def H_Z(self) -> RealMatrix:
        """∂²Z/∂S²."""
        return row_second_derivative(self.S)

    @cached_property
    def J_Y(self) -> RealMatrix:
        """∂Y/∂(X + F)."""
        return row_jacobian(self.X + self.attention_of(self.weights))

    @cached_property
    def H_Y(self) -> RealMatrix:
        """∂²Y/∂(X + F)²."""
        return row_second_derivative(self.X + self.attention_of(self.weights))

    @cached_property
    def J_SY(self) -> RealMatrix:
        """∂S/∂Y = (I ⊗ W_2ᵀ) diag(mask) (I ⊗ W_1ᵀ) + I."""
        return self.after_mask @ kron(identity(len(self.X)), self.weights["1"].T) + identity(self.X.numel())

    @cached_property
    def after_mask(self) -> RealMatrix:
        """(I_L ⊗ W_2ᵀ) diag(mask), shape (L d, L f)."""
        return kron(identity(len(self.X)), self.weights["2"].T) @ self.mask

    @cached_property
    def G(self) -> dict[str, Tensor]:
        """∂F/∂W_k for the weights of attention."""
        return jacobians(self.X, *(self.weights[name] for name in ATTENTION))

    @cached_property
    def Phi(self) -> BlockPairs:
        """∂²F/∂W_k∂W_l for the weights of attention."""
        return attention_second_derivatives(self.X, *(self.weights[name] for name in ATTENTION))

    @cached_property
    def B(self) -> dict[str, Tensor]:
        """Theorem 4: ∂S/∂W_i."""
        d, f = self.weights["1"].shape
        first = {"1": self.after_mask @ kron(self.Y, identity(f)), "2": kron(self.hidden, identity(d))}
        return {**first, **{name: self.J_SY @ self.J_Y @ self.G[name] for name in ATTENTION}}

    @cached_property
    def xi(self) -> BlockPairs:
        """∂²S/∂W_i∂W_j, all 25."""
        n = self.sizes
        found = {("1", "1"): _zeros(self, "1"), ("2", "2"): _zeros(self, "2")}
        found["2", "1"], found["1", "2"] = xi_21(self), xi_12(self, *self.weights["1"].shape)
        for name in ATTENTION:
            found["1", name], found["2", name] = xi_1k(self, name, n["1"]), xi_2k(self, name)
            for inner in ("1", "2"):
                found[name, inner] = exchanged(found[inner, name], n[inner], n[name])
            for other in ATTENTION:
                found[name, other] = xi_kl(self, name, other)
        return found

    def hessian_of_output(self, row: str, column: str) -> RealMatrix:
        """Theorem 5: ∂²Z/∂W_i∂W_j = (J_Z ⊗ I_{n_i}) ξ_ij + (I_{L d} ⊗ B_iᵀ) H_Z B_j."""
        outer = kron(identity(self.X.numel()), self.B[row].T) @ self.H_Z @ self.B[column]
        return kron(self.J_Z, identity(self.sizes[row])) @ self.xi[row, column] + outer

    def loss_block(self, row: str, column: str, factor: float) -> RealMatrix:
        """2/(L d) D_iᵀ D_j + factor (vec(Z − target)ᵀ ⊗ I) ∂²Z/∂W_i∂W_j, D_i = J_Z B_i: factor 2/(L d), printed 1."""
        residual = vec(normalised(self.S) - self.target).T
        first, second = self.J_Z @ self.B[row], self.J_Z @ self.B[column]
        functional = kron(residual, identity(self.sizes[row])) @ self.hessian_of_output(row, column)
        return 2 / self.X.numel() * first.T @ second + factor * functional


def relu_jacobian(X: Tensor) -> RealMatrix:
    """Lemma 1: ∂ReLU(X)/∂X = diag(vec 1{X > 0}), almost everywhere."""
    return torch.diag((X > 0).to(torch.float64).flatten())


def exchanged(second: RealMatrix, n_row: int, n_column: int) -> RealMatrix:
    """∂²N/∂W_j∂W_i from ∂²N/∂W_i∂W_j: the two parameter axes exchanged."""
    return second.reshape(-1, n_row, n_column).mT.reshape(-1, n_row)


# ---- LayerNorm, row by row


def row_jacobian(X: Tensor) -> RealMatrix:
    """blockdiag_i (C − z_i z_iᵀ/d)/σ_i with C = I − 1 1ᵀ/d and z = LN(X)."""
    d, z, sigma = X.shape[1], normalised(X), deviations(X)
    C = identity(d) - 1 / d
    return torch.block_diag(*[(C - torch.outer(row, row) / d) / s for row, s in zip(z, sigma, strict=True)])


def row_second_derivative(X: Tensor) -> RealMatrix:
    """∂²z_a/∂x_b∂x_c = −[C_ab z_c + C_ac z_b + C_bc z_a − 3 z_a z_b z_c/d]/(d σ²) for every row, ((L d)², L d)."""
    L, d = X.shape
    C, z, sigma = identity(d) - 1 / d, centred(X) / deviations(X)[:, None], deviations(X)
    entries = torch.zeros(L, d, L, d, L, d, dtype=torch.float64)
    for i, (row, s) in enumerate(zip(z, sigma, strict=True)):
        pairs = torch.einsum("ab,c->abc", C, row)
        cubic = 3 / d * torch.einsum("a,b,c->abc", row, row, row)
        entries[i, :, i, :, i, :] = -(pairs + pairs.mT + pairs.permute(2, 0, 1) - cubic) / (d * s**2)
    return entries.reshape((L * d) ** 2, L * d)


# ---- attention


def attention_second_derivatives(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> BlockPairs:
    """Φ_kl = ∂²F/∂W_k∂W_l, all nine: the printed lemma without its 2/(L d), and the blocks that it leaves out."""
    (L, d), k = X.shape, W_Q.shape[1]
    A = attention_matrix(X, W_Q, W_K)
    Z1, Z2 = z1(X, softmax_jacobian(A)), z2(X, softmax_second_derivative(A))
    query, key = query_layout(W_K), key_layout(W_Q)
    before = kron(identity(L), W_V.T)
    crossed = kron(identity(L), shuffle(d, d)) @ Z1 / math.sqrt(k)
    coupling = kron(before, identity(d)) @ kron(Z1, identity(d)) @ shuffle(d, d) / math.sqrt(k)
    found = {
        ("V", "V"): torch.zeros(L * d * d * d, d * d, dtype=torch.float64),
        ("Q", "Q"): kron(before, query.T) @ Z2 @ query / k,
        ("K", "K"): kron(before, key.T) @ Z2 @ key / k,
        ("Q", "K"): kron(before, query.T) @ Z2 @ key / k + kron(coupling, identity(k)),
        ("V", "Q"): crossed @ query,
        ("V", "K"): crossed @ key,
    }
    sizes = {"Q": d * k, "K": d * k, "V": d * d}
    for row, column in (("Q", "K"), ("V", "Q"), ("V", "K")):
        found[column, row] = exchanged(found[row, column], sizes[row], sizes[column])
    return found


def printed_coupling(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> RealMatrix:
    """The last term of Φ_QK with I_d for I_L, as printed: the factors fit only where L = d."""
    d = X.shape[1]
    Z1 = z1(X, softmax_jacobian(attention_matrix(X, W_Q, W_K)))
    return kron(identity(d), W_V.T, identity(d)) @ kron(Z1, identity(d)) @ shuffle(d, d)


# ---- the second derivatives of S


def xi_21(block: PostNormBlock) -> RealMatrix:
    """∂B_2/∂W_1, which the paper prints under the name ξ_12."""
    (L, d), f = block.X.shape, block.weights["1"].shape[1]
    swap = kron(identity(L), commutation(d, f), identity(d)) @ kron(identity(L * f), vec(identity(d)))
    return swap @ block.mask @ kron(block.Y, identity(f))


def xi_12(block: PostNormBlock, first: int, second: int) -> RealMatrix:
    """∂B_1/∂W_2 = (I ⊗ (Y ⊗ I)ᵀ diag(mask)) (I ⊗ K_{d,L} ⊗ I)(vec I_L ⊗ I) K_{d,f}; the proof prints K_{f,d}."""
    (L, d), f = block.X.shape, block.weights["1"].shape[1]
    before = kron(identity(L * d), kron(block.Y, identity(f)).T @ block.mask)
    swap = kron(identity(L), commutation(d, L), identity(f)) @ kron(vec(identity(L)), identity(d * f))
    return before @ swap @ commutation(first, second)


def xi_21_as_printed(block: PostNormBlock) -> RealMatrix:
    """(I ⊗ W_2ᵀ) diag(mask) (I ⊗ K_{f,d} ⊗ I)(I ⊗ vec I_f): the factors do not fit together."""
    (L, d), f = block.X.shape, block.weights["1"].shape[1]
    swap = kron(identity(L), commutation(f, d), identity(f)) @ kron(identity(L * d), vec(identity(f)))
    return block.after_mask @ swap


def xi_1k(block: PostNormBlock, name: str, size: int) -> RealMatrix:
    """∂B_1/∂W_k = ((I ⊗ W_2ᵀ) diag(mask) ⊗ I_{n_1}) (I ⊗ K_{f,d} ⊗ I)(I ⊗ vec I_f) J_Y G_k; printed with I_{n_k}."""
    (L, d), f = block.X.shape, block.weights["1"].shape[1]
    swap = kron(identity(L), commutation(f, d), identity(f)) @ kron(identity(L * d), vec(identity(f)))
    return kron(block.after_mask, identity(size)) @ swap @ block.J_Y @ block.G[name]


def xi_2k(block: PostNormBlock, name: str) -> RealMatrix:
    """∂B_2/∂W_k = (I ⊗ K_{d,f} ⊗ I)(I ⊗ vec I_d) diag(mask) (I ⊗ W_1ᵀ) J_Y G_k."""
    (L, d), f = block.X.shape, block.weights["1"].shape[1]
    swap = kron(identity(L), commutation(d, f), identity(d)) @ kron(identity(L * f), vec(identity(d)))
    return swap @ block.mask @ kron(identity(L), block.weights["1"].T) @ block.J_Y @ block.G[name]


def xi_kl(block: PostNormBlock, row: str, column: str) -> RealMatrix:
    """∂B_k/∂W_l = (J_SY ⊗ I)[(I ⊗ G_kᵀ) H_Y G_l + (J_Y ⊗ I) Φ_kl]."""
    size = block.sizes[row]
    curved = kron(identity(block.X.numel()), block.G[row].T) @ block.H_Y @ block.G[column]
    return kron(block.J_SY, identity(size)) @ (curved + kron(block.J_Y, identity(size)) @ block.Phi[row, column])


def _zeros(block: PostNormBlock, name: str) -> RealMatrix:
    n = block.sizes[name]
    return torch.zeros(block.X.numel() * n, n, dtype=torch.float64)
