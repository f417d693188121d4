"""The block paper's post-norm block: Theorem 4 on its derivative and Theorem 5 on its Hessian."""

from collections.abc import Iterator
from functools import lru_cache, partial

import torch

from curvoscope.papers.theorems.autodiff import (
    LossDerivatives,
    NetworkFunction,
    differentiate,
    jacobian,
    mean_square,
    second_derivative,
)
from curvoscope.papers.theorems.calculus import RealMatrix, identity, kron
from curvoscope.papers.theorems.post_norm_block import (
    ATTENTION,
    NAMES,
    PostNormBlock,
    exchanged,
    relu_jacobian,
    xi_1k,
    xi_12,
    xi_21,
    xi_21_as_printed,
)
from curvoscope.papers.theorems.registry import BLOCK_PAPER, OWN, Fails, misfit, relative_error, relative_size
from curvoscope.papers.theorems.results.instances import Draw

SIZES = (3, 4, 2, 5)
"""(L, d, k, f), all different."""


@BLOCK_PAPER.holds("Block paper, Theorem 4, chain rule", "∂Z/∂W_i = J_Z B_i, B_2 = ReLU(Y W_1) ⊗ I, B_k = J_SY J_Y G_k")
def block_derivative(seed: int) -> Iterator[float]:
    """∂S/∂W_i and ∂Z/∂W_i for all five weights, with the right mask."""
    block = _block(seed)
    yield from (relative_error(block.B[name], _first(block.sum_of, block, name)) for name in NAMES)
    yield from (relative_error(block.J_Z @ block.B[name], _first(block.output_of, block, name)) for name in NAMES)


@BLOCK_PAPER.corrected(
    "Block paper, Theorem 4", "B_1 and J_SY with the mask 1{Y W_1 > 0}; printed 1{X > 0}, which fits only where f = d"
)
def block_mask(seed: int) -> Iterator[float]:
    """∂S/∂W_1 of a block with f = d."""
    block = draw_block(seed, 3, 4, 2, 4)
    L, d = block.X.shape
    reference = _first(block.sum_of, block, "1")
    printed = kron(identity(L), block.weights["2"].T) @ relu_jacobian(block.X) @ kron(block.Y, identity(d))
    yield relative_error(block.B["1"], reference)
    yield Fails(relative_error(printed, reference))


@BLOCK_PAPER.corrected(
    "Block paper, Theorem 4, G_k",
    "B_k = J_SY J_Y ∂F/∂W_k (appendix); the main text's G_k = ∂Y/∂W_k already contains J_Y",
)
def block_attention_derivative(seed: int) -> Iterator[float]:
    """Two meanings of one symbol."""
    block = _block(seed)
    for name in ATTENTION:
        reference, of_middle = _first(block.sum_of, block, name), _first(block.middle_of, block, name)
        yield relative_error(block.B[name], reference)
        yield relative_error(block.J_SY @ of_middle, reference)
        yield Fails(relative_error(block.J_SY @ block.J_Y @ of_middle, reference), "J_SY J_Y ∂Y/∂W_k")


@BLOCK_PAPER.holds("Block paper, Theorem 5", "(J_Z ⊗ I) ξ_ij + (I ⊗ B_iᵀ) H_Z B_j, 25 blocks, right ξ_ij")
def block_hessian(seed: int) -> Iterator[float]:
    """∂²Z/∂W_i∂W_j from closed forms only."""
    block = _block(seed)
    yield from (
        relative_error(block.hessian_of_output(row, column), _second(seed, row, column, "Z"))
        for row in NAMES
        for column in NAMES
    )


@BLOCK_PAPER.holds("Block paper, Theorem 5, ξ_11 and ξ_22", "zero for ReLU")
def xi_diagonal(seed: int) -> Iterator[float]:
    """S is piecewise linear in W_1 and linear in W_2."""
    block = _block(seed)
    yield from (relative_size(_second(seed, name, name, "S"), block.B[name]) for name in ("1", "2"))


@BLOCK_PAPER.corrected("Block paper, Theorem 5, ξ_12", "what is printed is ξ_21 = ∂B_2/∂W_1")
def xi_of_hidden_weights(seed: int) -> Iterator[float]:
    """The names of two blocks exchanged."""
    block = _block(seed)
    yield relative_error(xi_21(block), _second(seed, "2", "1", "S"))
    yield Fails(relative_error(xi_21(block), _second(seed, "1", "2", "S")))


@BLOCK_PAPER.corrected(
    "Block paper, Theorem 5, ξ_21",
    "∂B_1/∂W_2 ends with K_{d,f}; its proof has K_{f,d}, and the printed block cannot be multiplied",
)
def xi_of_output_weights(seed: int) -> Iterator[float]:
    """By the paper's own definition this block is ξ_12."""
    block = _block(seed)
    (d, f), reference = block.weights["1"].shape, _second(seed, "1", "2", "S")
    yield relative_error(xi_12(block, d, f), reference)
    yield Fails(relative_error(xi_12(block, f, d), reference), "K_{f,d} instead")
    yield Fails(misfit(lambda: xi_21_as_printed(block)))


@BLOCK_PAPER.corrected("Block paper, Theorem 5, ξ_1k", "with I_{n_1}; printed with I_{n_k}, which cannot be multiplied")
def xi_of_attention_weights(seed: int) -> Iterator[float]:
    """∂B_1/∂W_k for the three weights of attention."""
    block = _block(seed)
    n = block.sizes
    yield from (relative_error(xi_1k(block, name, n["1"]), _second(seed, "1", name, "S")) for name in ATTENTION)
    yield from (Fails(misfit(partial(xi_1k, block, name, n[name]))) for name in ATTENTION)


@BLOCK_PAPER.holds("Block paper, Theorem 5, ξ_2k and ξ_kl", "with the true Φ_kl")
def xi_of_attention(seed: int) -> Iterator[float]:
    """∂B_2/∂W_k and ∂B_k/∂W_l."""
    block = _block(seed)
    pairs = [(row, column) for row in ("2", *ATTENTION) for column in ATTENTION]
    yield from (relative_error(block.xi[pair], _second(seed, *pair, "S")) for pair in pairs)


@OWN.holds("Block paper, Theorem 5, ξ_k1 and ξ_k2", "ξ_1k and ξ_2k with the parameter axes exchanged")
def xi_exchanged(seed: int) -> Iterator[float]:
    """The blocks that the paper leaves out."""
    block = _block(seed)
    pairs = [(row, column) for row in ATTENTION for column in ("1", "2")]
    yield from (relative_error(block.xi[pair], _second(seed, *pair, "S")) for pair in pairs)


@BLOCK_PAPER.corrected("Block paper, Theorem 5, H^(i,j) = H^(j,i)", "after the two parameter axes are exchanged")
def block_symmetry(seed: int) -> Iterator[float]:
    """As matrices they differ even if their shapes agree."""
    block = _block(seed)
    n = block.sizes
    yield from (
        relative_error(exchanged(_second(seed, row, column, "Z"), n[row], n[column]), _second(seed, column, row, "Z"))
        for row in NAMES
        for column in NAMES
    )
    alike = (("1", "2"), ("Q", "K"))
    yield from (
        Fails(relative_error(_second(seed, *pair, "Z"), _second(seed, *pair[::-1], "Z")), "as matrices")
        for pair in alike
    )


@BLOCK_PAPER.corrected(
    "Block paper, Hessian of the loss",
    "25 blocks; R = vec(Z − Y)ᵀ ⊗ I needs the factor 2/(L d) of the loss",
    somewhere=True,
)
def block_loss_hessian(seed: int) -> Iterator[float]:
    """2/(L d) [D_iᵀ D_j + R ∂²Z/∂W_i∂W_j]."""
    block, reference = _block(seed), _reference(seed)
    scale = torch.cat([entries.flatten() for entries in reference.hessian.values()])
    factor = 2 / block.X.numel()
    pairs = [(row, column) for row in NAMES for column in NAMES]

    def worst(value: float) -> list[float]:
        return [relative_error(block.loss_block(*pair, value), reference.hessian[pair], scale) for pair in pairs]

    yield from worst(factor)
    yield from map(Fails, worst(1.0))


def draw_block(seed: int, L: int, d: int, k: int, f: int, std: float = 0.7, size: float = 1.0) -> PostNormBlock:
    """Standard normal X (times `size`) and target, weights with standard deviation `std`."""
    draw = Draw(seed, 23, L, d, k, f)
    shapes = {"1": (d, f), "2": (f, d), "Q": (d, k), "K": (d, k), "V": (d, d)}
    X, target = size * draw.normal(L, d), draw.normal(L, d)
    return PostNormBlock(X, {name: std * draw.normal(*shape) for name, shape in shapes.items()}, target)


def loss_reference(block: PostNormBlock) -> LossDerivatives:
    """Derivatives of the square loss in all five weights."""
    return differentiate(block.output_of, mean_square(block.target), block.weights)


@lru_cache(maxsize=8)
def _block(seed: int) -> PostNormBlock:
    return draw_block(seed, *SIZES)


@lru_cache(maxsize=8)
def _reference(seed: int) -> LossDerivatives:
    return loss_reference(_block(seed))


def _first(function: NetworkFunction, block: PostNormBlock, name: str) -> RealMatrix:
    return jacobian(lambda weight: function({**block.weights, name: weight}), block.weights[name])


@lru_cache(maxsize=128)
def _second(seed: int, row: str, column: str, which: str) -> RealMatrix:
    """∂²S or ∂²Z/∂W_row∂W_column, kept because several results ask for the same block."""
    block = _block(seed)
    return second_derivative(block.sum_of if which == "S" else block.output_of, block.weights, row, column)
