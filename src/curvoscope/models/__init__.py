"""The networks of the papers."""

from curvoscope.models.gpt2_block import GPT2

__all__ = ["GPT2"]
