"""Second derivatives that cost less, or are right where torch's are not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvoscope.autodiff import layer_norm, pointwise


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g v / |v|, the norm over all axes but `dim`, from operations that torch differentiates rightly."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


# The second derivative of torch's fused kernel is wrong in v.
REPLACED = {torch._weight_norm: _weight_norm}


@contextmanager
def kept_derivatives(model: nn.Module) -> Iterator[None]:
    """Inside, activations and layer norms have derivatives of ours; their outputs are the same to the bit."""
    running: set[nn.Module] = set()  # those whose derivatives are being computed, by running them

    def replace(module: nn.Module, inputs: Any, output: Any) -> Tensor | None:
        known = len(inputs) == 1 and isinstance(inputs[0], Tensor) and isinstance(output, Tensor)
        if not known or module in running or not output.requires_grad:
            return None
        if isinstance(module, nn.LayerNorm):
            return layer_norm.layer_norm(module, inputs[0], output)
        running.add(module)
        try:
            return pointwise.pointwise(module, inputs[0], output)
        finally:
            running.discard(module)

    chosen = [module for module in model.modules() if pointwise.applies(module) or layer_norm.applies(module)]
    handles = [module.register_forward_hook(replace) for module in chosen]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
