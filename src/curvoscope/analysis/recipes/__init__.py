"""Changes of weights made from the model alone: rounding, pruning, dropping, low rank, merging. Model -> state dict.

A recipe rewrites weights W (a, p), as in X @ W: columns are output channels, and groups are runs of inputs of one
channel. By default it rewrites the weights of attention and feed-forward layers, every expert of a mixture as a matrix
of its own; in a model without known layers all matrices but embeddings. `names`, shell patterns of block names, choose
others. The result has all tensors of `model.state_dict()`; unchanged tensors are the model's own.
"""

from curvoscope.analysis.recipes.merging import average, merge_lora, mix
from curvoscope.analysis.recipes.number_formats import fp8, int3, int4, int8, nf4
from curvoscope.analysis.recipes.structures import (
    drop_heads,
    drop_layers,
    drop_neurons,
    low_rank,
    prune,
    prune_2_4,
)

__all__ = [
    "average",
    "drop_heads",
    "drop_layers",
    "drop_neurons",
    "fp8",
    "int3",
    "int4",
    "int8",
    "low_rank",
    "merge_lora",
    "mix",
    "nf4",
    "prune",
    "prune_2_4",
]
