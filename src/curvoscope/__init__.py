"""Curvoscope: the loss Hessian of a Transformer, block by block."""

from curvoscope import exact, losses
from curvoscope.errors import CurvoscopeError
from curvoscope.estimate import Estimate
from curvoscope.operators import BlockHessian, BlockMatrix, KroneckerSum, LinearOperator

__version__ = "0.1.0.dev0"

__all__ = [
    "BlockHessian",
    "BlockMatrix",
    "CurvoscopeError",
    "Estimate",
    "KroneckerSum",
    "LinearOperator",
    "exact",
    "losses",
]
