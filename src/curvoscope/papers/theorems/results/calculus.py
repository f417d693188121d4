"""Appendix A and the helper lemmas: equations (6) to (18), (20), Lemmas B.2, B.3 and D.1."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from curvoscope.papers.theorems.autodiff import jacobian
from curvoscope.papers.theorems.calculus import (
    commutation,
    commutation_of_lemma_b2,
    identity,
    khatri_rao,
    kron,
    kronecker_derivatives,
    rank,
    shuffle,
    vec,
    vec_columns,
)
from curvoscope.papers.theorems.registry import PAPER, Fails, relative_error
from curvoscope.papers.theorems.results.instances import Draw

_OTHER_CONVENTION = partial(Fails, form="with the commutation matrix of Lemma B.2 instead")


@PAPER.holds("Definition A.1")
def kronecker_entries(seed: int) -> Iterator[float]:
    """Block (i, j) of A ⊗ B is a_ij B."""
    draw = Draw(seed, 1)
    A, B = draw.normal(2, 3), draw.normal(4, 5)
    blocks = torch.cat([torch.cat([entry * B for entry in row], dim=1) for row in A])
    yield relative_error(kron(A, B), blocks)


@PAPER.holds("Equation (6)")
def distributivity(seed: int) -> Iterator[float]:
    """A ⊗ (B + C) = A ⊗ B + A ⊗ C, and from the other side."""
    draw = Draw(seed, 6)
    A, B, C = draw.normal(2, 3), draw.normal(4, 5), draw.normal(4, 5)
    yield relative_error(kron(A, B + C), kron(A, B) + kron(A, C))
    yield relative_error(kron(B + C, A), kron(B, A) + kron(C, A))


@PAPER.holds("Equation (7)")
def scalar_factor(seed: int) -> Iterator[float]:
    """(aA) ⊗ B = A ⊗ (aB) = a(A ⊗ B)."""
    draw = Draw(seed, 7)
    A, B, a = draw.normal(2, 3), draw.normal(4, 5), draw.normal(1)
    yield from (relative_error(product, a * kron(A, B)) for product in (kron(a * A, B), kron(A, a * B)))


@PAPER.holds("Equation (8)")
def associativity(seed: int) -> Iterator[float]:
    """(A ⊗ B) ⊗ C = A ⊗ (B ⊗ C)."""
    draw = Draw(seed, 8)
    A, B, C = draw.normal(2, 3), draw.normal(4, 1), draw.normal(3, 2)
    yield relative_error(kron(kron(A, B), C), kron(A, kron(B, C)))


@PAPER.holds("Equation (9)")
def mixed_product(seed: int) -> Iterator[float]:
    """(A ⊗ B)(C ⊗ D) = AC ⊗ BD."""
    draw = Draw(seed, 9)
    A, B, C, D = draw.normal(2, 3), draw.normal(4, 2), draw.normal(3, 5), draw.normal(2, 6)
    yield relative_error(kron(A, B) @ kron(C, D), kron(A @ C, B @ D))


@PAPER.holds("Equation (10)")
def transposed_product(seed: int) -> Iterator[float]:
    """(A ⊗ B)ᵀ = Aᵀ ⊗ Bᵀ."""
    draw = Draw(seed, 10)
    A, B = draw.normal(2, 3), draw.normal(4, 5)
    yield relative_error(kron(A, B).T, kron(A.T, B.T))


@PAPER.holds("Equation (11)")
def product_of_vectors(seed: int) -> Iterator[float]:
    """aᵀ ⊗ b = b aᵀ = b ⊗ aᵀ."""
    draw = Draw(seed, 11)
    a, b = draw.normal(3, 1), draw.normal(4, 1)
    yield from (relative_error(product, b @ a.T) for product in (kron(a.T, b), kron(b, a.T)))


@PAPER.holds("Equation (12)")
def row_times_matrix(seed: int) -> Iterator[float]:
    """A(vᵀ ⊗ B) = vᵀ ⊗ AB."""
    draw = Draw(seed, 12)
    v, A, B = draw.normal(3, 1), draw.normal(5, 4), draw.normal(4, 2)
    yield relative_error(A @ kron(v.T, B), kron(v.T, A @ B))


@PAPER.corrected("Equation (13)", "vec A = (A ⊗ I_m) vec I_m for A n×m (E1)")
def vec_of_matrix(seed: int) -> Iterator[float]:
    """As printed vec A stands on both sides and the identity has the wrong size; the same in its proof."""
    draw = Draw(seed, 13)
    wide, square = draw.normal(3, 4), draw.normal(3, 3)
    yield relative_error(kron(wide, identity(4)) @ vec(identity(4)), vec(wide))
    yield relative_error(kron(identity(4), wide) @ vec_columns(identity(4)), vec_columns(wide))
    yield Fails(relative_error(kron(wide, identity(3)) @ vec(wide), vec(wide)))
    yield Fails(relative_error(kron(square, identity(3)) @ vec(square), vec(square)))


@PAPER.holds("Equation (14)")
def block_diagonal_product(seed: int) -> Iterator[float]:
    """blockdiag(A_i)(B ⊗ C) = stack_i (b_iᵀ ⊗ A_i C)."""
    draw = Draw(seed, 14)
    As, B, C = [draw.normal(5, 3) for _ in range(4)], draw.normal(4, 2), draw.normal(3, 6)
    stacked = khatri_rao([row[None, :] for row in B], [A @ C for A in As])
    yield relative_error(torch.block_diag(*As) @ kron(B, C), stacked)


@PAPER.holds("Equation (15)")
def matrix_product_derivative(seed: int) -> Iterator[float]:
    """∂(AXB)/∂X = A ⊗ Bᵀ."""
    draw = Draw(seed, 15)
    A, X, B = draw.normal(2, 3), draw.normal(3, 4), draw.normal(4, 5)
    yield relative_error(kron(A, B.T), jacobian(lambda inner: A @ inner @ B, X))


@PAPER.holds("Equation (16)", "K_{p,q} of Magnus and Neudecker (E2)")
def kronecker_derivative_left(seed: int) -> Iterator[float]:
    """∂(X ⊗ Y)/∂X = (I_n ⊗ K_{p,q} ⊗ I_r)(I_nq ⊗ vec Y), X n×q, Y p×r."""
    yield from _kronecker_derivative_errors(Draw(seed, 16), 0)


@PAPER.holds("Equation (17)", "K_{p,q} of Magnus and Neudecker (E2)")
def kronecker_derivative_right(seed: int) -> Iterator[float]:
    """∂(X ⊗ Y)/∂Y = (I_n ⊗ K_{p,q} ⊗ I_r)(vec X ⊗ I_pr)."""
    yield from _kronecker_derivative_errors(Draw(seed, 17), 1)


@PAPER.holds("Equation (18)", "K_{q,n} of Magnus and Neudecker (E2)")
def transposition_derivative(seed: int) -> Iterator[float]:
    """∂Xᵀ/∂X = K_{q,n} for X n×q."""
    X = Draw(seed, 18).normal(3, 5)
    reference = jacobian(lambda matrix: matrix.T, X)
    for error, K in _conventions(5, 3):
        yield error(relative_error(K, reference))


@PAPER.holds("Lemma B.2, equation (20)", "in its own convention K(M, N) (E2)")
def two_forms_of_the_shuffle(seed: int) -> Iterator[float]:
    """(I_M ⊗ K(M,N))(vec I_M ⊗ I_N) = (K(N,M) ⊗ I_M)(I_N ⊗ vec I_M), and both are δ_cc' δ_bb'."""
    draw = Draw(seed, 20)
    M, N = draw.integer(2, 3), draw.integer(4, 5)
    entries = torch.einsum("ce,bf->cbef", identity(M), identity(N)).reshape(M * N * M, N)

    def sides(K: Callable[[int, int], Tensor]) -> tuple[Tensor, Tensor]:
        left = kron(identity(M), K(M, N)) @ kron(vec(identity(M)), identity(N))
        right = kron(K(N, M), identity(M)) @ kron(identity(N), vec(identity(M)))
        return left, right

    left, right = sides(commutation_of_lemma_b2)
    yield from (relative_error(form, entries) for form in (left, right, shuffle(M, N)))
    yield Fails(relative_error(*sides(commutation)), "with K_{M,N} of Magnus and Neudecker instead")


@PAPER.holds("Lemma B.3", "K_{m,n} of Magnus and Neudecker (E2)")
def commuted_outer_product(seed: int) -> Iterator[float]:
    """(I_m ⊗ K_{m,n})(vec A ⊗ A) = (A ⊗ A ⊗ I_n)(I_n ⊗ K_{n,n})(vec I_n ⊗ I_n) for A m×n."""
    m, n = 4, 3
    A = Draw(seed, 23).normal(m, n)
    right = kron(A, A, identity(n)) @ kron(identity(n), commutation(n, n)) @ kron(vec(identity(n)), identity(n))
    for error, K in _conventions(m, n):
        yield error(relative_error(kron(identity(m), K) @ kron(vec(A), A), right))


@PAPER.holds("Lemma D.1", "30 draws of sizes and ranks; error in units of the rank")
def rank_of_stacked_kroneckers(seed: int) -> Iterator[float]:
    """rk [I_q ⊗ A; B ⊗ I_n] = q rk A + n rk B − rk A rk B for A m×n, B p×q."""
    draw = Draw(seed, 41)
    for _ in range(30):
        m, n, p, q = (draw.integer(1, 5) for _ in range(4))
        rank_A, rank_B = draw.integer(0, min(m, n)), draw.integer(0, min(p, q))
        A = draw.normal(m, rank_A) @ draw.normal(rank_A, n)
        B = draw.normal(p, rank_B) @ draw.normal(rank_B, q)
        found = rank(torch.cat([kron(identity(q), A), kron(B, identity(n))]))
        expected = q * rank_A + n * rank_B - rank_A * rank_B
        yield abs(found - expected) / max(expected, 1)


def _kronecker_derivative_errors(draw: Draw, side: int) -> Iterator[float]:
    """Of ∂(X ⊗ Y) in X, side 0, or in Y, side 1."""
    X, Y = draw.normal(3, 5), draw.normal(2, 4)
    reference = (jacobian(lambda left: kron(left, Y), X), jacobian(lambda right: kron(X, right), Y))[side]
    for error, K in _conventions(2, 5):
        yield error(relative_error(kronecker_derivatives(X, Y, K)[side], reference))


def _conventions(m: int, n: int) -> tuple[tuple[Callable[[float], float], Tensor], ...]:
    """K_{m,n} of Magnus and Neudecker, which must hold, and that of Lemma B.2, which must fail."""
    return (float, commutation(m, n)), (_OTHER_CONVENTION, commutation_of_lemma_b2(m, n))
