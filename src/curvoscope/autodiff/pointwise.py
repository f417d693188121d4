"""Activation functions with both derivatives kept: a product with the Hessian then costs three multiplications.

y = f(x) entry by entry has the backward pass gx = f'(x) gy, whose derivatives are f'(x) and f''(x) gy. Written with
primitives, as GPT-2's GELU is, they take some forty operations on the widest tensors of the network.
"""

from typing import Any

import torch
from torch import Tensor, nn

_KINDS = (nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.Softplus, nn.Softsign, nn.LogSigmoid)
_LIBRARY = "transformers.activations"  # every class there acts on each entry alone


class _Pointwise(torch.autograd.Function):
    """x -> y, given y, f'(x) and f''(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(x, first, second)
        return y.clone()  # not a view: the model may go on in place

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None, None]:
        x, first, second = ctx.saved_tensors
        return _Derivative.apply(gy, x, first, second) if torch.is_grad_enabled() else gy * first, None, None, None


class _Derivative(torch.autograd.Function):
    """(gy, x) -> f'(x) gy."""

    @staticmethod
    def forward(ctx: Any, gy: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(first, gy * second)
        return gy * first

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> tuple[Tensor, Tensor, None, None]:
        first, second = ctx.saved_tensors
        return direction * first, direction * second, None, None


def pointwise(function: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """y = function(x), with derivatives of `function` that are known beforehand."""
    point = x.detach().requires_grad_()
    with torch.enable_grad():
        (first,) = torch.autograd.grad(function(point).sum(), point, create_graph=True)
        second = torch.autograd.grad(first.sum(), point)[0] if first.requires_grad else torch.zeros_like(point)
    result: Tensor = _Pointwise.apply(x, y.detach(), first.detach(), second)
    return result


def applies(module: nn.Module) -> bool:
    """Whether the module is a smooth function of each entry alone."""
    known = isinstance(module, _KINDS) or type(module).__module__ == _LIBRARY
    return known and not getattr(module, "inplace", False) and not any(module.parameters())
