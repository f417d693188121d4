"""The block paper's matrix calculus: derivatives of products, inverses and roots, and inequalities between norms."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from curvoscope.papers.theorems.autodiff import (
    Parameters,
    differentiate,
    hessian,
    jacobian,
    mean_square,
    second_derivative,
)
from curvoscope.papers.theorems.calculus import commutation, identity, kron, kronecker_derivatives, vec
from curvoscope.papers.theorems.layer_norm import diagonal_embedding
from curvoscope.papers.theorems.norm_bounds import norm
from curvoscope.papers.theorems.registry import BLOCK_PAPER, Fails, excess, relative_error
from curvoscope.papers.theorems.results.instances import Draw


@BLOCK_PAPER.holds(
    "Block paper, Kronecker derivative", "∂(X ⊗ Y)/∂X = (I_n ⊗ K_{p,q} ⊗ I_r)(I_nq ⊗ vec Y), X n×q, Y p×r"
)
def kronecker_derivative(seed: int) -> Iterator[float]:
    """In either factor; the order of the commutation matrix matters if p ≠ q."""
    draw = Draw(seed, 20, 1)
    X, Y = draw.normal(3, 5), draw.normal(2, 4)
    references = jacobian(lambda W: torch.kron(W, Y), X), jacobian(lambda W: torch.kron(X, W), Y)

    def errors(K: Tensor) -> list[float]:
        return [relative_error(*pair) for pair in zip(kronecker_derivatives(X, Y, K), references, strict=True)]

    yield from errors(commutation(2, 5))
    yield from (Fails(error, "K_{q,p} instead") for error in errors(commutation(5, 2)))


@BLOCK_PAPER.holds("Block paper, product rules", "of A(W) B(W) and of A(W) ⊗ B(W)")
def product_rules(seed: int) -> Iterator[float]:
    """D(AB) = (A ⊗ I) D(B) + (I ⊗ Bᵀ) D(A), and the Kronecker rule."""
    draw = Draw(seed, 20, 2)
    W, C = draw.normal(3, 4), draw.normal(4, 3)

    def left(weight: Tensor) -> Tensor:
        return torch.sin(C @ weight)  # (4, 4)

    def right(weight: Tensor) -> Tensor:
        return torch.cos(weight.T @ weight)[:, :3]  # (4, 3)

    A, B, dA, dB = left(W), right(W), jacobian(left, W), jacobian(right, W)
    (n, q), (p, r) = A.shape, B.shape
    product = kron(A, identity(r)) @ dB + kron(identity(n), B.T) @ dA
    in_A, in_B = kronecker_derivatives(A, B, commutation(p, q))
    kronecker = in_B @ dB + in_A @ dA
    yield relative_error(product, jacobian(lambda weight: left(weight) @ right(weight), W))
    yield relative_error(kronecker, jacobian(lambda weight: torch.kron(left(weight), right(weight)), W))


@BLOCK_PAPER.holds("Block paper, inverse, diagonal, roots", "D(W⁻¹) = −W⁻¹ ⊗ W⁻ᵀ, D(diag v), D(A^∘2), D(A^∘½)")
def elementary_derivatives(seed: int) -> Iterator[float]:
    """The elementary maps that Theorems 2 and 3 are composed of."""
    draw = Draw(seed, 20, 3)
    W, v, A = draw.normal(4, 4) + 3 * identity(4), draw.normal(4), draw.normal(3, 4)
    inverse, positive = torch.linalg.inv(W), A.abs() + 0.3
    yield relative_error(-kron(inverse, inverse.T), jacobian(torch.linalg.inv, W))
    yield relative_error(diagonal_embedding(4), jacobian(torch.diag, v))
    yield relative_error(2 * torch.diag(A.flatten()), jacobian(torch.square, A))
    yield relative_error(torch.diag(0.5 / positive.sqrt().flatten()), jacobian(torch.sqrt, positive))


@BLOCK_PAPER.holds("Block paper, norm table", "between max, 1, ∞, 2 and Frobenius norms")
def norm_table(seed: int) -> Iterator[float]:
    """‖·‖_i ≤ T_ij ‖·‖_j for all 25 pairs."""
    draw = Draw(seed, 20, 4)
    for _ in range(60):
        m, n = draw.integer(1, 6), draw.integer(1, 6)
        M = draw.normal(m, n)
        sums = M.abs()
        norms = [float(v) for v in (sums.max(), sums.sum(0).max(), sums.sum(1).max(), norm(M), M.norm())]
        r, c, both, rank = math.sqrt(m), math.sqrt(n), math.sqrt(m * n), math.sqrt(min(m, n))
        table: list[list[float]] = [
            [1, 1, 1, 1, 1],
            [m, 1, m, r, r],
            [n, n, 1, c, c],
            [both, c, r, 1, 1],
            [both, c, r, rank, 1],
        ]
        yield from (excess(norms[i], table[i][j] * norms[j]) for i in range(5) for j in range(5))


@BLOCK_PAPER.holds("Block paper, norm of a block matrix", "≤ √(row blocks · column blocks) max ‖B_ij‖")
def block_matrix_norm(seed: int) -> Iterator[float]:
    """With equality to the maximum for block-diagonal matrices."""
    draw = Draw(seed, 20, 5)
    blocks = [[draw.normal(2, 3) for _ in range(4)] for _ in range(3)]
    largest_block = max(norm(block) for row in blocks for block in row)
    whole = torch.cat([torch.cat(row, 1) for row in blocks])
    diagonal = norm(torch.block_diag(*blocks[0])) / max(norm(block) for block in blocks[0]) - 1
    yield excess(norm(whole), math.sqrt(12) * largest_block)
    yield abs(diagonal)


@BLOCK_PAPER.corrected(
    "Block paper, Gauss-Newton split",
    "an identity, not an approximation; ℓ' = 2/(L d) vec(F − Y)ᵀ, printed without the factor",
)
def gauss_newton_identity(seed: int) -> Iterator[float]:
    """H_ij = D_iᵀ ℓ'' D_j + (ℓ' ⊗ I_{n_i}) D²_ij."""
    draw = Draw(seed, 20, 6)
    X, Y = draw.normal(3, 4), draw.normal(3, 4)
    weights = {"a": draw.normal(4, 2), "b": draw.normal(2, 4)}

    def network(parameters: Parameters) -> Tensor:
        return torch.tanh(X @ parameters["a"]) @ parameters["b"]

    found = differentiate(network, mean_square(Y), weights)
    curvature = hessian(mean_square(Y), found.output)
    outer = found.jacobian["a"].T @ curvature @ found.jacobian["b"]
    second = second_derivative(network, weights, "a", "b")

    def split(factor: float) -> float:
        functional = kron(factor * vec(found.output - Y).T, identity(8)) @ second
        return relative_error(outer + functional, found.hessian["a", "b"])

    yield split(2 / 12)
    yield Fails(split(1.0))
