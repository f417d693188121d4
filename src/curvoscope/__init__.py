"""Curvoscope: the loss Hessian of a Transformer, block by block."""

from curvoscope import analysis, approximations, attention, exact, losses, training
from curvoscope.blocks import Blocks
from curvoscope.curvature import hessian
from curvoscope.errors import CurvoscopeError
from curvoscope.estimate import Estimate
from curvoscope.families.block_maps import blocks_of
from curvoscope.operators import BlockHessian, BlockMatrix, KroneckerSum, LinearOperator
from curvoscope.settings import settings
from curvoscope.sweep import Sweep, sweep

__version__ = "0.1.0"

__all__ = [
    "BlockHessian",
    "BlockMatrix",
    "Blocks",
    "CurvoscopeError",
    "Estimate",
    "KroneckerSum",
    "LinearOperator",
    "Sweep",
    "analysis",
    "approximations",
    "attention",
    "blocks_of",
    "exact",
    "hessian",
    "losses",
    "settings",
    "sweep",
    "training",
]
