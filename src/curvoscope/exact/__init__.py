"""Closed forms: the exact Hessian of single layers."""

from curvoscope.exact.attention import SelfAttention

__all__ = ["SelfAttention"]
