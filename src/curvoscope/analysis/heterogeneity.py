"""How the blocks of a Hessian differ: one row per block and part, and a sentence on query and value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from curvoscope.errors import BlockNameError
from curvoscope.magnitudes import norm as norm_of
from curvoscope.operators import BlockHessian
from curvoscope.operators.block_matrix import PARTS, Part
from curvoscope.operators.eigenvalues import symmetric_eigenvalues


@dataclass(frozen=True)
class BlockRow:
    """Sizes of one block H(row, column) and part; the spectrum exists on the diagonal only and is None elsewhere.

    Args:
        row, column: names of the blocks.
        part: "outer", "functional" or "total".
        frobenius_norm: |H(row, column)|_F.
        median_absolute: the median of the absolute entries.
        trace, largest_eigenvalue, smallest_eigenvalue: of a diagonal block.
        eigenvalue_tolerance: eps(dtype) * size * spectral norm, the error of the eigensolver.
        negative_share: the share of eigenvalues below minus that tolerance, so that the null space of a rank-deficient
            block does not count as negative.

    Example:
        >>> import torch, curvoscope as cv
        >>> X, W = torch.eye(2).double(), torch.ones(2, 2).double()
        >>> H = cv.exact.SelfAttention(W, W, W).hessian(X, cv.losses.MSE(torch.zeros(2, 2).double()))
        >>> row = cv.analysis.block_table(H)[0]
        >>> row.row, row.column, row.part, row.diagonal
        ('Q', 'Q', 'outer', True)
    """

    row: str
    column: str
    part: Part
    frobenius_norm: float
    median_absolute: float
    trace: float | None = None
    largest_eigenvalue: float | None = None
    smallest_eigenvalue: float | None = None
    eigenvalue_tolerance: float | None = None
    negative_share: float | None = None

    @property
    def diagonal(self) -> bool:
        """Whether this is a diagonal block."""
        return self.row == self.column


def block_rows(H: BlockHessian) -> Iterator[BlockRow]:
    """The rows of `block_table` as they are computed: the diagonal blocks, then those above the diagonal.

    Args:
        H: a Hessian whose blocks have entries, for example of a `SelfAttention`.

    Returns:
        An iterator over the rows, three per block (outer, functional, total).

    Example:
        >>> import torch, curvoscope as cv
        >>> X, W = torch.eye(2).double(), torch.ones(2, 2).double()
        >>> H = cv.exact.SelfAttention(W, W, W).hessian(X, cv.losses.MSE(torch.zeros(2, 2).double()))
        >>> [(row.row, row.column) for row in cv.analysis.block_rows(H) if row.part == "total"]
        [('Q', 'Q'), ('K', 'K'), ('V', 'V'), ('Q', 'K'), ('Q', 'V'), ('K', 'V')]
    """
    names = H.names
    pairs = [(name, name) for name in names]
    pairs += [(row, column) for i, row in enumerate(names) for column in names[i + 1 :]]
    for row, column in pairs:
        for part in PARTS:
            yield _measure(H, row, column, part)


def block_table(H: BlockHessian) -> list[BlockRow]:
    """Norm and median entry of every block and part; trace and extreme eigenvalues of the diagonal blocks.

    Args:
        H: a Hessian whose blocks have entries, for example of a `SelfAttention`.

    Returns:
        One row per block and part, diagonal blocks first.

    Example:
        >>> import torch, curvoscope as cv
        >>> X, W = torch.eye(2).double(), torch.ones(2, 2).double()
        >>> H = cv.exact.SelfAttention(W, W, W).hessian(X, cv.losses.MSE(torch.zeros(2, 2).double()))
        >>> rows = cv.analysis.block_table(H)
        >>> len(rows), {(row.part, round(row.trace, 3)) for row in rows if row.row == row.column == "V"} == {
        ...     ("outer", 1.0), ("functional", 0.0), ("total", 1.0)
        ... }
        (18, True)
    """
    return list(block_rows(H))


def verdict(rows: Sequence[BlockRow]) -> str:
    """The measured ratio of the query block to the value block, and where it comes from, in words.

    At token t the value block is m_t m_t^T (x) W_O S_t W_O^T, with m_t the attention mean of the inputs. The
    query block is x_t x_t^T (x) W_K^T (M2_t W S_t W^T M2_t + M3_t.g_t) W_K / d_k with W = W_V W_O: degrees 6
    and 5 in the inputs against 2, at fixed attention. Without softmax the attention weights themselves have degree 2
    and no second derivative.

    Args:
        rows: a `block_table` with the blocks "Q" and "V".

    Returns:
        Two or three sentences.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> layer = cv.exact.SelfAttention(*torch.randn(3, 2, 2).double())
        >>> H = layer.hessian(torch.randn(3, 2).double(), cv.losses.MSE(torch.zeros(3, 2).double()))
        >>> print(cv.analysis.verdict(cv.analysis.block_table(H)))
        The query block is 496 times smaller than the value block in Frobenius norm ...
    """
    query, value = _find(rows, "Q", "Q", "total"), _find(rows, "V", "V", "total")
    if query.frobenius_norm == 0 or value.frobenius_norm == 0:
        zero = [name for name, row in (("query", query), ("value", value)) if row.frobenius_norm == 0]
        return f"Exactly zero: the {' and the '.join(zero)} block. There is no ratio to give."
    norm = query.frobenius_norm / value.frobenius_norm
    sentence = (
        f"The query block is {times(norm)} the value block in Frobenius norm "
        f"({query.frobenius_norm:.2e} against {value.frobenius_norm:.2e})"
    )
    if query.median_absolute and value.median_absolute:
        median = query.median_absolute / value.median_absolute
        sentence += (
            f", its median entry {times(median)} the value block's "
            f"({query.median_absolute:.2e} against {value.median_absolute:.2e})"
        )
    return f"{sentence}. {_reason(rows, norm)}"


def headline(rows: Sequence[BlockRow]) -> str:
    """The same comparison as a title: the median entries of the query and the value block.

    Args:
        rows: a `block_table` with the blocks "Q" and "V".

    Returns:
        A title of one line.

    Example:
        >>> import torch, curvoscope as cv
        >>> _ = torch.manual_seed(0)
        >>> layer = cv.exact.SelfAttention(*torch.randn(3, 2, 2).double())
        >>> H = layer.hessian(torch.randn(3, 2).double(), cv.losses.MSE(torch.zeros(3, 2).double()))
        >>> cv.analysis.headline(cv.analysis.block_table(H))
        'Query entries are 352 times smaller than value entries (median)'
    """
    query, value = (_find(rows, name, name, "total").median_absolute for name in ("Q", "V"))
    if query == 0 or value == 0:
        return "The Hessian, block by block"
    return f"Query entries are {times(query / value)} value entries (median)"


def times(ratio: float) -> str:
    """A ratio of sizes in words that a noun can follow: "12 times smaller than", "3.1 times larger than"."""
    factor, word = (ratio, "larger") if ratio >= 1 else (1 / ratio, "smaller")
    if factor < 1.05:
        return "as large as"
    return f"{factor:,.0f} times {word} than" if factor >= 9.95 else f"{factor:.1f} times {word} than"


def _reason(rows: Sequence[BlockRow], norm: float) -> str:
    """Where the ratio comes from, with softmax or without: linear attention has no functional query block."""
    no_third_moment = _find(rows, "Q", "Q", "functional").frobenius_norm == 0
    if no_third_moment and _find(rows, "Q", "V", "functional").frobenius_norm > 0:
        return (
            "Without softmax both functional parts are exactly zero and both blocks are of degree six in the inputs; "
            "the query block contains the value weights, and the value block the query weights in their place."
        )
    zero = _find(rows, "V", "V", "functional").frobenius_norm == 0
    return (
        "At fixed attention, the value block is of degree two in the inputs, through their attention mean"
        + ("; its functional part is exactly zero" if zero else "")
        + ". The query block is of degree six (outer part, with the second attention moment twice) and five "
        "(functional part, with the third moment), and contains the key and value weights: together these additional "
        f"factors are {'below' if norm < 1 else 'above'} one here."
    )


def _measure(H: BlockHessian, row: str, column: str, part: Part) -> BlockRow:
    dense = getattr(H, part)[row, column].dense()
    norm = norm_of(dense)
    median = float(np.median(dense.abs().cpu().numpy()))
    if row != column:
        return BlockRow(row, column, part, norm, median)
    eigenvalues = symmetric_eigenvalues(dense)
    tolerance = torch.finfo(dense.dtype).eps * len(dense) * float(eigenvalues.abs().max())
    return BlockRow(
        row,
        column,
        part,
        norm,
        median,
        trace=float(dense.trace()),
        largest_eigenvalue=float(eigenvalues[-1]),
        smallest_eigenvalue=float(eigenvalues[0]),
        eigenvalue_tolerance=tolerance,
        negative_share=float((eigenvalues < -tolerance).double().mean()),
    )


def _role(name: str) -> str:
    """ "Q" for "attn.Q"."""
    return name.rpartition(".")[2]


def _find(rows: Sequence[BlockRow], row: str, column: str, part: Part) -> BlockRow:
    for found in rows:
        if {_role(found.row), _role(found.column)} == {row, column} and found.part == part:
            return found
    raise BlockNameError("rows", f"there is no block {row!r}, {column!r} with part {part!r}")
