"""LayerNorm's derivatives as the block paper prints them: Theorems 2 and 3, the printed and the corrected pieces.

LN(X) = P M with M = X − X 1 1ᵀ/d, D = diag(σ_1, …, σ_L), P = D⁻¹, σ_i = ‖M_i‖/√d: no γ, no β, no ε. X (L, d). Rows of a
Jacobian are entries of the function and columns entries of X, both row-major.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from curvoscope.papers.theorems.calculus import RealMatrix, commutation, identity, kron, unit, vec


def centred(X: Float[Tensor, "L d"]) -> Float[Tensor, "L d"]:
    """M."""
    return X - X.mean(-1, keepdim=True)


def deviations(X: Float[Tensor, "L d"]) -> Float[Tensor, "L"]:
    """σ, the standard deviations of the rows."""
    return centred(X).square().mean(-1).sqrt()


def normalised(X: Float[Tensor, "L d"]) -> Float[Tensor, "L d"]:
    """LN(X)."""
    return centred(X) / deviations(X)[:, None]


def inverse_deviations(X: Float[Tensor, "L d"]) -> Float[Tensor, "L L"]:
    """P = diag(1/σ)."""
    return torch.diag(1 / deviations(X))


def centring(L: int, d: int) -> RealMatrix:
    """G = ∂M/∂X = I − (I_L ⊗ 1 1ᵀ)/d, shape (L d, L d)."""
    return identity(L * d) - kron(identity(L), torch.ones(d, d, dtype=torch.float64)) / d


def diagonal_embedding(n: int) -> RealMatrix:
    """[e_1 ⊗ e_1, …, e_n ⊗ e_n], shape (n², n): vec diag(v) = E v."""
    return torch.cat([kron(unit(i, n), unit(i, n)) for i in range(n)], 1)


# ---- Theorem 2


def deviation_derivative(X: Float[Tensor, "L d"], factor: float) -> RealMatrix:
    """∂D/∂X = factor · E A2 (I_L ⊗ 1ᵀ) A3 G, shape (L², L d): factor 1/√d, printed 1."""
    return factor * diagonal_embedding(len(X)) @ inverse_root(X) @ _inner(X)


def inverse_root(X: Float[Tensor, "L d"]) -> Float[Tensor, "L L"]:
    """A2 = diag(‖M_i‖)⁻¹ = P/√d."""
    return inverse_deviations(X) / math.sqrt(X.shape[1])


def inverse_derivative(X: Float[Tensor, "L d"]) -> RealMatrix:
    """∂P/∂X = −(D⁻¹ ⊗ D⁻ᵀ) ∂D/∂X, shape (L², L d)."""
    return _negative_inverses(X) @ deviation_derivative(X, 1 / math.sqrt(X.shape[1]))


def jacobian(X: Float[Tensor, "L d"]) -> RealMatrix:
    """Theorem 2: ∂LN/∂X = (P ⊗ I_d) G + (I_L ⊗ Mᵀ) ∂P/∂X."""
    return scaling_term(X) + kron(identity(len(X)), centred(X).T) @ inverse_derivative(X)


def scaling_term(X: Float[Tensor, "L d"]) -> RealMatrix:
    """(P ⊗ I_d) G: what is left when the deviations are held fixed."""
    return kron(inverse_deviations(X), identity(X.shape[1])) @ centring(*X.shape)


# ---- Theorem 3


def scaling_derivative(X: Float[Tensor, "L d"]) -> RealMatrix:
    """∂(P ⊗ I_d)/∂X = (I_L ⊗ K_{d,L} ⊗ I_d)(I_{L²} ⊗ vec I_d) ∂P/∂X."""
    L, d = X.shape
    swap = kron(identity(L), commutation(d, L), identity(d))
    return swap @ kron(identity(L * L), vec(identity(d))) @ inverse_derivative(X)


def scaling_derivative_as_printed(X: Float[Tensor, "L d"]) -> RealMatrix:
    """The same with I_L, K_{L,L} and vec I_L, as printed: (L⁴, L d) instead of (L² d², L d)."""
    L = len(X)
    swap = kron(identity(L), commutation(L, L), identity(L))
    return swap @ kron(identity(L * L), vec(identity(L))) @ inverse_derivative(X)


def mean_derivative(X: Float[Tensor, "L d"], exchange: RealMatrix) -> RealMatrix:
    """∂(I_L ⊗ Mᵀ)/∂X = (I_L ⊗ K_{d,L} ⊗ I_L)(vec I_L ⊗ I_{L d}) K_{d,L} G; `exchange` is the last K."""
    L, d = X.shape
    swap = kron(identity(L), commutation(d, L), identity(L))
    return swap @ kron(vec(identity(L)), identity(L * d)) @ exchange @ centring(L, d)


def inverse_second_derivative(X: Float[Tensor, "L d"], both: bool, factor: float) -> RealMatrix:
    """∂²P/∂X² = [(A1 ⊗ I) ∂B1 + (I ⊗ B1ᵀ) ∂A1]/√d with A1 = −D⁻¹ ⊗ D⁻ᵀ and B1 = E A2 (I_L ⊗ 1ᵀ) A3 G.

    As printed 1/√d stands at the first summand only (`both` False), and ∂D in ∂A1 has the factor 1 (`factor`).
    """
    L, d = X.shape
    E, B2 = diagonal_embedding(L), _inner(X)
    B1 = E @ inverse_root(X) @ B2
    dA3 = diagonal_embedding(L * d) @ centring(L, d)
    dB2 = kron(_sums(L, d), identity(L * d)) @ kron(identity(L * d), centring(L, d).T) @ dA3
    dA2 = inverse_derivative(X) / math.sqrt(d)  # promised, never written
    dB1 = kron(E, identity(L * d)) @ (kron(inverse_root(X), identity(L * d)) @ dB2 + kron(identity(L), B2.T) @ dA2)
    first = kron(_negative_inverses(X), identity(L * d)) @ dB1 / math.sqrt(d)
    second = kron(identity(L * L), B1.T) @ _inverses_derivative(X, factor)
    return first + (second / math.sqrt(d) if both else second)


def second_derivative(X: Float[Tensor, "L d"], dPI: RealMatrix, d2P: RealMatrix, dIM: RealMatrix) -> RealMatrix:
    """Theorem 3: (I ⊗ Gᵀ) ∂(P ⊗ I) + ((I ⊗ Mᵀ) ⊗ I) ∂²P + (I ⊗ ∂Pᵀ) ∂(I ⊗ Mᵀ), shape ((L d)², L d).

    The fourth term, with ∂G, is zero.
    """
    L, d = X.shape
    size = L * d
    return (
        kron(identity(size), centring(L, d).T) @ dPI
        + kron(identity(L), centred(X).T, identity(size)) @ d2P
        + kron(identity(size), inverse_derivative(X).T) @ dIM
    )


# ---- what the norms are


def exact_jacobian_norm(X: Float[Tensor, "L d"]) -> float:
    """‖∂LN/∂X‖ = 1/min σ for d ≥ 3."""
    return 1 / float(deviations(X).min())


def exact_second_derivative_norm(X: Float[Tensor, "L d"]) -> float:
    """‖∂²LN/∂X²‖ = √(max(d − 2, 2)/d)/min σ² for d ≥ 3, in the layout of Theorem 3."""
    d = X.shape[1]
    return math.sqrt(max(d - 2, 2) / d) / float(deviations(X).min()) ** 2


def norm_lemma(X: Float[Tensor, "L d"], smallest: float) -> tuple[float, float]:
    """The paper's bounds on ‖∂LN/∂X‖ and ‖∂²LN/∂X²‖ with its σ_min: the smallest σ, printed the smallest ‖M_i‖."""
    L, d = X.shape
    x = float(torch.linalg.matrix_norm(X, 2))
    first = 1 / smallest + x**2 / (math.sqrt(d) * smallest**3)
    second = x / smallest**3 * (1 + math.sqrt(L / d)) + x**2 / (math.sqrt(d) * smallest**3)
    return first, second + 3 * x**3 / (d * smallest**5)


def _sums(L: int, d: int) -> RealMatrix:
    """I_L ⊗ 1ᵀ, shape (L, L d)."""
    return kron(identity(L), torch.ones(1, d, dtype=torch.float64))


def _inner(X: Float[Tensor, "L d"]) -> RealMatrix:
    """B2 = (I_L ⊗ 1ᵀ) A3 G with A3 = diag(vec M), shape (L, L d)."""
    return _sums(*X.shape) @ torch.diag(centred(X).flatten()) @ centring(*X.shape)


def _negative_inverses(X: Float[Tensor, "L d"]) -> RealMatrix:
    """A1 = −D⁻¹ ⊗ D⁻ᵀ = −P ⊗ P, shape (L², L²)."""
    P = inverse_deviations(X)
    return -kron(P, P.T)


def _inverses_derivative(X: Float[Tensor, "L d"], factor: float) -> RealMatrix:
    """∂A1/∂X by the Kronecker rule, with ∂(D⁻¹) and ∂(D⁻ᵀ) from ∂D."""
    L, P = len(X), inverse_deviations(X)
    dD = deviation_derivative(X, factor)
    first = kron(identity(L * L), vec(P.T)) @ kron(P, P.T) @ dD
    second = kron(vec(-P), identity(L * L)) @ commutation(L, L) @ _negative_inverses(X) @ dD
    return kron(identity(L), commutation(L, L), identity(L)) @ (first + second)
