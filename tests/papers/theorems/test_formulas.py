"""The literal formulas as functions that other tests call: names, shapes, symmetry, small cases by hand."""

import math

import pytest
import torch
from torch import Tensor

from curvoscope.papers.theorems.attention import functional_blocks, outer_blocks
from curvoscope.papers.theorems.autodiff import differentiate, mean_square
from curvoscope.papers.theorems.calculus import (
    commutation,
    commutation_of_lemma_b2,
    khatri_rao,
    kron,
    rank,
    shuffle,
    vec,
)
from curvoscope.papers.theorems.growth import DEGREES, Scales, slope
from curvoscope.papers.theorems.linear import linear_functional_blocks, linear_outer_blocks
from curvoscope.papers.theorems.results.heads import functional_share
from curvoscope.papers.theorems.results.query_key import paper_rank_bound, single_matrix_block, visible_keys_rank_bound
from curvoscope.papers.theorems.results.slides import LogitDerivatives, spectrum

L, D, K, E = 4, 3, 2, 5


@pytest.fixture
def layer() -> tuple[Tensor, ...]:
    """X, W_Q, W_K, W_V, Y."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((L, D), (D, K), (D, K), (D, E), (L, E))
    return tuple(torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in shapes)


def test_commutation_by_hand() -> None:
    matrix = torch.arange(6, dtype=torch.float64).reshape(3, 2)
    assert torch.equal(commutation(2, 3) @ vec(matrix), vec(matrix.T))
    assert torch.equal(commutation_of_lemma_b2(3, 2) @ vec(matrix), vec(matrix.T))
    assert not torch.equal(commutation(3, 2) @ vec(matrix), vec(matrix.T))


@pytest.mark.parametrize(("m", "n"), [(1, 4), (2, 3), (5, 2), (3, 3)])
def test_the_conventions_exchange_their_arguments(m: int, n: int) -> None:
    K_mn = commutation(m, n)
    assert torch.equal(K_mn, commutation_of_lemma_b2(n, m))
    assert torch.equal(K_mn.T, commutation(n, m))
    assert torch.equal(K_mn @ K_mn.T, torch.eye(m * n, dtype=torch.float64))


def test_kron_takes_any_number_of_factors_and_any_stride() -> None:
    generator = torch.Generator().manual_seed(0)
    A, B, C = (torch.randn(3, 2, dtype=torch.float64, generator=generator) for _ in range(3))
    assert torch.equal(kron(A), A)
    torch.testing.assert_close(kron(A, B.T, C), torch.kron(torch.kron(A, B.T.contiguous()), C))
    column = torch.linalg.svd(A @ A.T).U[:, :1]
    assert kron(column, column).shape == (9, 1)


def test_khatri_rao_needs_matching_partitions() -> None:
    row = torch.ones(1, 2, dtype=torch.float64)
    assert khatri_rao([row, row], [row, row]).shape == (2, 4)
    with pytest.raises(ValueError, match="shorter"):
        khatri_rao([row, row], [row])


def test_shuffle_entries() -> None:
    entries = shuffle(2, 3).reshape(2, 3, 2, 3)
    expected = torch.einsum("ce,bf->cbef", torch.eye(2), torch.eye(3)).double()
    assert torch.equal(entries, expected)


def test_rank_of_the_zero_matrix() -> None:
    assert rank(torch.zeros(3, 4, dtype=torch.float64)) == 0
    assert rank(1e-30 * torch.eye(3, dtype=torch.float64)) == 3


def test_all_nine_pairs_with_their_transposes(layer: tuple[Tensor, ...]) -> None:
    sizes = {"Q": D * K, "K": D * K, "V": D * E}
    for blocks in (
        outer_blocks(*layer[:4]),
        functional_blocks(*layer),
        linear_outer_blocks(*layer[:4]),
        linear_functional_blocks(*layer),
    ):
        assert set(blocks) == {(row, column) for row in "QKV" for column in "QKV"}
        for (row, column), block in blocks.items():
            assert block.shape == (sizes[row], sizes[column])
            torch.testing.assert_close(block, blocks[column, row].T, rtol=1e-12, atol=1e-12)


def test_outer_blocks_are_positive_semidefinite(layer: tuple[Tensor, ...]) -> None:
    for blocks in (outer_blocks(*layer[:4]), linear_outer_blocks(*layer[:4])):
        for name in "QKV":
            eigenvalues = torch.linalg.eigvalsh(blocks[name, name])
            assert eigenvalues[0] >= -1e-12 * eigenvalues[-1]


def test_functional_blocks_vanish_without_residual(layer: tuple[Tensor, ...]) -> None:
    X, W_Q, W_K, W_V, _ = layer
    fitted = torch.softmax(X @ W_Q @ W_K.T @ X.T / math.sqrt(K), dim=-1) @ X @ W_V
    blocks = functional_blocks(X, W_Q, W_K, W_V, fitted)
    assert max(block.abs().max() for block in blocks.values()) < 1e-14


def test_single_matrix_block_is_symmetric(layer: tuple[Tensor, ...]) -> None:
    X, W_Q, W_K, W_V, Y = layer
    block = single_matrix_block(X, W_Q @ W_K.T, W_V, Y)
    assert block.shape == (D * D, D * D)
    torch.testing.assert_close(block, block.T, rtol=1e-12, atol=1e-13)


def test_reference_of_a_quadratic_by_hand() -> None:
    # F = a b for scalars, ℓ = (F − y)²: H_aa = 2b², H_ab = 2ab + 2(ab − y).
    a, b, y = (torch.tensor([value], dtype=torch.float64) for value in (2.0, 3.0, 1.0))
    found = differentiate(lambda p: p["a"] * p["b"], mean_square(y), {"a": a, "b": b})
    assert found.hessian["a", "a"].item() == 18
    assert found.outer["a", "b"].item() == 12
    assert found.functional["a", "b"].item() == 10
    assert found.hessian["a", "b"].item() == 22
    assert found.gradient["a"].item() == 30
    assert found.jacobian["b"].item() == 2


def test_slope_of_a_power() -> None:
    scales = (0.5, 1.0, 3.0)
    assert slope(scales, [7 * scale**-2.5 for scale in scales]) == pytest.approx(-2.5)


def test_scales_keep_the_logits() -> None:
    scales = Scales(X=2.0, Q=3.0, K=0.5)
    assert scales.s * scales.X**2 * scales.Q * scales.K == 1
    assert Scales(X=2.0).growth(DEGREES["outer", "Q", "Q"]) == 2**6 / 4**2


def test_degrees_of_equation_5() -> None:
    printed = {"QQ": (6, 5), "KK": (6, 5), "QK": (6, 5), "VQ": (4, 3), "VK": (4, 3)}
    found = {pair: tuple(DEGREES[part, *pair].X for part in ("outer", "functional")) for pair in printed}
    assert found == printed
    assert DEGREES["outer", "V", "V"].X == 2
    assert DEGREES["logit", "Q", "K"].X == 3


def test_rank_bounds() -> None:
    assert paper_rank_bound(d=5, k=4) == 24
    assert paper_rank_bound(d=3, k=7) == 9
    assert visible_keys_rank_bound(5, [1, 2, 3]) == 3


def test_shares_of_functional_entries() -> None:
    assert [round(functional_share(4, heads), 2) for heads in (1, 2, 4)] == [0.78, 0.41, 0.22]


def test_scalar_spectrum_has_all_eigenvalues() -> None:
    loss = LogitDerivatives(*(torch.tensor(value, dtype=torch.float64) for value in (0.5, 2.0, -1.0, 0.3)))
    w_Q, w_K = torch.tensor([1.0, 2.0, 0.0, 0.0]).double(), torch.tensor([0.0, 1.0, 1.0, 0.0]).double()
    found = spectrum(loss, w_Q, w_K)
    assert found.eigenvalues().shape == (9,)
    assert found.bulk == 0.25
    # tr H = L_vv + L_ss (|w_Q|² + |w_K|²)/k
    assert found.eigenvalues().sum().item() == pytest.approx(2.0 + 0.3 * 7 / 4)
