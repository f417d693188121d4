"""The block paper's attention: derivatives of F, norms of the softmax, and Theorem 1."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from curvoscope.papers.theorems.attention import jacobians, softmax_jacobian
from curvoscope.papers.theorems.autodiff import hessian, second_derivative
from curvoscope.papers.theorems.calculus import RealMatrix, commutation
from curvoscope.papers.theorems.norm_bounds import (
    SOFTMAX_BEND,
    SOFTMAX_SLOPE,
    combined,
    norm,
    stacked_bend,
    theorem_1_as_printed,
    theorem_1_corrected,
    two_dominating_keys,
)
from curvoscope.papers.theorems.post_norm_block import attention_second_derivatives, printed_coupling
from curvoscope.papers.theorems.registry import BLOCK_PAPER, OWN, Fails, excess, misfit, relative_error
from curvoscope.papers.theorems.results.instances import (
    NAMES,
    AttentionInstance,
    Draw,
    attention_output,
    jacobian_errors,
    layer,
)

SIZES = ((3, 4, 2, 4), (4, 3, 2, 3))
"""(L, d, k, e) with e = d and L ≠ d ≠ k."""
KEYS = 400
"""Keys of the counterexample with two dominating ones."""


@BLOCK_PAPER.holds("Block paper, ∂F/∂W_V, ∂F/∂W_Q", "AX ⊗ I, and (I ⊗ W_Vᵀ Xᵀ) ∂A (X ⊗ X W_K)/√k")
def attention_jacobians(seed: int) -> Iterator[float]:
    """As in Lemma B.1 of the paper on single layers."""
    yield from jacobian_errors(_layers(seed), "VQ")


@BLOCK_PAPER.corrected("Block paper, ∂F/∂W_K", "needs K_{k,d}, printed K_{d,k}: the same shape, so only d ≠ k shows it")
def key_jacobian(seed: int) -> Iterator[float]:
    """(I ⊗ W_Vᵀ Xᵀ) ∂A (X W_Q ⊗ X) K_{k,d}/√k."""
    for one in _layers(seed):
        d, k = one.W_K.shape
        found, reference = jacobians(*one.weights)["K"], one.reference.jacobian["K"]
        yield relative_error(found, reference)
        yield Fails(relative_error(found @ commutation(k, d).T @ commutation(d, k), reference))


@BLOCK_PAPER.corrected(
    "Block paper, lemma on Φ",
    "Φ_QQ, Φ_VQ, Φ_QK without 2/(L d), which belongs to the loss; I_d in Φ_QK, which does not fit, is I_L",
)
def attention_second_derivative(seed: int) -> Iterator[float]:
    """∂²F/∂W_i∂W_j; the printed factors of Φ_QK cannot even be multiplied."""
    for one in _layers(seed):
        found = attention_second_derivatives(*one.weights)
        for row, column in (("Q", "Q"), ("V", "Q"), ("Q", "K")):
            reference = _second(one, row, column)
            yield relative_error(found[row, column], reference)
            yield Fails(relative_error(2 / one.Y.numel() * found[row, column], reference))
        yield Fails(misfit(partial(printed_coupling, *one.weights)))


@OWN.holds("Block paper, lemma on Φ, other blocks", "Φ_KK, Φ_VK and, with axes exchanged, Φ_KQ, Φ_QV, Φ_KV")
def other_second_derivatives(seed: int) -> Iterator[float]:
    """The blocks that the lemma leaves out."""
    pairs = (("K", "K"), ("V", "K"), ("K", "Q"), ("Q", "V"), ("K", "V"))
    for one in _layers(seed):
        found = attention_second_derivatives(*one.weights)
        yield from (relative_error(found[pair], _second(one, *pair)) for pair in pairs)


@BLOCK_PAPER.false(
    "Block paper, Φ under uniform attention",
    "Φ_VQ = Φ_QQ = 0 only where W_Q and W_K are both 0; counterexample: W_Q = 0, any W_K",
)
def uniform_attention(seed: int) -> Iterator[float]:
    """The largest entries of Φ_VQ and Φ_QQ, the smaller of the two, at W_Q = 0."""
    for one in _layers(seed):
        found = attention_second_derivatives(one.X, torch.zeros_like(one.W_Q), one.W_K, one.W_V)
        yield from (float(found[pair].abs().max()) for pair in (("V", "Q"), ("Q", "Q")))


@BLOCK_PAPER.corrected("Block paper, ‖∂A/∂T‖", "≤ 1/2, attained by two equal keys; printed 1/L")
def softmax_slope(seed: int) -> Iterator[float]:
    """Random rows, and the row that shares its attention between two of L keys."""
    yield from (excess(norm(softmax_jacobian(row.expand(len(row), -1))), SOFTMAX_SLOPE) for row in _rows(seed))
    pair = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    attained = norm(softmax_jacobian(pair.expand(4, 4)))
    yield abs(attained - SOFTMAX_SLOPE)
    yield Fails(excess(attained, 1 / 4), "printed bound")


@BLOCK_PAPER.holds("Block paper, ‖A‖", "≤ L; in fact ≤ √L, attained where all queries pick one key")
def attention_norm(seed: int) -> Iterator[float]:
    """Rows of A are distributions."""
    rows = _rows(seed)
    matrices = [torch.stack([row for row in rows if len(row) == L][:L]) for L in (2, 3, 5)]
    one_key = torch.zeros(5, 5, dtype=torch.float64)
    one_key[:, 0] = 1
    attained = abs(norm(one_key) / math.sqrt(5) - 1)
    yield from (excess(norm(A), math.sqrt(len(A))) for A in matrices)
    yield attained


@BLOCK_PAPER.holds("Block paper, ‖∂²A/∂T²‖ ≤ 6", "true and far off: random rows stay below √6/9 = 0.272")
def softmax_bend(seed: int) -> Iterator[float]:
    """And two keys with probabilities (3 ± √3)/6 attain √6/9."""
    p = (3 - math.sqrt(3)) / 6
    attained = stacked_bend(torch.tensor([p, 1 - p], dtype=torch.float64))[0]
    found = [excess(stacked_bend(row)[0], 6.0) for row in _rows(seed)]
    below = [excess(stacked_bend(row)[0], SOFTMAX_BEND) for row in _rows(seed)]
    yield from found
    yield from below
    yield abs(attained / SOFTMAX_BEND - 1)


@BLOCK_PAPER.false(
    "Block paper, ‖∂²A/∂T²‖ as a maximum",
    "the blocks of one row stack, so the norm is not that of the largest; counterexample: two keys, √2 times it",
)
def softmax_bend_as_maximum(seed: int) -> Iterator[float]:
    """How far the stacked norm is above the largest single block."""
    yield excess(*stacked_bend(torch.tensor([0.8, 0.2], dtype=torch.float64)))


@BLOCK_PAPER.corrected(
    "Block paper, Theorem 1",
    "all six blocks, 1/2 for 1/L, ‖matrix of block bounds‖; random layers and both counterexamples",
)
def theorem_1(seed: int) -> Iterator[float]:
    """‖H‖ of one attention layer, block by block and as a whole."""
    for one in [*_scaled_layers(seed), *_counterexamples(seed)]:
        bounds, found = theorem_1_corrected(*one.weights, one.Y), loss_hessian(one)
        yield from (excess(norm(_block(one, found, *pair)), bound) for pair, bound in bounds.items())
        yield excess(norm(found), combined(bounds, NAMES))
    yield from (Fails(_printed_excess(one), "printed bound at its counterexamples") for one in _counterexamples(seed))


@BLOCK_PAPER.false(
    "Block paper, Theorem 1 as printed, W_K near 0",
    "M leaves out KK and VK, which grow with ‖W_Q‖; counterexample: W_K of size 1e-6, W_Q of size 1e3",
)
def theorem_1_without_key_blocks(seed: int) -> Iterator[float]:
    """How far ‖H‖ is above M."""
    yield _printed_excess(_small_keys(seed))


@BLOCK_PAPER.false(
    "Block paper, Theorem 1 as printed, two keys",
    f"M takes 1/L for ‖∂A/∂T‖; counterexample: two dominating keys among {KEYS}",
)
def theorem_1_with_two_keys(seed: int) -> Iterator[float]:
    """How far the value-query block alone is above the whole bound M."""
    one = _two_keys()
    yield excess(norm(_block(one, loss_hessian(one), "V", "Q")), theorem_1_as_printed(*one.weights, one.Y)[0])


def _layers(seed: int) -> list[AttentionInstance]:
    return [layer(seed, *sizes) for sizes in SIZES]


def _scaled_layers(seed: int) -> list[AttentionInstance]:
    """Tiny layers with weights and inputs of many sizes."""
    draw, found = Draw(seed, 22, 1), []
    for _ in range(12):
        L, d, k = draw.integer(2, 5), draw.integer(2, 4), draw.integer(1, 3)
        weight, size = 10 ** (0.5 * float(draw.normal(1))), 10 ** (0.4 * float(draw.normal(1)))
        X, Y = size * draw.normal(L, d), draw.normal(L, d)
        W_Q, W_K, W_V = (weight * draw.normal(d, n) for n in (k, k, d))
        found.append(AttentionInstance(X, W_Q, W_K, W_V, Y, 1 / math.sqrt(k)))
    return found


def _counterexamples(seed: int) -> list[AttentionInstance]:
    return [_small_keys(seed), _two_keys()]


def _small_keys(seed: int) -> AttentionInstance:
    draw = Draw(seed, 22, 2)
    X, Y = draw.normal(4, 3), draw.normal(4, 3)
    W_Q, W_K, W_V = 700 * draw.normal(3, 2), 7e-7 * draw.normal(3, 2), 0.7 * draw.normal(3, 3)
    return AttentionInstance(X, W_Q, W_K, W_V, Y, 1 / math.sqrt(2))


def _two_keys() -> AttentionInstance:
    return AttentionInstance(*two_dominating_keys(KEYS, 1e8), 1 / math.sqrt(2))


def _printed_excess(one: AttentionInstance) -> float:
    return excess(norm(loss_hessian(one)), theorem_1_as_printed(*one.weights, one.Y)[0])


def _block(one: AttentionInstance, found: RealMatrix, row: str, column: str) -> RealMatrix:
    """One block of the Hessian over all three weights."""
    sizes = [one.parameters[name].numel() for name in NAMES]
    return found.split(sizes)[NAMES.index(row)].split(sizes, 1)[NAMES.index(column)]


def loss_hessian(one: AttentionInstance) -> RealMatrix:
    """H over all three weights, by autodiff: of the loss alone, because `reference` also needs ∂²ℓ/∂F²."""
    shapes = [weight.shape for weight in one.parameters.values()]

    def loss(flat: Tensor) -> Tensor:
        pieces = flat.split([shape.numel() for shape in shapes])
        weights = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        return one.loss(attention_output(one.X, *weights))

    return hessian(loss, torch.cat([weight.flatten() for weight in one.parameters.values()]))


def _rows(seed: int) -> list[Tensor]:
    """Rows of attention, from nearly uniform to nearly one-hot."""
    draw = Draw(seed, 22, 3)
    return [
        torch.softmax(scale * draw.normal(L), 0)
        for L in (2, 3, 5, 10)
        for scale in (0.3, 1.0, 3.0, 6.0)
        for _ in (0, 1)
    ]


def _second(one: AttentionInstance, row: str, column: str) -> Tensor:
    return second_derivative(one.output_of, one.parameters, row, column)
