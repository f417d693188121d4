"""The networks of the papers, and all that is known of others: their blocks, layers, closed forms and files."""

from curvoscope.models.gpt2_block import GPT2

__all__ = ["GPT2"]
