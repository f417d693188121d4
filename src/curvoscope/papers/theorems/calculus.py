"""The matrix calculus of the paper: row-major vec, Kronecker and Khatri-Rao products, commutation matrices.

Everything is float64 and dense, and written the way the paper prints it. A vector is a column, shape (n, 1).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

RealMatrix = Float[Tensor, "_ _"]
BlockTensors = Mapping[tuple[str, str], Tensor]


def identity(size: int) -> RealMatrix:
    """I of shape (size, size)."""
    return torch.eye(size, dtype=torch.float64)


def unit(index: int, size: int) -> RealMatrix:
    """The standard basis column e_index, shape (size, 1)."""
    return identity(size)[:, index : index + 1]


def vec(matrix: Tensor) -> RealMatrix:
    """vec_r: the rows one after another, as one column."""
    return matrix.reshape(-1, 1)


def vec_columns(matrix: RealMatrix) -> RealMatrix:
    """vec_c: the columns one after another, as one column."""
    return vec(matrix.T)


def kron(*factors: RealMatrix) -> RealMatrix:
    """The Kronecker product of all factors, left to right (Definition A.1)."""
    return reduce(_kron, factors)


def khatri_rao(*stacks: Sequence[RealMatrix]) -> RealMatrix:
    """Definition A.2 for matrices cut into block rows: block row i is the Kronecker product of the i-th blocks."""
    return torch.cat([kron(*blocks) for blocks in zip(*stacks, strict=True)])


def commutation(m: int, n: int) -> RealMatrix:
    """K_{m,n} of Magnus and Neudecker: K vec_c(A) = vec_c(A^T) for A of shape (m, n).

    In row-major terms K_{m,n} vec(B) = vec(B^T) for B of shape (n, m). Equations (16) to (18), Lemma B.3 and
    the theorems mean this matrix.
    """
    images = torch.arange(n * m).reshape(n, m).T.reshape(-1)
    return identity(n * m)[images]


def commutation_of_lemma_b2(M: int, N: int) -> RealMatrix:
    """K(M, N) of Lemma B.2: (K v)_(nm) = v_(mn), that is K vec(B) = vec(B^T) for B of shape (M, N).

    K(M, N) = K_{N,M}: the two conventions differ whenever M and N do.
    """
    exchange = torch.zeros(N, M, M, N, dtype=torch.float64)
    for m in range(M):
        for n in range(N):
            exchange[n, m, m, n] = 1.0
    return exchange.reshape(N * M, M * N)


def shuffle(outputs: int, inputs: int) -> RealMatrix:
    """The shuffling matrix S of Theorem 3.2, shape (outputs^2 inputs, inputs): S[(c, b, c'), b'] = δ_cc' δ_bb'.

    The paper prints it for outputs = inputs, where both conventions of the commutation matrix agree. With
    different sizes it needs the convention of Lemma B.2.
    """
    return kron(identity(outputs), commutation_of_lemma_b2(outputs, inputs)) @ kron(
        vec(identity(outputs)), identity(inputs)
    )


def kronecker_derivatives(X: RealMatrix, Y: RealMatrix, K: RealMatrix) -> tuple[RealMatrix, RealMatrix]:
    """Equations (16) and (17) with the commutation matrix K: ∂(X ⊗ Y)/∂X = (I_n ⊗ K ⊗ I_r)(I_nq ⊗ vec Y) and
    ∂(X ⊗ Y)/∂Y = (I_n ⊗ K ⊗ I_r)(vec X ⊗ I_pr), for X n×q, Y p×r."""
    swap = kron(identity(len(X)), K, identity(Y.shape[1]))
    return swap @ kron(identity(X.numel()), vec(Y)), swap @ kron(vec(X), identity(Y.numel()))


def assemble(blocks: BlockTensors, names: Iterable[str]) -> RealMatrix:
    """The matrix whose block (i, j) is `blocks[i, j]`, in the order of `names`."""
    names = tuple(names)
    return torch.cat([torch.cat([blocks[row, column] for column in names], 1) for row in names])


def with_transposes(blocks: BlockTensors) -> dict[tuple[str, str], Tensor]:
    """The blocks given and, by symmetry, those on the other side of the diagonal."""
    return {**{(column, row): block.T for (row, column), block in blocks.items()}, **blocks}


def _kron(left: RealMatrix, right: RealMatrix) -> RealMatrix:
    # torch.kron raises on some column views, such as a singular vector cut out of an SVD.
    product = left[:, None, :, None] * right[None, :, None, :]
    return product.reshape(len(left) * len(right), -1)


def rank(matrix: RealMatrix) -> int:
    """The number of singular values above 1e-10 of the largest entry; 0 for the zero matrix."""
    return int(torch.linalg.matrix_rank(matrix, atol=1e-10 * float(matrix.abs().max()), rtol=0.0))
