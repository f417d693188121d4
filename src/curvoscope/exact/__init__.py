"""Closed forms: the exact Hessian of single layers."""

from curvoscope.exact.attention import SelfAttention
from curvoscope.exact.mlp import LinearMLP
from curvoscope.exact.scalar import ScalarAttention, ScalarSpectrum

__all__ = ["LinearMLP", "ScalarAttention", "ScalarSpectrum", "SelfAttention"]
