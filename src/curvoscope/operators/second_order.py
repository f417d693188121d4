"""Modules that keep what their second derivative needs, so that each product with the Hessian costs less."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from curvoscope.operators import layer_norm, pointwise, weight_norm


@contextmanager
def kept_derivatives(model: nn.Module) -> Iterator[None]:
    """Inside, activations and layer norms have derivatives of ours; their outputs are the same to the bit. So have
    normalised weights, which torch differentiates wrongly a second time."""
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
        with weight_norm.Differentiable() if weight_norm.applies(model) else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()
