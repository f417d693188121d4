"""Several heads, and a value matrix of low rank: Appendix E of the paper."""

from jaxtyping import Float
from torch import Tensor

from curvoscope.papers.theorems.attention import BlockPairs, OutputRows, TokenRows, attention_matrix
from curvoscope.papers.theorems.calculus import identity, kron, with_transposes


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
