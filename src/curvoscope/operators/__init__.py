"""The language that everything else speaks: linear operators, Kronecker sums, matrices of blocks."""

from curvoscope.operators.base import LinearOperator
from curvoscope.operators.block_matrix import BlockHessian, BlockMatrix
from curvoscope.operators.kronecker import KroneckerSum
from curvoscope.operators.terms import Single, Term

__all__ = ["BlockHessian", "BlockMatrix", "KroneckerSum", "LinearOperator", "Single", "Term"]
