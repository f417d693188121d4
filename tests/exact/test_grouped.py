"""Matrices over groups of tokens against the same matrices written out, block by block."""

import pytest
import torch
from torch import Tensor

from curvoscope.exact.grouped import Grouped
from curvoscope.losses import PairCurvature, ScalarCurvature, TokenCurvature
from reference import normal

TOKENS = 12


def grouped(seed: int, size: int, rows: int, columns: int, symmetric: bool = False) -> Grouped:
    blocks = normal(seed)(TOKENS // size, size * rows, size * columns)
    return Grouped(blocks + blocks.mT if symmetric else blocks, size, symmetric)


def truth(matrix: Grouped) -> Tensor:
    """Tokens are in order, so groups stand on the diagonal."""
    return torch.block_diag(*matrix.blocks)


SIZES = [(1, 1), (1, 3), (3, 1), (2, 4), (6, 2), (3, 3), (1, 12), (12, 4)]


class TestAlgebra:
    @pytest.mark.parametrize("sizes", SIZES)
    def test_products(self, sizes):
        last, first = grouped(1, sizes[0], 2, 3), grouped(2, sizes[1], 3, 5)
        found = last.after(first)
        assert found.size == max(sizes) and found.row_shape == (TOKENS, 2) and found.column_shape == (TOKENS, 5)
        assert torch.allclose(truth(found), truth(last) @ truth(first))

    @pytest.mark.parametrize("sizes", SIZES)
    def test_sandwiches(self, sizes):
        jacobian, curvature = grouped(3, sizes[0], 2, 3), grouped(4, sizes[1], 2, 2, symmetric=True)
        found = jacobian.sandwich(curvature)
        assert found.symmetric and found.size == max(sizes)
        assert torch.allclose(truth(found), truth(jacobian).T @ truth(curvature) @ truth(jacobian))
        assert torch.equal(found.blocks, found.blocks.mT)

    @pytest.mark.parametrize("sizes", SIZES)
    @pytest.mark.parametrize("symmetric", [(True, True), (True, False), (False, False)])
    def test_sums(self, sizes, symmetric):
        first, second = (
            grouped(5 + i, size, 3, 3, even) for i, (size, even) in enumerate(zip(sizes, symmetric, strict=True))
        )
        for found in (first.plus(second), second.plus(first), first + second):
            assert found.symmetric == all(symmetric) and found.size == max(sizes)
            assert torch.allclose(truth(found), truth(first) + truth(second))

    def test_residual(self):
        found = grouped(7, 3, 2, 2).plus_identity()
        assert found.size == 3 and not found.symmetric
        assert torch.allclose(truth(found), truth(grouped(7, 3, 2, 2)) + torch.eye(2 * TOKENS).double())


@pytest.mark.parametrize("size", [1, 3, 12])
@pytest.mark.parametrize(("rows", "columns", "symmetric"), [(2, 3, False), (3, 2, False), (2, 2, False), (2, 2, True)])
def test_answers(size, rows, columns, symmetric):
    matrix = grouped(8, size, rows, columns, symmetric)
    expected = truth(matrix)
    v, w = normal(9)(expected.shape[1], 2), normal(10)(expected.shape[0], 2)
    assert matrix.shape == expected.shape and matrix.symmetric == symmetric
    assert torch.equal(matrix.dense(), expected) and torch.equal(matrix.T.dense(), expected.T)
    assert torch.allclose(matrix @ v, expected @ v) and torch.allclose(matrix.T @ w, expected.T @ w)
    assert matrix.frobenius_norm() == pytest.approx(float(expected.norm()))
    assert matrix.spectral_norm() == pytest.approx(float(torch.linalg.matrix_norm(expected, 2)))
    if rows == columns:
        assert matrix.trace() == pytest.approx(float(expected.trace()))
        assert torch.equal(matrix.diagonal(), expected.diagonal())
    if symmetric:
        assert torch.allclose(matrix.eigenvalues(), torch.linalg.eigvalsh(expected))
        assert torch.allclose(matrix.eigenvalues(3, "LA"), torch.linalg.eigvalsh(expected)[-3:])


def test_curvatures_and_back():
    """S of a loss at an output (N, L, m) = (4, 3, 2): one number, a matrix a token, or one for each sequence."""
    output, r = torch.zeros(4, 3, 2, dtype=torch.float64), normal(11)
    tokens = r(4, 3, 2, 2)
    tokens = tokens + tokens.mT
    pairs = r(4, 3, 2, 3, 2)
    pairs = pairs + pairs.permute(0, 3, 4, 1, 2)
    cases = (
        (ScalarCurvature(1.5), 1.5 * torch.eye(24).double(), 1),
        (TokenCurvature(tokens), torch.block_diag(*tokens.view(12, 2, 2)), 1),
        (PairCurvature(pairs), torch.block_diag(*pairs.reshape(4, 6, 6)), 3),
    )
    for curvature, expected, size in cases:
        found = Grouped.of(curvature, output)
        assert found.symmetric and found.size == size and torch.allclose(found.dense(), expected)
        again = Grouped.of(found.curvature(3), output)
        assert torch.allclose(again.dense(), expected)
