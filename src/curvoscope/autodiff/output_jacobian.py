"""The Jacobian of a model's outputs in its weights, one backward pass for each output."""

from typing import Any

import torch
from torch import Tensor

from curvoscope.autodiff.batches import Batches
from curvoscope.autodiff.engine import Autodiff
from curvoscope.losses.objectives import logits_of


def output_jacobian(engine: Autodiff, inputs: Any) -> Tensor:
    """d F/d w, (rows, outputs per row, P) in the order of the engine's blocks."""
    (batch,) = Batches([(inputs, None)])
    with engine.running():
        weights, leaves = engine.snapshot.leaves(sorted(engine.blocks.parameters))
        F = logits_of(engine.snapshot(weights, engine.snapshot.moved(batch)))
        flat = F.reshape(batch.rows, -1)
        rows = []
        for entry in flat.flatten():
            found = torch.autograd.grad(entry, list(leaves.values()), retain_graph=True, materialize_grads=True)
            rows.append(engine.blocks.gather(dict(zip(leaves, found, strict=True))))
    return torch.stack(rows).view(*flat.shape, -1)
