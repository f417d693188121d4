"""Attention moments: Definition 3.1, Remark 3.1, one-hot rows, Lemma C.1 and Remark C.1."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import jacfwd

from curvoscope.papers.theorems.attention import (
    first_moment,
    second_moments,
    softmax_entry_hessian,
    softmax_jacobian,
    softmax_second_derivative,
    third_moments,
    z1,
    z1_of_moments,
    z2,
    z2_of_moments,
)
from curvoscope.papers.theorems.autodiff import hessian, jacobian
from curvoscope.papers.theorems.calculus import khatri_rao, unit
from curvoscope.papers.theorems.registry import PAPER, SLIDES, Fails, relative_error, relative_size
from curvoscope.papers.theorems.results.instances import (
    DIAGONAL_AND_UPPER,
    Draw,
    draw_layer,
    rectangular_layers,
    square_layers,
)


@PAPER.holds("Definition 3.1", "derivatives 1 to 3 of log Σ_j A_ij exp(t·x_j) at t = 0")
def attention_moments(seed: int) -> Iterator[float]:
    """M1, M2, M3 are the first three cumulants of each attention row."""
    for layer in rectangular_layers(seed):
        A, X = layer.A, layer.X
        moments = first_moment(A, X), torch.stack(second_moments(A, X)), torch.stack(third_moments(A, X))
        cumulants = (torch.stack(rows) for rows in zip(*[_cumulants(row, X) for row in A], strict=True))
        yield from (relative_error(moment, cumulant) for moment, cumulant in zip(moments, cumulants, strict=True))


@PAPER.holds("Remark 3.1, Z1", "Z1 = X * M2; “∂A/∂M” in its proof is ∂A/∂T (E3)")
def first_data_term(seed: int) -> Iterator[float]:
    """Block row i of Z1 is x_iᵀ ⊗ M2_i."""
    yield from (
        relative_error(z1_of_moments(layer.X, second_moments(layer.A, layer.X)), z1(layer.X, softmax_jacobian(layer.A)))
        for layer in square_layers(seed)
    )


@PAPER.corrected("Remark 3.1, Z2", "Z2 = stack_i (K ⊗ I)(x_i x_iᵀ ⊗ M3_i), L d³ × d² (E3)")
def second_data_term(seed: int) -> Iterator[float]:
    """As printed the three partitions do not match and the size is that of M3."""
    for layer in square_layers(seed):
        A, X = layer.A, layer.X
        reference = z2(X, softmax_second_derivative(A))
        M3 = third_moments(A, X)
        yield relative_error(z2_of_moments(X, M3), reference)
        # Of the three factors only M3 has the size that the proof states.
        yield Fails(relative_error(torch.cat(M3), reference), "X * Xᵀ * M3 of the printed size L d² × d")


@PAPER.holds("Remark C.1", "L = 2, all 64 entries; the label ∂²F should read ∂²A")
def two_token_softmax(seed: int) -> Iterator[float]:
    """The explicit second derivative of the row-wise softmax for two tokens."""
    logits = Draw(seed, 31).normal(2, 2)
    A = torch.softmax(logits, dim=-1)
    explicit = torch.zeros(16, 4, dtype=torch.float64)
    for i, (first, second) in enumerate(A.tolist()):
        b1, b2, product = 1 - 2 * first, 1 - 2 * second, first * second
        block = [
            [(first - first**2) * b1, -product * b1],
            [-product * b1, -product * b2],
            [-product * b1, -product * b2],
            [-product * b2, (second - second**2) * b2],
        ]
        # Rows 1, 2, 5, 6 for the first token and 11, 12, 15, 16 for the second, as in the printed matrix.
        rows = [10 * i, 10 * i + 1, 10 * i + 4, 10 * i + 5]
        explicit[rows, 2 * i : 2 * i + 2] = torch.tensor(block, dtype=torch.float64)
    yield relative_error(explicit, _softmax_second_derivative(logits))


@PAPER.holds("Lemma C.1", "the label ∂²F should read ∂²A")
def row_softmax_second_derivative(seed: int) -> Iterator[float]:
    """∂²A/∂T∂T = blockdiag D_i, and the second derivatives of single entries."""
    for layer in square_layers(seed):
        reference = _softmax_second_derivative(layer.logits)
        yield relative_error(softmax_second_derivative(layer.A), reference)
        for j in range(len(layer.A)):
            entry = _entry_hessian(layer.logits[0], j)
            yield relative_error(softmax_entry_hessian(layer.A[0], j), entry, scale=reference)


@PAPER.holds("Equation (23)", "D_i = (1 ⊗ e_i) * ∂²A_i/∂T_i∂T_i")
def row_softmax_khatri_rao(seed: int) -> Iterator[float]:
    """The Khatri-Rao form of D_i, its blocks being unit vectors and Hessians of single entries."""
    for layer in square_layers(seed):
        L = len(layer.A)
        # Block (i, i) of the block-diagonal second derivative, row i of A against row i of T.
        reference = _softmax_second_derivative(layer.logits).reshape(L, L**3, L, L)
        for i, row in enumerate(layer.A):
            entries = [softmax_entry_hessian(row, j) for j in range(L)]
            yield relative_error(khatri_rao([unit(i, L)] * L, entries), reference[i, :, i], scale=reference)


@PAPER.holds("Section 3.2, one-hot attention", "query and key blocks relative to the value block")
def one_hot_attention(seed: int) -> Iterator[float]:
    """Rows that attend to one token have M2 = M3 = 0: all blocks that touch Q or K vanish."""
    layer = draw_layer(seed, 4, 3, 2, 3)
    nearest = torch.eye(4, dtype=torch.float64)[torch.randperm(4, generator=Draw(seed, 32).generator)]
    sharp = replace(layer, bias=200 * nearest)
    blocks = sharp.reference.hessian
    yield from (relative_size(blocks[pair], blocks["V", "V"]) for pair in DIAGONAL_AND_UPPER if pair != ("V", "V"))


@SLIDES.holds(
    "Slides, moment table",
    "H_o, H_f(V,·) and the T-functional part depend on M1 and M2 only; H_f(Q,Q), H_f(K,K) are linear in M3",
)
def moment_dependence(seed: int) -> Iterator[float]:
    """Attention rows with the same mean and covariance but another third moment."""
    base = draw_layer(seed, 12, 2, 3, 2)
    X, size = base.X, len(base.X)
    # Directions in which the row sum, the mean and the second moment of a row do not change.
    products = torch.stack([X[:, 0] ** 2, X[:, 0] * X[:, 1], X[:, 1] ** 2])
    conditions = torch.cat([torch.ones(1, size, dtype=torch.float64), X.T, products])
    free = torch.linalg.svd(conditions).Vh[len(conditions) :]
    # Among them the one that changes the third moment of the first feature most. From uniform rows, go most of
    # the way to where the first probability reaches zero, in both senses.
    direction = free.T @ free @ X[:, 0] ** 3
    step = 0.9 * direction / direction.abs().max()
    layers = [replace(base, bias=((1 + share * step) / size).log() - base.logits) for share in (-1.0, 0.0, 1.0)]
    below, middle, above = (layer.reference for layer in layers)
    coupling = [layer.logit_reference.functional["Q", "K"] for layer in layers]
    same = [relative_error(coupling[2], coupling[0])]
    same += [relative_error(above.outer[pair], below.outer[pair]) for pair in DIAGONAL_AND_UPPER]
    same += [relative_error(above.functional[pair], below.functional[pair]) for pair in (("V", "Q"), ("V", "K"))]
    third = [("Q", "Q"), ("K", "K")]
    linear = [
        relative_error((below.functional[pair] + above.functional[pair]) / 2, middle.functional[pair]) for pair in third
    ]
    yield from (
        Fails(
            relative_error(above.functional[pair], below.functional[pair]), "H_f(Q,Q) and H_f(K,K) from M1 and M2 alone"
        )
        for pair in third
    )
    yield from same + linear


def _cumulants(row: Tensor, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """First three derivatives at t = 0 of log Σ_j a_j exp(t·x_j): (d,), (d, d) and (d², d)."""
    origin = torch.zeros(X.shape[1], dtype=torch.float64)
    slope = torch.func.grad(lambda t: torch.logsumexp(X @ t + row.log(), dim=0))
    curvature = jacfwd(slope)
    return slope(origin), curvature(origin), jacfwd(curvature)(origin).reshape(-1, len(origin))


def _entry_hessian(logits: Tensor, j: int) -> Tensor:
    """Second derivatives of entry j of the softmax of one row."""
    return hessian(lambda row: torch.softmax(row, dim=-1)[j], logits)


def _softmax_second_derivative(logits: Tensor) -> Tensor:
    """∂²A/∂T∂T by automatic differentiation, shape (L⁴, L²)."""
    return jacobian(lambda T: jacobian(lambda moved: torch.softmax(moved, dim=-1), T), logits)
