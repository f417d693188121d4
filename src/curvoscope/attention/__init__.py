"""Attention with second derivatives in memory linear in the length of the sequence."""

from curvoscope.attention.dot_product import sdpa

__all__ = ["sdpa"]
