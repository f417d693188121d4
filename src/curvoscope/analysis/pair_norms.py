"""The Frobenius norm of a pair of blocks."""

from dataclasses import dataclass

from curvoscope.analysis.heterogeneity import Part
from curvoscope.estimate import Estimate


@dataclass(frozen=True)
class PairNorm:
    """|H(row, column)|_F of a part, the row before the column."""

    row: str
    column: str
    part: Part
    frobenius_norm: Estimate
