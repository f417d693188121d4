"""The Frobenius norm of a pair of blocks."""

from dataclasses import dataclass

from curvoscope.estimate import Estimate
from curvoscope.operators.block_matrix import Part


@dataclass(frozen=True)
class PairNorm:
    """|H(row, column)|_F of a part, the row before the column."""

    row: str
    column: str
    part: Part
    frobenius_norm: Estimate
