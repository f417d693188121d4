"""Closed forms: the exact Hessian of single layers."""

from curvoscope.exact.attention import SelfAttention
from curvoscope.exact.feedforward import FeedForward
from curvoscope.exact.mlp import LinearMLP
from curvoscope.exact.norms import LayerNorm, RMSNorm
from curvoscope.exact.scalar import ScalarAttention, ScalarSpectrum

__all__ = ["FeedForward", "LayerNorm", "LinearMLP", "RMSNorm", "ScalarAttention", "ScalarSpectrum", "SelfAttention"]
