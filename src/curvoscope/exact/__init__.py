"""Closed forms: the exact Hessian of single layers, of Transformer blocks and of stacks of them."""

from curvoscope.exact import bounds
from curvoscope.exact.attention.query_key_norm import QueryKeyNorm
from curvoscope.exact.attention.self_attention import SelfAttention
from curvoscope.exact.backpropagation import LowRank, OutputCurvature, backpropagate, low_rank
from curvoscope.exact.block import Stack, TransformerBlock
from curvoscope.exact.feedforward import FeedForward
from curvoscope.exact.mlp import LinearMLP
from curvoscope.exact.norms import LayerNorm, RMSNorm
from curvoscope.exact.scalar import ScalarAttention, ScalarSpectrum
from curvoscope.exact.scale import LayerScale

__all__ = [
    "FeedForward",
    "LayerNorm",
    "LayerScale",
    "LinearMLP",
    "LowRank",
    "OutputCurvature",
    "QueryKeyNorm",
    "RMSNorm",
    "ScalarAttention",
    "ScalarSpectrum",
    "SelfAttention",
    "Stack",
    "TransformerBlock",
    "backpropagate",
    "bounds",
    "low_rank",
]
