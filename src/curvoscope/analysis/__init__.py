"""What the Hessian says about a network."""

from curvoscope.analysis.heterogeneity import (
    PARTS,
    BlockRow,
    Part,
    block_rows,
    block_table,
    headline,
    verdict,
)

__all__ = ["PARTS", "BlockRow", "Part", "block_rows", "block_table", "headline", "verdict"]
