"""Appendix E: several heads, and values of low rank."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from curvoscope.papers.theorems.attention import BlockPairs, OutputRows, TokenRows, attention_matrix, jacobians
from curvoscope.papers.theorems.autodiff import LossDerivatives, Parameters, differentiate, mean_square
from curvoscope.papers.theorems.calculus import identity, kron, with_transposes
from curvoscope.papers.theorems.registry import OWN, PAPER, Fails, relative_error, relative_size
from curvoscope.papers.theorems.results.instances import Draw


def low_rank_outer_blocks(M1: TokenRows, W_O: Float[Tensor, "d r"], W_U: Float[Tensor, "r e"]) -> BlockPairs:
    """Appendix E.1: H_o over "O" and "U" of F = M1 W_O W_U, a linear MLP on the input M1."""
    L, e = len(M1), W_U.shape[1]
    moment = M1.T @ M1
    blocks = {
        ("O", "O"): kron(moment, W_U @ W_U.T),
        ("U", "U"): kron(W_O.T @ moment @ W_O, identity(e)),
        ("O", "U"): kron(moment @ W_O, W_U),
    }
    return with_transposes({pair: 2 / (L * e) * block for pair, block in blocks.items()})


def low_rank_functional_block(
    M1: TokenRows, W_O: Float[Tensor, "d r"], W_U: Float[Tensor, "r e"], Y: OutputRows
) -> Float[Tensor, "dr re"]:
    """Appendix E.1 corrected: H_f(O, U)[be, fn] = δ_ef 2/(L e) (M1ᵀM1 W_O W_U − M1ᵀY)_bn.

    Besides the part quadratic in M1 that the paper names it has a part linear in M1 and in Y.
    """
    return _coupled(2 / Y.numel() * (M1.T @ M1 @ W_O @ W_U - M1.T @ Y), W_O.shape[1])


def low_rank_functional_block_as_printed(
    M1: TokenRows, W_O: Float[Tensor, "d r"], W_U: Float[Tensor, "r e"]
) -> Float[Tensor, "dr re"]:
    """Appendix E.1 as worded: the part of H_f(O, U) that is quadratic in M1, alone."""
    return _coupled(2 / (len(M1) * W_U.shape[1]) * M1.T @ M1 @ W_O @ W_U, W_O.shape[1])


def heads_output(X: TokenRows, heads: list[tuple[Tensor, Tensor, Tensor]]) -> OutputRows:
    """Appendix E: F = Σ_h A^h X W_V^h for heads (W_Q, W_K, W_V)."""
    outputs = [attention_matrix(X, W_Q, W_K) @ X @ W_V for W_Q, W_K, W_V in heads]
    return sum(outputs[1:], outputs[0])


def functional_share(d: int, heads: int) -> float:
    """Share of entries of H_f that are not identically zero, over Q, K, O, U of all heads with width k = d/heads.

    Of the 16 blocks of a head, (O,O) and (U,U) are zero and (O,U), (U,O) are filled to 1/k; blocks between
    heads are zero: (12 + 2/k) / (16 heads).
    """
    return (12 + 2 * heads / d) / (16 * heads)


def _coupled(matrix: Float[Tensor, "d e"], rank: int) -> Float[Tensor, "dr re"]:
    """The block [(b, e), (f, n)] = δ_ef matrix[b, n]."""
    d, e = matrix.shape
    block = matrix[:, None, None, :] * identity(rank)[None, :, :, None]
    return block.reshape(d * rank, rank * e)


# ---- checks


L, D, HEADS = 4, 3, 2


@PAPER.holds("Remark E.1", "Jacobians of every head, from that head's weights alone")
def head_jacobians(seed: int) -> Iterator[float]:
    """∂F/∂W^h is the Jacobian of head h."""
    X, weights, reference = _heads(seed)
    yield from (
        relative_error(
            jacobians(X, *(weights[f"{n}{h}"] for n in ("Q", "K", "V")))[name],
            reference.jacobian[f"{name}{h}"],
        )
        for h in range(HEADS)
        for name in ("V", "Q", "K")
    )


@PAPER.holds("Appendix E, blocks between heads", "H_f(W^h, W^h') = 0 for h ≠ h', H = H_o there")
def inter_head_blocks(seed: int) -> Iterator[float]:
    """Functional blocks between heads vanish."""
    _, weights, reference = _heads(seed)
    scale = torch.stack([block.abs().max() for block in reference.functional.values()])
    yield from (
        error
        for row in weights
        for column in weights
        if row[1] != column[1]
        for error in (
            relative_size(reference.functional[row, column], scale),
            relative_error(reference.hessian[row, column], reference.outer[row, column]),
        )
    )


@PAPER.holds("Appendix E, sparsity", "share of H_f that is not zero, d_K = d_V/H, H = 1, 2, 4: (12 + 2/d_K)/(16 H)")
def functional_sparsity(seed: int) -> Iterator[float]:
    """The functional Hessian becomes sparser with the number of heads; the formula counts its entries."""
    draw = Draw(seed, 11, 1)
    d = 4
    X, Y = draw.normal(5, d), draw.normal(5, d)
    for heads in (1, 2, 4):
        k = d // heads
        shapes = {"Q": (d, k), "K": (d, k), "O": (d, k), "U": (k, d)}
        weights = {f"{n}{h}": draw.normal(*shape) for h in range(heads) for n, shape in shapes.items()}

        blocks = _low_rank_heads(X, Y, weights, heads).functional.values()
        filled = sum(int((block.abs() > 1e-13).sum()) for block in blocks)
        share = filled / sum(block.numel() for block in blocks)
        yield abs(share - functional_share(d, heads)) / functional_share(d, heads)


@PAPER.holds("Appendix E.1, equation (24)", "H_o over W_O, W_U of a linear MLP with input M1; diagonal H_f zero")
def low_rank_outer(seed: int) -> Iterator[float]:
    """F = M1 W_O W_U: quadratic in M1 and in the other factor."""
    M1, W_O, W_U, _, reference = _low_rank(seed)
    yield from (
        relative_error(block, reference.outer[pair]) for pair, block in low_rank_outer_blocks(M1, W_O, W_U).items()
    )
    yield from (relative_size(reference.functional[n, n], reference.hessian[n, n]) for n in ("O", "U"))


@PAPER.corrected(
    "Appendix E.1, functional block", "δ_ef 2/(L d_V)(M1ᵀM1 W_O W_U − M1ᵀY): also linear in M1 and Y (E10)"
)
def low_rank_functional(seed: int) -> Iterator[float]:
    """H_f(O, U)."""
    M1, W_O, W_U, Y, reference = _low_rank(seed)
    block = reference.functional["O", "U"]
    yield relative_error(low_rank_functional_block(M1, W_O, W_U, Y), block)
    yield Fails(
        relative_error(low_rank_functional_block_as_printed(M1, W_O, W_U), block), "the part quadratic in M1 alone"
    )


@OWN.holds("Appendix E.1, other blocks", "query and key blocks see W_O W_U only as a product")
def low_rank_leaves_queries(seed: int) -> Iterator[float]:
    """Splitting the value matrix changes no block that does not touch it."""
    draw = Draw(seed, 11, 2)
    X, Y, W_Q, W_K = draw.normal(L, D), draw.normal(L, D), draw.normal(D, 2), draw.normal(D, 2)
    W_O, W_U = draw.normal(D, 2), draw.normal(2, D)

    def attend(parameters: Parameters, value: Tensor) -> Tensor:
        return attention_matrix(X, parameters["Q"], parameters["K"]) @ X @ value

    loss = mean_square(Y)
    split = differentiate(
        lambda parameters: attend(parameters, parameters["O"] @ parameters["U"]),
        loss,
        {"Q": W_Q, "K": W_K, "O": W_O, "U": W_U},
    )
    whole = differentiate(
        lambda parameters: attend(parameters, parameters["V"]), loss, {"Q": W_Q, "K": W_K, "V": W_O @ W_U}
    )
    yield from (
        relative_error(split.hessian[row, column], whole.hessian[row, column])
        for row in ("Q", "K")
        for column in ("Q", "K")
    )


def _low_rank_heads(X: Tensor, Y: Tensor, weights: dict[str, Tensor], heads: int) -> LossDerivatives:
    """Derivatives of Σ_h A^h X W_O^h W_U^h in the weights Q0, K0, O0, U0, Q1, …."""

    def network(parameters: Parameters) -> Tensor:
        values = [parameters[f"O{h}"] @ parameters[f"U{h}"] for h in range(heads)]
        return heads_output(X, [(parameters[f"Q{h}"], parameters[f"K{h}"], values[h]) for h in range(heads)])

    return differentiate(network, mean_square(Y), weights)


def _heads(seed: int) -> tuple[Tensor, dict[str, Tensor], LossDerivatives]:
    """X, the weights Q0, K0, V0, Q1, … and the derivatives of the sum over the heads."""
    draw = Draw(seed, 11, 3)
    X, Y = draw.normal(L, D), draw.normal(L, 5)
    shapes = {"Q": (D, 2), "K": (D, 2), "V": (D, 5)}
    weights = {f"{n}{h}": 0.7 * draw.normal(*shape) for h in range(HEADS) for n, shape in shapes.items()}

    def network(parameters: Parameters) -> Tensor:
        return heads_output(X, [(parameters[f"Q{h}"], parameters[f"K{h}"], parameters[f"V{h}"]) for h in range(HEADS)])

    return X, weights, differentiate(network, mean_square(Y), weights)


def _low_rank(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, LossDerivatives]:
    """M1, W_O, W_U, Y and the derivatives of M1 W_O W_U."""
    draw = Draw(seed, 11, 4)
    X, W_Q, W_K, Y = draw.normal(4, 3), draw.normal(3, 2), draw.normal(3, 2), draw.normal(4, 5)
    M1, W_O, W_U = attention_matrix(X, W_Q, W_K) @ X, draw.normal(3, 2), draw.normal(2, 5)
    reference = differentiate(
        lambda parameters: M1 @ parameters["O"] @ parameters["U"], mean_square(Y), {"O": W_O, "U": W_U}
    )
    return M1, W_O, W_U, Y, reference
