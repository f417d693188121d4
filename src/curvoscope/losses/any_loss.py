"""Any loss at a layer's output."""

import math

import torch
from torch import Tensor

from curvoscope import checks
from curvoscope.errors import LossError, NonFiniteError
from curvoscope.losses.curvatures import LossAt, curvature_of, group_size
from curvoscope.losses.objectives import LossFunction, Objective, described, scalar, takes


def at(loss: LossFunction, F: Tensor, squeeze: bool) -> LossAt:
    """Value, gradient G and Hessian S of any loss at a layer's output.

    Args:
        loss: a loss of this package with its targets, or any function of the output that returns a scalar tensor.
        F: the output, (N, L, m).
        squeeze: whether the function expects (L, m).

    Returns:
        The loss around F, S in its sparsest form.

    Example:
        >>> import torch, curvoscope as cv
        >>> found = cv.losses.at(lambda F: F.pow(3).sum(), torch.ones(1, 2, 2), squeeze=False)
        >>> found.value, found.gradient[0, 0], type(found.curvature).__name__
        (4.0, tensor([3., 3.]), 'TokenCurvature')
    """
    found = loss.at(F) if isinstance(loss, Objective) else _by_autodiff(loss, F, squeeze)
    _check_value(found.value)
    return found


def _check_value(value: float) -> None:
    if not math.isfinite(value):
        raise NonFiniteError("loss", f"is {value} at this input")


def _check_derivative(which: str, derivative: Tensor) -> None:
    if not checks.all_finite(derivative):
        raise NonFiniteError(
            "loss", f"has a {which} derivative that is not finite at this input: not differentiable there, or overflows"
        )


def _by_autodiff(loss: LossFunction, F: Tensor, squeeze: bool) -> LossAt:
    """G and S by double backward, which is right also when nested torch.func transforms are not."""
    if not takes(loss, 1):
        raise LossError(
            "loss",
            f"must be a function of the layer's output alone, got {described(loss)}; pass lambda F: loss(F, targets)",
        )
    leaf = F.detach().clone().requires_grad_()
    with torch.enable_grad():
        copied = leaf.clone()  # which the loss may overwrite
        value = scalar("loss", loss(copied[0] if squeeze else copied))
        if not value.requires_grad:
            raise LossError("loss", "does not depend on the layer's output, or detaches it")
        gradient = torch.autograd.grad(value, leaf, create_graph=True)[0]
    _check_value(float(value.detach()))
    _check_derivative("first", gradient)

    def product(direction: Tensor) -> Tensor:
        if not gradient.requires_grad:  # a loss linear in F
            return torch.zeros_like(leaf)
        found = torch.autograd.grad(gradient, leaf, direction, retain_graph=True, allow_unused=True)[0]
        if found is None:
            return torch.zeros_like(leaf)
        _check_derivative("second", found)
        return found

    def products(directions: Tensor) -> Tensor:
        return torch.stack([product(direction) for direction in directions])

    return LossAt(float(value.detach()), gradient.detach(), curvature_of(products, F, group_size(product, F)))
